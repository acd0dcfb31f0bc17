"""hf_specdec: speculative decoding inside transformers' `generate()` that does not change what it generates."""

from importlib import import_module
from typing import TYPE_CHECKING

from . import method

if TYPE_CHECKING:
    from .outputs import SpeculativeOutput
    from .config import SpeculativeConfig
    from .integration import SpeculativeDecoder, disable, enable
    from .trace import SpeculationTrace
    from .warm import warmup

__version__ = "0.1.0"
__all__ = ["SpeculationTrace", "SpeculativeConfig", "SpeculativeDecoder", "SpeculativeOutput", "disable", "enable", "warmup"]

# Imported when first asked for (PEP 562): torch and transformers take seconds, which `hf-specdec --help` has no use for.
_HOMES = {
    "SpeculationTrace": ".trace",
    "SpeculativeConfig": ".config",
    "SpeculativeDecoder": ".integration",
    "SpeculativeOutput": ".outputs",
    "disable": ".integration",
    "enable": ".integration",
    "warmup": ".warm",
}
_PARTS = ("acceptance", "drafts", "mx", "theory", "training", "viz")  # modules with public names of their own


method.announce()  # and in `integration` once more, which imports transformers


def __getattr__(name: str):
    if name in _PARTS:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})
