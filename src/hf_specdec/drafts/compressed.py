"""Self-speculation with fewer bits: the target with compressed weights is the draft. Georganas et al. 2025 (ML-SpecQD, arXiv 2503.13565), with
one cache for both, as in Zhao et al. 2024 (QSpec, arXiv 2410.11305)."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .. import compat
from ..hints import short, what
from .base import Context
from .target_cache import TargetCacheDraft

# of a config, what says how weights are stored or computed with, or is for the caller, not what the model is
_ASIDE = {"architectures", "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "dtype", "eos_token_id", "id2label", "label2id", "output_attentions",
          "output_hidden_states", "pad_token_id", "problem_type", "quantization_config", "return_dict", "sep_token_id", "tie_word_embeddings", "torch_dtype",
          "transformers_version", "use_cache"}


class CompressedDraft(TargetCacheDraft):
    """Drafts K tokens one by one with `model`, a copy of `target` whose weights have fewer bits, on the target's own cache. It agrees with
    the target more often than a smaller model does, whatever is written, and costs what reading its weights costs: for a target in 16 or 32 bits that
    has no better draft. The first round drafts nothing.

    `mx.draft_of(target)` makes both; a copy that another library has quantised will do, too. Where the target carries states or has an
    encoder, the copy has a cache of its own.

    Raises TypeError for what is no model, ValueError for a model that is no copy of `target`, or is in another dtype or on another device.
    """

    name = "compressed"
    PRIOR = 0.9

    def __init__(self, target: PreTrainedModel, model: PreTrainedModel):
        for role, given in (("target", target), ("model", model)):
            if not isinstance(compat.unwrap(given), PreTrainedModel):
                raise TypeError(f"{role}: expected a transformers model, got {what(given)}. mx.draft_of(target) makes the whole draft.")
        check_copy(compat.unwrap(target), compat.unwrap(model))
        super().__init__(model, target)

    def start(self, context: Context) -> None:
        _check_alike(self.whole, compat.unwrap(self.model))  # either may have been cast since
        super().start(context)

    def prior(self, strength: int) -> tuple[float, float]:
        return self.PRIOR, self.PRIOR


def check_copy(target: PreTrainedModel, model: PreTrainedModel) -> None:
    """ValueError unless the layers of `model` can read what those of `target` have written."""
    if type(model).__name__ != type(target).__name__:
        raise ValueError(f"model: {type(model).__name__} is no copy of the target, a {type(target).__name__}. Pass it as assistant_model, as it is.")
    for name, own, other in _differences(model.config.to_dict(), target.config.to_dict()):
        raise ValueError(f"model: no copy of the target: its config has {name}={short(own)}, the target's {short(other)}. Pass it as assistant_model, as it is.")
    _check_alike(target, model)


def _check_alike(target: PreTrainedModel, model: PreTrainedModel) -> None:
    if (model.dtype, model.device) != (target.dtype, target.device):
        raise ValueError(f"model: it is in {model.dtype} on {model.device}, and the target, whose cache it writes, in {target.dtype} on {target.device}. Load both alike.")


def _differences(own: Any, other: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(name, own value, other value) of what two configs say differently of the model."""
    if not (isinstance(own, dict) and isinstance(other, dict)):
        return [] if own == other else [(name, own, other)]
    names = [key for key in {**own, **other} if key not in _ASIDE and not str(key).startswith("_")]
    return [each for key in names for each in _differences(own.get(key), other.get(key), f"{name}.{key}".lstrip("."))]
