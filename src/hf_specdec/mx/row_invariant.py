"""`row_invariant`: a bfloat16 model on a CPU in which scoring K + 1 tokens gives the bits of decoding them one by one."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..compat import traits_of
from ..parts import read_once
from .activation import RowActivation, needs_table
from .attention import NAME
from .interface import check_attention, set_attention
from .kernels import cpu
from .linear import MXMatrix
from .plan import SEES, Choice, plan
from .quantizer import MXConfig, attach
from .routers import steady_routers, use_steady_routers
from .swap import compress_layer, replace
from .ties import untie
from .tiles import to_tiles


def row_invariant(model: PreTrainedModel) -> PreTrainedModel:
    """Make a bfloat16 model on a CPU row-invariant, in place, and return it: a token's logits are the same bits whatever other
    tokens and rows share its pass, so that speculative greedy output equals plain greedy output.

    Its weights stay as they are: dense Linear layers go into the kernels' tiles (`compress(format="bf16", lm_head="bf16")`; MX
    layers stay MX), attention becomes `hf_specdec_rows`, and activation functions that torch does not compute alike at every place
    become tables. A tied head is untied. Undo: `mx.dequantize(model)`, which also puts the activations back, and
    `model.set_attn_implementation("sdpa")`.

    Raises ValueError, before anything is changed, for a model that is not in bfloat16 on a CPU, is compiled, or has layers whose
    products or attention are not row-invariant (named, with the reason); RuntimeError where the kernels cannot be built.
    """
    _check(model)
    if _dense(model):
        _into_tiles(model)
    held = {id(module.original) for module in model.modules() if isinstance(module, RowActivation)} | read_once(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, MXMatrix):
            module.alike = True
        elif id(module) not in held and needs_table(module):
            replace(model, name, RowActivation(module))
    use_steady_routers(model)
    set_attention(model, NAME)
    return model


def _left(model: PreTrainedModel) -> list[Choice]:
    """Layers of the text model that neither are in tiles nor go there."""
    return [choice for choice in plan(model, "bf16", (), "bf16") if choice.format is None and not isinstance(choice.module, MXMatrix) and choice.reason != SEES]


def _into_tiles(model: PreTrainedModel) -> None:
    """All dense layers; the output head alone, where the others are MX already."""
    if not _has_mx(model):
        to_tiles(model)
        return
    (choice,) = _dense(model)
    layer = compress_layer(model, choice, "even", False)
    untie(model)
    if hasattr(model, "mx_report"):
        model.mx_report.layers = [layer if old.name == layer.name else old for old in model.mx_report.layers]
    config = getattr(model.config, "quantization_config", None)
    if isinstance(config, MXConfig):
        attach(model, MXConfig(config.format, config.scale_rule, config.skip, "bf16", activations=config.activations, version=config.version, layer_formats=config.layer_formats))


def _has_mx(model: PreTrainedModel) -> bool:
    return any(isinstance(module, MXMatrix) for module in model.modules())


def _dense(model: PreTrainedModel) -> list[Choice]:
    return [choice for choice in plan(model, "bf16", (), "bf16") if choice.format]


def _check(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is {type(model).__name__}: a transformers model is wanted (merge adapters first).")
    if model.dtype != torch.bfloat16 or model.device.type != "cpu":
        raise ValueError(f"model is {model.dtype} on {model.device}: row invariance is for bfloat16 on a CPU. "
                         f'Use model.to("cpu", torch.bfloat16); in float32, rounding is too fine to fork in practice.')
    if cpu.library() is None:
        raise RuntimeError(f"row_invariant needs the compiled kernels: {cpu.kernel_info()['reason']}")
    if traits_of(model, "model").states:
        raise ValueError(f"model: the layers of {type(model).__name__} that carry states do not compute a token alike alone and among others.")
    check_attention(model, NAME)
    left = _left(model)
    routing = steady_routers(model, {choice.name for choice in _dense(model)})
    left = [choice for choice in left if not any(f"{choice.name}.".startswith(f"{name}.") for name in routing)]
    if left:
        first = left[0]
        raise ValueError(f"model has {len(left)} layers whose products are not row-invariant, such as {first.name}: {first.reason}.")
    body = [choice.name for choice in _dense(model) if choice.module is not model.get_output_embeddings()]
    if _has_mx(model) and body:
        raise ValueError(f"model has MX layers and {len(body)} dense ones, such as {body[0]}: compress it without skip=.")
