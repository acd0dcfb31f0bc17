"""Which layers' weights a model reads itself, instead of calling the layer: packed bytes would be wrong there.

T5 converts to the type of its layer `wo`, the routers of LongCat-Flash multiply by their weight in float32, Mamba hands weights to kernels.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import lru_cache

from torch import nn

# slices are those of tensor-parallel code paths (BLOOM), shapes and devices are what they were
_READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\s*(?:\[|=[^=]|\.shape|\.device|\.size))")
_SETS_UP = re.compile(r"_*(?:init|tie|reset)_")


@lru_cache(maxsize=None)
def weights_read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Names of children whose `.weight` a method of this class reads. Nothing is known of classes without source."""
    return frozenset(name for method, text in _methods(kind) if not _SETS_UP.match(method) for name in _READ.findall(text))


@lru_cache(maxsize=None)
def looks_at_ties(kind: type[nn.Module]) -> bool:
    """Whether what this class computes depends on whether head and embedding are one (UMT5 scales what the head gets)."""
    return any(method == "forward" and "config.tie_word_embeddings" in text for method, text in _methods(kind))


def _methods(kind: type[nn.Module]) -> Iterator[tuple[str, str]]:
    """Names and sources."""
    for base in kind.__mro__:
        if base in (nn.Module, object) or base.__module__ == "transformers.modeling_utils":
            continue
        for name, function in vars(base).items():
            try:
                if inspect.isfunction(function):
                    yield name, inspect.getsource(function)
            except (OSError, TypeError):
                continue
