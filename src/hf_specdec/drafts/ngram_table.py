"""N-gram counts as sorted arrays: counted with numpy, kept as safetensors, read through a memory map. Knows no model and no torch.

Order n has the contexts of n - 1 tokens (order 1: the empty one). A context is known by a hash of its tokens; two contexts that
collide share their counts, which costs an accepted token here and there and never exactness.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import mapped

FORMAT, VERSION = "hf_specdec.ngram", 1
MAX_ORDER, MAX_VOCAB = 8, 2**24

_SEED, _GOLDEN, _A, _B = 0x5851F42D4C957F2D, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def extend(state, token):
    """The hash of a context that is longer by `token` on its left (finaliser of SplitMix64; Steele, Lea, Flood 2014). Python
    ints or uint64 arrays; `& _MASK` does for ints what arrays do by themselves."""
    x = (state + (token + 1) * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _A) & _MASK
    x = ((x ^ (x >> 27)) * _B) & _MASK
    return x ^ (x >> 31)


class Level(NamedTuple):
    """The n-grams of one order, C contexts and E entries.

    keys:    int64 [C], hashes of the contexts, ascending.
    offsets: int64 [C + 1]; context i has the entries offsets[i] .. offsets[i + 1] - 1.
    tokens:  int32 [E], what followed; the most frequent first.
    counts:  int32 [E], how often.
    """

    keys: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray


DTYPES = {"keys": ("I64", "<i8"), "offsets": ("I64", "<i8"), "tokens": ("I32", "<i4"), "counts": ("I32", "<i4")}


class NGramTable:
    """levels[n - 1] holds order n. vocab_size: every token id is below it. fingerprint: of the tokenizer, "" if not known."""

    def __init__(self, levels: Sequence[Level], vocab_size: int, fingerprint: str = ""):
        self.levels, self.vocab_size, self.fingerprint = list(levels), vocab_size, fingerprint
        self.order = len(self.levels)
        self.shift = _token_bits(vocab_size) + 1

    def match(self, tail: Sequence[int], min_order: int = 1) -> tuple[int, np.ndarray, np.ndarray]:
        """(n, tokens, counts) of the longest context that ends `tail` and has been seen, of order n >= min_order; n = 0 and empty
        arrays if there is none."""
        state, keys = _SEED, [_SEED >> self.shift]
        for token in reversed(tail[max(len(tail) - self.order + 1, 0):]):
            state = extend(state, token)
            keys.append(state >> self.shift)
        for n in range(len(keys), min_order - 1, -1):
            level = self.levels[n - 1]
            i = int(level.keys.searchsorted(keys[n - 1]))
            if i < len(level.keys) and level.keys[i] == keys[n - 1]:
                entries = slice(int(level.offsets[i]), int(level.offsets[i + 1]))
                return n, level.tokens[entries], level.counts[entries]
        return 0, np.empty(0, np.int32), np.empty(0, np.int32)

    # --- counting ---------------------------------------------------------------------------------------------------

    @classmethod
    def count(cls, documents: Sequence[np.ndarray], vocab_size: int, order: int, min_count: int = 1, fingerprint: str = "",
              step=lambda: None) -> NGramTable:
        """Count the n-grams of orders 1..order that lie within one document (int arrays of ids below vocab_size).
        n-grams of order 2 and more that were seen less than `min_count` times are left out. `step()` is called per order."""
        tokens = np.concatenate([np.asarray(document, np.uint64) for document in documents])
        age = np.concatenate([np.arange(len(document)) for document in documents])
        bits = _token_bits(vocab_size)
        state = np.full(len(tokens), _SEED, np.uint64)
        levels = []
        for n in range(1, order + 1):
            if n > 1:  # state[j] hashes the n - 1 tokens before position j + n - 1
                state = extend(state[1:], tokens[: max(len(tokens) - n + 1, 0)])
            whole = age[n - 1:] >= n - 1
            packed = (state[whole] >> np.uint64(bits + 1) << np.uint64(bits)) | tokens[n - 1:][whole]
            levels.append(_level(packed.view(np.int64), bits, min_count if n > 1 else 1))
            step()
        return cls(levels, vocab_size, fingerprint)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file, whole or not at all."""
        arrays = {f"{n}.{field}": array for n, level in enumerate(self.levels, start=1) for field, array in level._asdict().items()}
        metadata = {"format": FORMAT, "version": str(VERSION), "vocab_size": str(self.vocab_size), "order": str(self.order),
                    "fingerprint": self.fingerprint}
        return mapped.save(path, arrays, metadata)

    @classmethod
    def load(cls, path: str | Path) -> NGramTable:
        """Map a file written by `save`. Everything is checked before it is used: ValueError with the file's name and the remedy."""
        file = mapped.Mapped(path, "an n-gram table", "NGramDraft", FORMAT, VERSION)
        vocab_size, order = file.number("vocab_size"), file.number("order")
        if not 1 <= order <= MAX_ORDER or not 1 <= vocab_size <= MAX_VOCAB:
            raise file.wrong(f"has order {order} and vocabulary {vocab_size} (at most {MAX_ORDER} and {MAX_VOCAB})")
        if file.header.keys() != {f"{n}.{field}" for n in range(1, order + 1) for field in DTYPES}:
            raise file.wrong(f"does not hold the arrays of orders 1 to {order}")
        levels = [Level(*(file.array(f"{n}.{field}", *DTYPES[field]) for field in DTYPES)) for n in range(1, order + 1)]
        for n, level in enumerate(levels, start=1):
            _check(file, n, level, vocab_size)
        return cls(levels, vocab_size, file.metadata.get("fingerprint", ""))


