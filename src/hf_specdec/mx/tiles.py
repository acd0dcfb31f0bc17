"""`to_tiles`: a model's weights as they are, in the order in which the kernels read them."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ..hints import by_name
from .compress import check_is_model, compress
from .formats import DENSE


@partial(by_name, remedy=lambda *_: ": tiles keep the weights as they are; mx.compress(model, ...) takes a format, and layers to skip")
def to_tiles(model: nn.Module) -> nn.Module:
    """Put a bfloat16 or float32 model's Linear weights and output head into the kernels' tiles, in place, and return it: the same numbers, multiplied
    faster than torch does on a CPU, and with up to eight tokens in a pass for little more than one token costs, which is what speculation needs. That is
    `compress(model, "bf16" or "fp32", lm_head=the same)`. A tied head is untied (it is then held twice). Undo: `mx.dequantize(model)`.

    Results are torch's but for rounding: float32 sums are added in another order. Raises ValueError for a model in another dtype or not on a CPU, and
    what `compress` raises.
    """
    check_is_model(model)
    name = next((name for name, fmt in DENSE.items() if fmt.dtype == getattr(model, "dtype", None)), None)
    if name is None:
        raise ValueError(f"model is in {getattr(model, 'dtype', None)}: tiles hold bfloat16 or float32; use model.to(torch.bfloat16) first.")
    if getattr(model, "device", torch.device("cpu")).type != "cpu":
        raise ValueError(f"model is on {model.device}: the tiles are those of the CPU kernels; on a GPU leave the model as it is, or compress it.")
    return compress(model, name, lm_head=name, measure=False)
