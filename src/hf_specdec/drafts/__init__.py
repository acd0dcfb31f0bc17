"""Drafts: what proposes the candidate tokens. One file per draft; names in `hf_specdec.registry.DRAFTS`. The classes
are imported when they are first asked for.
"""

from ..registry import DRAFTS, load
from .base import Context, Draft

_CLASSES = {entry.partition(":")[2]: name for name, entry in DRAFTS.items()}

__all__ = ["Context", "Draft", *sorted(_CLASSES)]


def __getattr__(attribute: str):
    if attribute in _CLASSES:
        return load(DRAFTS, _CLASSES[attribute], "draft")
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
