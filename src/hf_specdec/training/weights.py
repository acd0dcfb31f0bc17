"""The weights of a model as numbers, however they are kept: what a drafter that begins as a part of its target begins with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from ..lockstep import shared_by_processes
from ..mx.experts import ExpertMatrix, dense_weights
from ..mx.linear import MXLinear


def make_ready(target: PreTrainedModel) -> None:
    """Let the library that quantised a model do what it leaves for the first pass: compressed-tensors decompresses then. ValueError for a model of which this
    process has a share alone."""
    if shared_by_processes(target):
        raise ValueError("target: several processes run it together, and none has its layers whole; make the drafter of a model in one process, and load it here.")
    if getattr(target, "hf_quantizer", None) is not None:
        with torch.no_grad():
            target(torch.zeros(1, 1, dtype=torch.int64, device=target.device), use_cache=False)


def dense(model: nn.Module, dtype: torch.dtype, but: Sequence[nn.Module] = ()) -> dict[str, torch.Tensor]:
    """A module's state with the weights of its Linear layers and experts as numbers: from MX, from what another library has quantised, and with its adapters in them. dtype: of
    what it computes with; but: parts that are left out. ValueError for weights that are offloaded."""
    found, inside = {}, "."
    for name, module in model.named_modules():
        if name.startswith(inside) or isinstance(module, ExpertMatrix):  # of these the module that they are in knows what they stand for
            continue
        left_out, linear = any(module is part for part in but), _sizes(module) is not None and not _is_plain(module)
        inside = f"{name}." if left_out or linear else inside
        own = {} if left_out else numbers(module, dtype) if linear else _own(module) | dense_weights(module, torch.float32)
        check_at_hand(name, own)
        found |= {f"{name}.{key}" if name else key: part for key, part in own.items()}
    return found


def check_at_hand(name: str, weights: dict[str, torch.Tensor]) -> None:
    """ValueError for weights of the target's module `name` that are offloaded."""
    if any(part.is_meta for part in weights.values()):
        raise ValueError(f"target: the weights of {name} are offloaded; load it without that to make a draft of its parts.")


def numbers(linear: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """weight [out, in], and bias [out] if there is one, of a Linear layer. One that another library quantised, or that has adapters, is asked: `dtype` is what it
    takes, and the weight is what it makes of the identity matrix; but for layers that may round inputs and outputs by fixed steps, which are those of a text's:
    compressed-tensors', which has decompressed them, and transformers' for Gemma's checkpoints."""
    if _is_plain(linear):
        return _own(linear)
    bias = getattr(linear, "bias", None)
    if isinstance(linear, MXLinear):
        weight = linear.dequantize(torch.float32)
    elif type(linear) is nn.Linear and _is_number(linear) and not linear._modules:
        weight = linear.weight
    elif hasattr(linear, "_dequantize_weights"):
        weight = linear._dequantize_weights(dtype)
    else:
        width, _ = _sizes(linear)
        device = next((part.device for part in (*linear.parameters(), *linear.buffers())), getattr(linear, "device", None))  # SINQ's have neither
        with torch.no_grad():
            none = linear(torch.zeros(1, width, dtype=dtype, device=device))
            weight = (linear(torch.eye(width, dtype=dtype, device=device)) - none).T
            bias = None if bias is None else none[0]
    return {name: part.detach() for name, part in (("weight", weight), ("bias", bias)) if part is not None}


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a module's state has of its own. Not by `state_dict`: after that, 4-bit layers of bitsandbytes on a CPU give other numbers."""
    parts = {**module._parameters, **module._buffers}
    return {name: part.detach() for name, part in parts.items() if part is not None and name not in module._non_persistent_buffers_set}


def names(model: nn.Module) -> set[str]:
    """Those of its state."""
    return {f"{name}.{key}" if name else key for name, module in model.named_modules(remove_duplicate=False) for key in _own(module)}


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a Linear layer of any library; None for other modules."""
    every = (tuple(getattr(module, side + name, None) for side in ("in", "out")) for name in ("_features", "features"))  # the second: AutoRound's
    return next((sizes for sizes in every if all(isinstance(size, int) for size in sizes)), None)


def _is_plain(linear: nn.Module) -> bool:
    """Whether a Linear layer is a weight of numbers, and perhaps a bias, and nothing else."""
    rounds = getattr(linear, "online_quant", False)  # BitNet's, in each pass
    return _is_number(linear) and _own(linear).keys() <= {"weight", "bias"} and not linear._modules and not rounds


def _is_number(linear: nn.Module) -> bool:
    weight = _own(linear).get("weight")
    return type(weight) is torch.Tensor and weight.is_floating_point() and weight.shape == _sizes(linear)[::-1]