# --- counting -----------------------------------------------------------------------------------------------------------


def _token_bits(vocab_size: int) -> int:
    return max(1, (vocab_size - 1).bit_length())


def _level(packed: np.ndarray, bits: int, min_count: int) -> Level:
    """packed: int64, one number per n-gram occurrence: the context's hash with the token in the lowest `bits` bits."""
    packed.sort()
    first = np.flatnonzero(np.diff(packed, prepend=-1))
    counts = np.diff(first, append=len(packed))
    entries = packed[first]
    entries, counts = entries[counts >= min_count], counts[counts >= min_count]
    contexts = entries >> bits
    first = np.flatnonzero(np.diff(contexts, prepend=-1))
    group = np.repeat(np.arange(len(first)), np.diff(first, append=len(contexts)))
    counts = np.minimum(counts, 2**31 - 1)
    by_count = np.argsort(group << 31 | (2**31 - 1 - counts), kind="stable")
    tokens = (entries & (1 << bits) - 1)[by_count]
    return Level(contexts[first], np.append(first, len(contexts)), tokens.astype(np.int32), counts[by_count].astype(np.int32))


# --- checks of a file ---------------------------------------------------------------------------------------------------


def _check(file: mapped.Mapped, n: int, level: Level, vocab_size: int) -> None:
    """Order n is what `match` relies on."""
    keys, offsets, tokens, counts = level
    if len(offsets) != len(keys) + 1 or offsets[0] != 0 or offsets[-1] != len(tokens) or len(counts) != len(tokens):
        raise file.wrong(f"has offsets of order {n} that are out of range")
    if np.any(offsets[1:] <= offsets[:-1]):
        raise file.wrong(f"has offsets of order {n} that do not ascend")
    if np.any(keys[1:] <= keys[:-1]):
        raise file.wrong(f"has unsorted keys in order {n}")
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        raise file.wrong(f"has token ids in order {n} outside its vocabulary of {vocab_size}")
    rises = np.flatnonzero(counts[1:] > counts[:-1]) + 1
    if len(counts) and (counts.min() < 1 or not np.isin(rises, offsets).all()):
        raise file.wrong(f"has counts of order {n} that are not sorted")
