"""Which layers' weights a model reads itself, instead of calling the layer: packed bytes would be wrong there.

T5 converts to the type of its layer `wo`, the routers of LongCat-Flash multiply by their weight in float32, Mamba 1 multiplies by that of `dt_proj`. What layers of
Mamba hand to functions for training alone (`SHORT_CUTS`) does not count: those functions do nothing in compressed models (`recurrences`).
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import lru_cache

from torch import nn

# slices are those of tensor-parallel code paths (BLOOM), shapes and devices are what they were
_READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\s*(?:\[|=[^=]|\.shape|\.device|\.size))")
SHORT_CUTS = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")
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
                    yield name, _without_short_cuts(inspect.getsource(inspect.unwrap(function)))
            except (OSError, TypeError):
                continue


def _without_short_cuts(source: str) -> str:
    """The source of a method without the branches that call one of SHORT_CUTS first."""
    if not any(name in source for name in SHORT_CUTS):
        return source
    lines = source.splitlines()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.If) and ast.unparse(node.body[0]).partition(" = ")[2].startswith(SHORT_CUTS):
            lines[node.lineno - 1 : node.body[-1].end_lineno] = [""] * (node.body[-1].end_lineno - node.lineno + 1)
    return "\n".join(lines)
