"""What a model is made of: the parts that drafts are made of, and what decoding reads of it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """What `root.modules()` yields, in that order, in half the time: torch makes a name for each. For what every call looks through."""
    found, waiting = {}, [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [part for part in reversed(module._modules.values()) if part is not None]
    return list(found.values())


def one_vocabulary(model: PreTrainedModel) -> bool:
    """Whether the encoder and the decoder of an encoder-decoder model share their token embeddings, and so their token ids."""
    ours, theirs = (part.get_input_embeddings() for part in (model.get_encoder(), model.get_decoder()))
    return getattr(ours, "weight", None) is not None and getattr(ours, "weight", None) is getattr(theirs, "weight", None)


def text_part(model: PreTrainedModel) -> tuple[str, torch.nn.Module]:
    """Name and module of the part of a model that decodes text; "" and the model itself where it reads nothing else."""
    config, find = getattr(model, "config", None), getattr(model, "get_decoder", None)
    if find is None or getattr(config, "is_encoder_decoder", False) or not any(hasattr(config, name) for name in ("vision_config", "audio_config", "encoder_config")):
        return "", model
    part = find()
    return next(((name, module) for name, module in model.named_modules() if module is part), ("", model))


def read_once(model: PreTrainedModel) -> set[int]:
    """The modules of a model, by id, that read images and sounds: once a prompt, and not a token."""
    name, text = text_part(model)
    if not name:
        return set()
    held = {id(module) for part in (text, model.get_output_embeddings()) if part is not None for module in part.modules()}
    return {id(module) for module in model.modules() if not any(id(part) in held for part in module.modules())}


def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of the weights that decoding one token reads: all but those of an encoder, which runs once a text, and of what reads images."""
    model = getattr(model, "get_base_model", lambda: model)()  # inside a PEFT wrapper
    everything, apart = {id(p): p.nbytes for p in model.parameters()}, read_once(model)
    for p in [p for part in model.modules() if id(part) in apart for p in part.parameters(recurse=False)]:
        everything.pop(id(p), None)
    if model.config.is_encoder_decoder:
        decoder = {id(p) for part in (model.get_decoder(), model.get_output_embeddings()) if part is not None for p in part.parameters()}
        for p in model.get_encoder().parameters():
            if id(p) not in decoder:
                everything.pop(id(p), None)
    return sum(everything.values())


def of_one_dtype(own: torch.Tensor | None, shared: torch.dtype) -> None:
    """Raise ValueError if a weight of a drafter that uses parts of its target has another dtype than those: one of them was cast after it was made."""
    if own is not None and own.is_floating_point() and own.dtype != shared:
        raise ValueError(f"assistant_model: the drafter's own weights are {own.dtype}, and the parts of the target that it uses are {shared}. Cast both, or "
                         f"make the drafter after the target is cast.")


def decoder_layers(model: PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    """Name and modules of the model's list of decoder layers; ValueError if it has none."""
    count = model.config.get_text_config().num_hidden_layers
    prefix, text = text_part(model)
    eyes = [own for own in modules(text) if own is not text and getattr(type(own), "main_input_name", "") == "pixel_values"]  # GIT's are a part of its decoder
    seeing = {id(part) for own in eyes for part in own.modules()}
    for name, module in text.named_modules(prefix=prefix):
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and id(module) not in seeing:
            return name, module
    raise ValueError(f"{type(model).__name__}: no list of its {count} layers found; a draft cannot be made from its parts.")


def read_at(model: PreTrainedModel, layers: tuple[int, ...]) -> list[torch.nn.Module]:
    """The modules whose outputs are the hidden states after these layers; the model's own count stands for what comes after the final norm, which
    is what the module puts out that has the layers (`base_model` need not run: OPT's head asks the decoder inside it)."""
    if not layers:
        return []
    name, blocks = decoder_layers(model)
    return [model.get_submodule(name.rpartition(".")[0]) if layer == len(blocks) else blocks[layer] for layer in layers]
