"""How much memory a recipe needs, and whether it is there: asked before anything large is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hf_specdec.memory import free_bytes

from .recipe import RecipeError

MX_BYTES = 6.25 / 8  # MXFP6: six bits an element and one scale byte for every 32
MARGIN = 0.5e9  # activations, one layer held twice while it is compressed


@dataclass(frozen=True)
class Size:
    """Parameters of a model, how many of them `mx.compress` packs, and numbers in its cache per token."""

    parameters: int
    packed: int
    cached: int


def size_of(config) -> Size:
    """Counted on a model without memory."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.initialization import no_init_weights

    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"), no_init_weights():
        model = untied(auto.from_config(config))
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if type(m) is nn.Linear and m is not head and m.in_features % 32 == 0]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    packed = sum(m.weight.numel() for m in linears)
    return Size(sum(p.numel() for p in model.parameters()), packed, 2 * config.num_hidden_layers * heads * width)


def untied(model):
    """A model whose weights are tied as its config says, but in an encoder-decoder the head, which is its own, as in T5 v1.1."""
    model.tie_weights()  # which a model that is made without weights is not yet
    if not model.config.is_encoder_decoder:
        return model
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        model.set_output_embeddings(nn.Linear(head.in_features, head.out_features, bias=False, dtype=head.weight.dtype, device=head.weight.device))
    return model


def needed_bytes(target: Size, draft: Size | None, itemsize: int, tokens: int, phases: bool) -> int:
    """Weights of both models, the packed copy unless it takes the place of the 16-bit one, caches for `tokens`, a margin."""
    models = [target] + ([draft] if draft else [])
    total = sum(m.parameters + 2 * m.cached * tokens for m in models) * itemsize + MARGIN
    return int(total if phases else total + target.packed * MX_BYTES)


PART = ", or --scale shape --layers N for a part of the model"


def check_memory(target: Size, draft: Size | None, itemsize: int, tokens: int, phases: bool, device: torch.device, remedy: str = PART) -> None:
    """RecipeError if it does not fit, with what would."""
    free = free_bytes(device)
    needed = needed_bytes(target, draft, itemsize, tokens, phases)
    if free is None or needed <= free:
        return
    text = f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free on {device}"
    smaller = needed_bytes(target, draft, itemsize, tokens, True)
    if not phases:
        text += (f". With --phases the 16-bit runs come first and the target is then compressed in place: {smaller / 1e9:.1f} GB"
                 f"{'' if smaller <= free else ', still too much'}")
    raise RecipeError(f"too little memory: {text}. Free some, or take a larger machine{remedy}.")
