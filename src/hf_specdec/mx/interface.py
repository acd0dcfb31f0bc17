"""transformers' way of adding an attention implementation, and of choosing it: the one place that reads its private names here."""

from __future__ import annotations

from collections.abc import Callable

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel


def register_attention(name: str, forward: Callable) -> None:
    """Make `attn_implementation=name` known to transformers, with the masks that sdpa gets."""
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])


def check_attention(model: PreTrainedModel, name: str) -> None:
    """ValueError for a model with a part whose attention does not go through transformers' AttentionInterface."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
            raise ValueError(
                f"model: the attention of {type(part).__name__} does not go through transformers' AttentionInterface, so it "
                f"cannot become {name!r}."
            )


def set_attention(model: PreTrainedModel, name: str) -> None:
    """`model.set_attn_implementation(name)`, and ValueError if it did not take."""
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise ValueError(f"model: {type(model).__name__} did not take attn_implementation={name!r}.")
