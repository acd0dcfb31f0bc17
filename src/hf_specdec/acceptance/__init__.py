"""Rules that decide which drafted tokens are committed. One file per rule; names in `hf_specdec.registry.ACCEPTANCE`."""

from .base import Acceptance
from .greedy import GreedyMatching
from .sampling import SpeculativeSampling

__all__ = ["Acceptance", "GreedyMatching", "SpeculativeSampling"]
