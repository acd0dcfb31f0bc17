"""Rules that decide which drafted tokens are committed. One file per rule; names in `hf_specdec.registry.ACCEPTANCE`, classes imported
when they are first asked for.

`speculative_sample` is the primitive on plain distributions, for use outside language models.
"""

from ..registry import ACCEPTANCE, load
from .base import Acceptance
from .primitive import acceptance_probability, residual, speculative_sample

_CLASSES = {entry.partition(":")[2]: name for name, entry in ACCEPTANCE.items()}

__all__ = ["Acceptance", "acceptance_probability", "residual", "speculative_sample", *sorted(_CLASSES)]


def __getattr__(attribute: str):
    if attribute in _CLASSES:
        return load(ACCEPTANCE, _CLASSES[attribute], "acceptance")
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
