"""Rules that decide which drafted tokens are committed. One file per rule; names in `hf_specdec.registry.ACCEPTANCE`.

`speculative_sample` is the primitive on plain distributions, for use outside language models.
"""

from .base import Acceptance
from .greedy import GreedyMatching
from .primitive import acceptance_probability, residual, speculative_sample
from .sampling import SpeculativeSampling

__all__ = ["Acceptance", "GreedyMatching", "SpeculativeSampling", "acceptance_probability", "residual", "speculative_sample"]
