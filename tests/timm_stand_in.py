"""Models whose images a model of timm reads (Gemma 3n, FastVLM, Perception LM), without timm: a convolution in its place."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from unittest.mock import patch

import torch
from transformers import AutoModel, PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling


class Patches(torch.nn.Module):
    """Patches of an image lie side by side as they are seen, or, where timm's model is a transformer, in a row behind a place of the whole."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.width = (config.model_args or {}).get("embed_dim")
        self.patches = torch.nn.Conv2d(3, self.width or config.hidden_size, 8, 8)

    def forward(self, pixel_values: torch.Tensor, **kwargs) -> BaseModelOutputWithPooling:
        seen = self.patches(pixel_values)
        return BaseModelOutputWithPooling(last_hidden_state=torch.nn.functional.pad(seen.flatten(2).mT, (0, 0, 1, 0)) if self.width else seen)


class _Auto:
    @staticmethod
    def from_config(config: PretrainedConfig) -> torch.nn.Module:
        return Patches(config) if config.model_type in ("gemma3n_vision", "timm_wrapper") else AutoModel.from_config(config)


@contextmanager
def without_timm(config: PretrainedConfig):
    """Inside, models of this config are made without timm."""
    kind = config.model_type
    if kind not in ("gemma3n", "fast_vlm", "perception_lm"):
        yield
        return
    with patch.object(import_module(f"transformers.models.{kind}.modeling_{kind}"), "AutoModel", _Auto):
        yield
