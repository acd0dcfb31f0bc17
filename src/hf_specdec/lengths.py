"""Models that compute other numbers once the text is long, and pieces of long prompts."""

from __future__ import annotations

from transformers import PreTrainedModel

from .caches import CACHE
from .config import MAX_ASSISTANT_TOKENS, SpeculativeConfig
from .tree import MAX_NODES

_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_chunk(size: int | None) -> None:
    """ValueError for a `prefill_chunk_size` of which no pieces of a prompt can be made."""
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"prefill_chunk_size={size!r}: expected the tokens of a prompt that a pass reads at most, 1 or more. Drop it, and the prompt is read in one pass.")


def check_rope(model: PreTrainedModel, max_length: int, role: str) -> None:
    """Refuse rotary scalings that depend on the longest position in a pass, where the text gets long enough to meet them."""
    config = model.config.get_text_config()
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in scaling.values() if isinstance(part, dict)] or [scaling]
    for part in parts:
        original = part.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None) \
            or getattr(config, "max_position_embeddings", None)
        if part.get("rope_type", part.get("type")) in _LENGTH_DEPENDENT_ROPE and original and max_length > original:
            raise ValueError(
                f"{role}: {type(model).__name__} changes its rotary scaling for the whole text beyond {original} tokens; a pass "
                f"that crosses the line would differ from plain decoding. Keep max_length at {original} or below "
                f"(here {max_length}), or use speculative=False."
            )


def check_selection(model: PreTrainedModel, max_length: int, role: str) -> None:
    """Refuse a text in which Doge attends to the `keep_window_size` keys that it selects among all of a pass, drafted ones included, and one that outgrows the window
    of Moshi's cache, to which its masks do not hold several tokens."""
    config = model.config.get_text_config()
    window = "sliding_window" if config.model_type == "moshi" else "keep_window_size"
    kept = getattr(config, window, None)
    if kept is not None and max_length + MAX_NODES > kept:
        raise ValueError(
            f"{role}: {type(model).__name__} attends to {kept} tokens ({window}) that depend on all of a pass, so in longer texts a pass "
            f"over drafted tokens would differ from plain decoding. Keep max_length at {max(kept - MAX_NODES, 0)} or below (here {max_length}), or use "
            f"speculative=False."
        )


def counts_itself(model: PreTrainedModel, length: int) -> bool:
    """Whether a pass over a text of `length` tokens may reach the positions from which on Llama 4 scales its attention, by places that it
    counts itself: the same for all rows, and along the nodes of a tree."""
    config = model.config.get_text_config()
    return bool(getattr(config, "attn_temperature_tuning", False)) and length + MAX_NODES > config.floor_scale


def check_counting(model: PreTrainedModel, length: int, role: str) -> None:
    """Refuse such a text where rows, or branches of a tree, are to share a pass."""
    if counts_itself(model, length):
        raise ValueError(
            f"{role}: {type(model).__name__} scales its attention by positions that it counts itself in long texts (attn_temperature_tuning), so rows "
            f"that accept different numbers of tokens, or branches of a tree, cannot share a pass. Keep max_length at "
            f"{max(model.config.get_text_config().floor_scale - MAX_NODES - MAX_ASSISTANT_TOKENS, 0)} or below, generate the rows one by one (batch size 1) "
            f"with chains, or use speculative=False."
        )


def check_experts(model: PreTrainedModel, rows: int, longest: int, config: SpeculativeConfig) -> None:
    """Refuse passes over more tokens than an expert of Switch Transformers takes: the first goes over the `longest` prompt and what is drafted. Before transformers 5.24,
    those of all rows count."""
    name = "max_auto_tokens" if config.num_assistant_tokens == "auto" else "num_assistant_tokens"
    together, width = rows if CACHE == "past_key_values" else 1, longest + getattr(config, name)
    if model.config.model_type == "switch_transformers" and together * width > model.config.expert_capacity:
        raise ValueError(
            f"target: an expert of {type(model).__name__} takes {model.config.expert_capacity} tokens of a pass (expert_capacity) and leaves out what is beyond, so a pass "
            f"over {width} tokens{f' of {rows} rows' if together > 1 else ''} could differ from plain decoding. Take a smaller {name}, or use speculative=False."
        )
