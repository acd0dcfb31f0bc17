"""Assistants that families of models ship with: small models without a text of their own to read, which live on what the target has made of it.
What kinds transformers has, and what of a target they read."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel

KINDS = ("shared_kv", "dflash")


def kind_of(model: Any) -> str | None:
    """The name of the draft that such an assistant is for (`registry.DRAFTS`); None for any other model.

    "shared_kv": its layers read the target's keys and values (Gemma 4). "dflash": they read hidden states of the target, and fill a block of
    masked places (Muse Glimmer).
    """
    taken = inspect.signature(type(model).forward).parameters if isinstance(model, PreTrainedModel) else {}
    return "shared_kv" if "shared_kv_states" in taken and "inputs_embeds" in taken else "dflash" if {"context_hidden_states", "noise_embeds"} <= set(taken) else None


def is_dflash(config: dict[str, Any]) -> bool:
    """Whether that is the config of a drafter of DFlash's kind as it is published (`training.dflash`)."""
    names = (*(config.get("architectures") or ()), str(config.get("speculators_model_type")))
    return "dflash_config" in config or any(word in name.lower() for name in names for word in ("dflash", "dspark", "xpress"))


def refuse_foreign(model: Any) -> None:
    """ValueError if `model` is a DFlash drafter in the code that comes with its checkpoint."""
    taken = inspect.signature(type(model).forward).parameters if isinstance(model, PreTrainedModel) else {}
    if {"noise_embedding", "target_hidden"} <= set(taken):
        raise ValueError(f"assistant_model: {type(model).__name__} is a DFlash drafter in code of its own. Pass load_drafter(\"hub:{model.config.name_or_path}\", target) of "
                         f"hf_specdec.training, which reads the same checkpoint.")


def refuse_as_a_model(model: Any, name: str) -> None:
    """ValueError if `model`, called `name`, is an assistant, where a model is wanted that reads text."""
    if kind_of(model) is not None:
        raise ValueError(f"{name} reads no text, but what a target has made of it: pass it as assistant_model, or SharedKVDraft(model) or DFlashDraft(model) where a draft goes.")


def shared_layers(target: PreTrainedModel) -> dict[str, int]:
    """By type of layer, the last one of `target` that has keys and values of its own: those that an assistant reads."""
    config = target.config.get_text_config()
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: layer for layer, kind in enumerate((getattr(config, "layer_types", None) or ())[:own])}


def auto_class(config: Any):
    """The class of transformers whose `from_pretrained` reads the checkpoint with that config as a draft: that for assistants which have no head of their own, else that
    for language models. ValueError for a published DFlash drafter's, which transformers alone does not read."""
    if is_dflash(config.to_dict()):
        raise ValueError(f"{config.name_or_path} holds a DFlash drafter; name it hub:{config.name_or_path}, or pass load_drafter(\"hub:{config.name_or_path}\", target).")
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

    headless = config.model_type.endswith("_assistant") and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModel if headless else AutoModelForCausalLM
