"""hf_specdec: speculative decoding inside transformers' `generate()` that does not change what it generates."""

from .call import SpeculativeOutput
from .config import SpeculativeConfig
from .integration import SpeculativeDecoder, disable, enable
from .trace import SpeculationTrace

__version__ = "0.1.0"
__all__ = ["SpeculationTrace", "SpeculativeConfig", "SpeculativeDecoder", "SpeculativeOutput", "disable", "enable"]
