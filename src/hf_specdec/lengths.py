"""Models that compute other numbers once the text is long."""

from __future__ import annotations

from transformers import PreTrainedModel

_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


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
