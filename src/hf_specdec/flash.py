"""Flash attention takes no mask of numbers: it knows which columns of a row hold tokens, and that the last token of a block is in the last column. That is enough
for chains, whose blocks end in the same columns in all rows; here is who cannot be told more by it."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from transformers import PreTrainedModel, modeling_flash_attention_utils

_THREE_AXES = {"glm4v_moe", "ernie4_5_vl_moe"}


def flash_of(config: Any) -> str:
    """The flash attention that models of this text config run; "" for any other attention."""
    name = getattr(config, "_attn_implementation", None) or ""
    return name if "flash" in name else ""


def why_not(model: PreTrainedModel, config: Any, kinds: set[str], encoder: str, states: tuple[int, ...]) -> str | None:
    """Why drafted tokens would not get under flash attention what plain decoding gives them; None where they do. kinds: of the masks of the layers."""
    if not getattr(model, "_supports_flash_attn", True) and not getattr(model, "_supports_flash_attn_2", False):  # the second in code from a hub
        return "its code does not support (transformers has _supports_flash_attn=False for it)"
    if model.config.model_type in _THREE_AXES:
        return "takes the three axes of its positions for several texts where there is one row (plain generate fails, too)"
    if states:
        return "nobody has tried beside layers that carry states"
    if encoder != "none" or getattr(config, "cross_attention_layers", None):
        return "takes the padding of what an encoder has read for padding of the drafted tokens"
    if "chunked" in kinds:
        return "has no chunks (attention_chunk_size)"
    if "indexed_attention" in (getattr(config, "layer_types", None) or ()):
        return "attends to more than an indexer has selected"
    if getattr(config, "alibi", False):
        return "takes no biases (alibi)"
    if "sliding" in kinds and not _hands_windows_on(model):
        return "is not told its sliding window, which is in its masks alone"
    if _aligns_at_the_top_left():
        return "lets drafted tokens see the first tokens of a text alone here (its causal mask is aligned at the top left)"
    return None


def _hands_windows_on(model: PreTrainedModel) -> bool:
    """Whether attention layers of the model name their window to the attention function; in the others it is a matter of masks."""
    return any("sliding_window=" in _code(kind) for kind in {type(part) for part in model.modules()} if "Attention" in kind.__name__)


@lru_cache
def _code(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _aligns_at_the_top_left() -> bool:
    """As the kernels of Ascend NPUs may be asked to."""
    return getattr(modeling_flash_attention_utils, "flash_attn_supports_top_left_mask", bool)()
