"""Token ids with their suffix array, in one safetensors file that is read through a memory map. Knows no model and no torch.

The suffixes are sorted by their first CONTEXT tokens: by 4 at first, then by twice as many, from the ranks of the pass before (Manber
and Myers 1990). All of it goes by chunks, so that building takes little more memory than tokens, ranks and array together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import mapped
from .progress import progress

FORMAT, VERSION = "hf_specdec.datastore", 1
CONTEXT = 16  # tokens by which suffixes are sorted
CHUNK = 2**22
MAX_TOKENS, MAX_VOCAB = 2**31 - 64, 2**21
DTYPES = {"tokens": ("I32", "<i4"), "suffixes": ("I32", "<i4"), "firsts": ("I64", "<i8")}


class Datastore:
    """tokens: int32 [N]; suffixes: int32 [N], where the suffixes begin, sorted by their first 16 tokens; firsts: int64 [vocab_size + 1],
    those that begin with token t are suffixes[firsts[t] : firsts[t + 1]]. A document ends with the id vocab_size, which no text has, so no
    match crosses it. fingerprint: of the tokenizer, "" if not known."""

    def __init__(self, tokens: np.ndarray, suffixes: np.ndarray, firsts: np.ndarray, vocab_size: int, fingerprint: str = ""):
        self.tokens, self.suffixes, self.firsts = tokens, suffixes, firsts
        self.vocab_size, self.fingerprint = vocab_size, fingerprint

    def __len__(self) -> int:
        return len(self.tokens)

    # --- searching ----------------------------------------------------------------------------------------------------

    def match(self, tail: Sequence[int], least: int = 1) -> tuple[int, int, int]:
        """(n, begin, end): suffixes[begin:end] begin with the last n tokens of `tail`, n the most (up to 16) that occur; (0, 0, 0) if
        n < least. A longer context occurs only where a shorter one does, so n itself is found by halving."""
        tail = list(tail[-CONTEXT:])
        found, low, high = (0, 0, 0), max(least, 1), len(tail)
        while low <= high:
            n = (low + high + 1) // 2 if found[0] else min(max(low, 3), high)
            begin, end = self._range(tail[len(tail) - n :])
            if begin < end:
                found, low = (n, begin, end), n + 1
            else:
                high = n - 1
        return found

    def _range(self, context: list[int]) -> tuple[int, int]:
        if min(context) < 0 or max(context) >= self.vocab_size:  # vocab_size itself stands between documents
            return 0, 0
        begin, end = int(self.firsts[context[0]]), int(self.firsts[context[0] + 1])
        if len(context) == 1:
            return begin, end
        rest = context[1:]
        begin = self._bound(rest, begin, end, False)
        return begin, self._bound(rest, begin, end, True)

    def _bound(self, rest: list[int], low: int, high: int, after: bool) -> int:
        tokens, suffixes, n = self.tokens, self.suffixes, len(rest) + 1
        while low < high:
            middle = (low + high) // 2
            place = int(suffixes[middle])
            here = tokens[place + 1 : place + n].tolist()
            if here < rest or after and here == rest:
                low = middle + 1
            else:
                high = middle
        return low

    def continuations(self, n: int, begin: int, end: int, depth: int, most: int) -> list[list[int]]:
        """What follows the first n tokens of suffixes[begin:end], `depth` tokens each, up to the end of the document; `most` of them,
        evenly spread, if there are more."""
        chosen = np.arange(begin, end) if end - begin <= most else np.linspace(begin, end - 1, most).astype(np.int64)
        places = self.suffixes[chosen].astype(np.int64)[:, None] + np.arange(n, n + depth)
        rows = self.tokens[np.minimum(places, len(self.tokens) - 1)].tolist()  # the last token ends a document
        return [row[: row.index(self.vocab_size)] if self.vocab_size in row else row for row in rows]

    # --- building -------------------------------------------------------------------------------------------------------

    @classmethod
    def build(cls, documents: Sequence[np.ndarray], vocab_size: int, fingerprint: str = "") -> Datastore:
        """documents: integer arrays of ids below vocab_size. A bar on standard error counts the passes over chunks."""
        if not 1 <= vocab_size < MAX_VOCAB:
            raise ValueError(f"vocab_size={vocab_size!r} must be in 1..{MAX_VOCAB - 1}.")
        total = sum(len(document) + 1 for document in documents if len(document))
        if not 0 < total <= MAX_TOKENS:
            raise ValueError(f"a datastore holds 1 to {MAX_TOKENS} tokens; these documents have {total}.")
        tokens, at = np.empty(total, np.int32), 0
        for document in documents:
            if len(document):
                tokens[at : at + len(document)] = document
                tokens[at + len(document)] = vocab_size
                at += len(document) + 1
        suffixes = _sorted_suffixes(tokens, vocab_size)
        firsts = np.concatenate([[0], np.cumsum(np.bincount(tokens, minlength=vocab_size + 1))[:vocab_size]]).astype(np.int64)
        return cls(tokens, suffixes, firsts, vocab_size, fingerprint)

    # --- files ------------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write a safetensors file, whole or not at all."""
        metadata = {"format": FORMAT, "version": str(VERSION), "vocab_size": str(self.vocab_size), "fingerprint": self.fingerprint}
        return mapped.save(path, {name: getattr(self, name) for name in DTYPES}, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Datastore:
        """Map a file written by `save`. Header, sizes, and the range of every number are checked before any is used (one sequential
        read of the file): ValueError with the file's name and the remedy."""
        file = mapped.Mapped(path, "a datastore", "RetrievalDraft", FORMAT, VERSION)
        vocab_size = file.number("vocab_size")
        if file.header.keys() != DTYPES.keys() or not 1 <= vocab_size < MAX_VOCAB:
            raise file.wrong("does not hold what a datastore holds")
        made = cls(*(file.array(name, *DTYPES[name]) for name in DTYPES), vocab_size, file.metadata.get("fingerprint", ""))
        made._check(file)
        return made

    def _check(self, file: mapped.Mapped) -> None:
        tokens, suffixes, firsts = self.tokens, self.suffixes, self.firsts
        n, counts = len(tokens), np.zeros(self.vocab_size + 1, np.int64)
        if not 0 < n <= MAX_TOKENS or len(suffixes) != n or len(firsts) != self.vocab_size + 1 or int(tokens[-1]) != self.vocab_size:
            raise file.wrong("has arrays that do not fit together")
        for at in range(0, n, CHUNK):
            part, places = tokens[at : at + CHUNK], suffixes[at : at + CHUNK]
            if part.min() < 0 or part.max() > self.vocab_size:
                raise file.wrong(f"has token ids outside its vocabulary of {self.vocab_size}")
            if places.min() < 0 or places.max() >= n:
                raise file.wrong("has suffixes outside its text")
            counts += np.bincount(part, minlength=self.vocab_size + 1)
        if firsts[0] != 0 or np.any(np.diff(firsts) != counts[:-1]):
            raise file.wrong("has an index that does not fit its text")


# --- sorting --------------------------------------------------------------------------------------------------------------


def _sorted_suffixes(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Where the suffixes begin, sorted by their first 16 tokens; what lies beyond the end counts as smallest."""
    n, bits = len(tokens), (vocab_size + 1).bit_length()
    in_key = min(64 // bits, 4)
    buckets = _buckets(tokens, vocab_size)
    steps = 2 if in_key == 4 else 3
    with progress("Sorting suffixes", range(len(buckets) * (1 + steps))) as bar:
        bar = iter(bar)
        suffixes = np.empty(n, np.int32)
        fill = 0
        for low, high in buckets:
            places = _where(tokens, low, high)
            key = _key(tokens, places, in_key, bits)
            suffixes[fill : fill + len(places)] = places[np.argsort(key)]
            fill += len(places)
            next(bar)
        width = in_key
        ranks = _ranks(suffixes, lambda part: _key(tokens, part, in_key, bits))
        while width < CONTEXT:
            _refine(suffixes, ranks, width, bar)
            width *= 2
    return suffixes


def _buckets(tokens: np.ndarray, vocab_size: int) -> list[tuple[int, int]]:
    """Ranges of first tokens with about CHUNK suffixes each (more where one token alone has more)."""
    ends = np.cumsum(np.bincount(tokens, minlength=vocab_size + 1))
    cuts = np.unique(np.searchsorted(ends, np.arange(CHUNK, len(tokens), CHUNK)) + 1)
    cuts = [0, *(int(cut) for cut in cuts if cut <= vocab_size), vocab_size + 1]
    return list(zip(cuts[:-1], cuts[1:]))


def _where(tokens: np.ndarray, low: int, high: int) -> np.ndarray:
    parts = [np.flatnonzero((part >= low) & (part < high)) + at for at in range(0, len(tokens), CHUNK) for part in [tokens[at : at + CHUNK]]]
    return np.concatenate(parts).astype(np.int32)


def _key(tokens: np.ndarray, places: np.ndarray, width: int, bits: int) -> np.ndarray:
    """The first `width` tokens of the suffixes at `places`, as the digits of a uint64; 0 is what lies beyond the end."""
    key = np.zeros(len(places), np.uint64)
    for i in range(width):
        at = places.astype(np.int64) + i
        digit = np.where(at < len(tokens), tokens[np.minimum(at, len(tokens) - 1)] + 1, 0)
        key = (key << np.uint64(bits)) | digit.astype(np.uint64)
    return key


def _ranks(suffixes: np.ndarray, key) -> np.ndarray:
    """int32 [N]: of every place the first position in `suffixes` of those with an equal key."""
    ranks, last, first = np.empty(len(suffixes), np.int32), None, 0
    for at in range(0, len(suffixes), CHUNK):
        part = suffixes[at : at + CHUNK]
        keys = key(part)
        new = np.empty(len(keys), bool)
        new[0] = last is None or keys[0] != last
        np.not_equal(keys[1:], keys[:-1], out=new[1:])
        position = np.maximum.accumulate(np.where(new, np.arange(at, at + len(keys)), first))
        ranks[part], first, last = position, int(position[-1]), keys[-1]
    return ranks


def _refine(suffixes: np.ndarray, ranks: np.ndarray, width: int, bar) -> None:
    """Sort groups of equal rank by the rank of what comes `width` tokens later, in place; then the ranks are those of twice the width."""
    n, at, new = len(suffixes), 0, np.empty_like(ranks)
    while at < n:
        end = min(at + CHUNK, n)
        if end < n:  # a group stays whole
            rank = int(ranks[suffixes[end]])
            end = rank if rank > at else at + int(_group_end(suffixes, ranks, at, end))
        part = suffixes[at:end]
        later = part.astype(np.int64) + width
        second = np.where(later < n, ranks[np.minimum(later, n - 1)], -1).astype(np.int64)
        first = ranks[part].astype(np.int64)
        order = np.argsort((first << 32) + second)
        part, first, second = part[order], first[order], second[order]
        suffixes[at:end] = part
        starts = np.ones(len(part), bool)
        starts[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
        new[part] = np.maximum.accumulate(np.where(starts, np.arange(at, end), 0))
        at = end
        next(bar, None)
    ranks[:] = new


def _group_end(suffixes: np.ndarray, ranks: np.ndarray, at: int, end: int) -> int:
    """Length of the group that begins at `at` and reaches beyond `end`."""
    rank = int(ranks[suffixes[at]])
    while end < len(suffixes) and int(ranks[suffixes[end]]) == rank:
        part = ranks[suffixes[end : end + CHUNK]]
        other = np.flatnonzero(part != rank)
        if len(other):
            return end + int(other[0]) - at
        end += len(part)
    return end - at
