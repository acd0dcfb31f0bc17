"""Models that count positions themselves, from the length of their cache on: told for each row of a ragged batch where it begins."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

FIRST = {"paligemma": 1}  # what plain generate makes of position 0, where that is another
WITHOUT_PADDING = {"m2m_100", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "speecht5"}  # what their decoders count
BY_IDS = "create_position_ids_from_input_ids"  # the method of modules that leave padding out
COUNTED_FROM = {"cache_length", "past_key_values_length"}  # what embeddings of positions call the number of tokens that come before


def counting(model: nn.Module) -> list[nn.Module]:
    """The modules that embed absolute positions and count them: of the decoder, where there is an encoder. (Those of RoFormer are rotated into keys and queries, to
    which only distances matter.)"""
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "embed_positions" and "encoder" not in name.split(".")]
    if (own := writer(model)) is not model:  # as RoBERTa's do
        found += [module for name, module in own.named_modules() if name.rpartition(".")[2] == "embeddings" and hasattr(module, BY_IDS)]
    return [module for module in found if model.config.get_text_config().model_type != "roformer" and COUNTED_FROM & inspect.signature(module.forward).parameters.keys()]


def writer(model: PreTrainedModel) -> PreTrainedModel:
    """What of a model writes the text: the decoder of one that is composed of two models, else the model itself."""
    return model.decoder if model.config.model_type.endswith("encoder-decoder") else model


def blank(model: PreTrainedModel) -> int | None:
    """The token that the model's decoder leaves out where it counts the positions of a pass; None for most."""
    own = writer(model)
    by_ids = own is not model and any(hasattr(part, BY_IDS) for part in own.modules())
    return own.config.pad_token_id if by_ids or model.config.model_type in WITHOUT_PADDING else None


def placed(model: PreTrainedModel, forward: Mapping[str, Any]) -> bool:
    """Whether a model whose forward takes these arguments is told positions, and counts from 0 where it is not."""
    if writer(model) is not model:
        return "position_ids" in inspect.signature(writer(model).forward).parameters and not counting(model) and blank(model) is None
    if model.config.is_encoder_decoder:
        return "decoder_position_ids" in forward and not counting(model)
    return "position_ids" in forward


def max_positions(model: PreTrainedModel, config: Any) -> int | None:
    """The longest text; decoders like RoBERTa's begin to count behind the number of their padding token."""
    limits = ("max_target_positions", "max_position_embeddings", "max_seq_len")
    most = next((value for limit in limits if (value := getattr(config, limit, None)) and value > 0), None)
    tables = [module for module in counting(model) if hasattr(module, "position_embeddings")]
    return min(map(_positions, tables), default=most)


def outgrown(modules: list[nn.Module], end: int) -> bool:
    """Whether one of these modules has no position for the last of `end` tokens. (Told where a row begins, it would not fail.)"""
    return any(_positions(module) < end for module in modules)


def _positions(module: nn.Module) -> float:
    """How many a counting module has; inf where it makes as many as are asked for."""
    if hasattr(module, "position_embeddings"):
        return module.position_embeddings.num_embeddings - module.padding_idx - 1
    return module.num_embeddings - getattr(module, "offset", 0) if isinstance(module, nn.Embedding) else float("inf")


@contextmanager
def counted_by_row(modules: list[nn.Module], starts: list[int], width: int) -> Iterator[None]:
    """Inside, a pass of this thread over blocks of `width` tokens embeds the positions of row b from starts[b] on."""
    thread = get_ident()  # others, in the midst of a pass when hooks come or go, may leave kwargs out

    def before(module, args, kwargs=None):  # what comes out for all rows alike is not used, and must not fail
        if get_ident() == thread:
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            return (), _moved(module, given, max(starts), width)[0]

    def after(module, args, *rest):
        if get_ident() == thread:
            kwargs, _ = rest
            return torch.stack([_of_row(module, kwargs, b, start, width, len(starts)) for b, start in enumerate(starts)])

    handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]
    handles += [module.register_forward_hook(after, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_row(module: nn.Module, given: dict, b: int, start: int, width: int, batch: int) -> torch.Tensor:
    """What the module makes, [width, H], of row b alone, which begins at `start`."""
    given = {name: value[b : b + 1] if name != "position_ids" and torch.is_tensor(value) and len(value) == batch else value for name, value in given.items()}
    given, late = _moved(module, given, start, width)
    out = module.forward(**given)
    out = out.reshape(-1, *out.shape[-2:])[0]
    return out if not late else out[(torch.arange(width, device=out.device) + late).clamp(max=width - 1)]


def _moved(module: nn.Module, given: dict, start: int, width: int) -> tuple[dict, int]:
    """The arguments such that the block begins at `start`; where others make a row wider than a text can be, so much before that the block ends in the last position
    there is, and by how much."""
    count = next(name for name in COUNTED_FROM if name in given)
    if hasattr(module, "position_embeddings"):  # which embeds the tokens, too
        positions = getattr(module, BY_IDS)(given["input_ids"], module.padding_idx, start)
        return given | {count: start, "position_ids": positions.clamp(max=module.position_embeddings.num_embeddings - 1)}, 0
    first = min(start, _positions(module) - width)
    positions = given.get("position_ids")
    return given | {count: first} | ({} if positions is None else {"position_ids": positions + (first - given[count])}), start - first
