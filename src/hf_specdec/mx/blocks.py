"""Checkpoints whose experts were published in MXFP4 (gpt-oss): read as they are, bit for bit. transformers makes 16-bit numbers of them on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from .config import MXConfig
from .experts import PREFIX, ExpertWeights, matrices
from .formats import BLOCK
from .plan import Choice
from .stored import stored_tensors

BLOCKS = "mxfp4"  # transformers' method: `gate_up_proj_blocks` uint8 [experts, n, K/32, 16], two codes a byte, the first one low; `_scales` [experts, n, K/32]
PARTS = {"blocks": "weight", "scales": "weight_scale"}


class Rows(ConversionOps):
    """The bytes of all experts, one output's after another's."""

    def convert(self, input_dict, source_patterns=None, target_patterns=None, **kwargs) -> dict[str, torch.Tensor]:
        whole = next(iter(input_dict.values()))
        whole = whole[0] if isinstance(whole, list) else whole
        return {target_patterns[0]: whole.reshape(whole.shape[0] * whole.shape[1], -1)}


class BlocksConfig(MXConfig):
    """Experts as such a checkpoint has them, in MXFP4; everything else as it is, in tiles. Saved, it is an `MXConfig`."""

    def __init__(self, **unknown):
        super().__init__("bf16", lm_head="bf16", layer_formats={"experts": "mxfp4_e2m1"})

    def holds(self, choice: Choice) -> bool:
        return isinstance(choice.module, ExpertWeights)

    def check_stored(self, model: torch.nn.Module, files: Iterable[str | os.PathLike]) -> None:
        """ValueError for blocks and scales of another type or order: the number of bytes would not tell."""
        stored = stored_tensors(files)
        for owner, name, layer in matrices(model):
            own = next(path for path, module in model.named_modules() if module is owner)
            count, n, k = layer.shape
            for part, shape in (("blocks", (count, n, k // BLOCK, BLOCK // 2)), ("scales", (count, n, k // BLOCK))):
                kind, found = stored.get(f"{own}.{name}_{part}", ("U8", shape))
                if (kind, found) != ("U8", shape):
                    raise ValueError(f"{own}.{name}_{part} is {kind} {list(found)} in the checkpoint, not U8 (uint8) {list(shape)}: not as gpt-oss was published.")

    def conversions(self) -> list[WeightConverter]:
        return [WeightConverter([f"experts.{name}_{part}"], [f"experts.{PREFIX}{name}.{tensor}"], [Rows()])
                for name in ("gate_up_proj", "down_proj") for part, tensor in PARTS.items()]


def is_blocks(config: Any) -> bool:
    """Whether a model's config says that its checkpoint holds such experts."""
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    return getattr(method, "value", method) == BLOCKS
