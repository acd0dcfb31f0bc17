"""Retrieval from a datastore: the most frequent continuations of the last tokens in a large body of text. He et al. 2023 (REST, arXiv
2311.08252). Proposals are point masses; no forward is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import nsmallest
from pathlib import Path

from ..hints import check_int
from ..proposal import Proposal
from .base import Context, Draft, Guess
from .datastore import Datastore
from .growth import Branches, together
from .ngram import check_tokenizer, fingerprint, read_texts, read_tokens


class RetrievalDraft(Draft):
    """Looks the longest suffix of the row (up to 16 tokens) up in a datastore and proposes a tree of K tokens: those that most often
    followed, of at most SAMPLES places.

    branches:  most tokens tried after each one; 1 proposes the chain of the most frequent ones.
    min_match: shortest match that counts.

    The rows of a batch share one shape of tree (`branches` > 1), so what is drawn for a row depends on its neighbours (its law does not).
    """

    name = "retrieval"
    trusted = True
    cost_ratio = 0.0
    SAMPLES, DEPTH = 32, 12

    def __init__(self, datastore: Datastore, branches: int = 4, min_match: int = 2):
        if not isinstance(datastore, Datastore):
            raise TypeError(f"datastore: expected a Datastore, got {type(datastore).__name__}; RetrievalDraft.from_texts, from_tokens and load make one.")
        for name, value, most in (("branches", branches, 16), ("min_match", min_match, 16)):
            check_int(name, value, 1, most)
        self.datastore, self.branches, self.min_match, self.may_branch = datastore, branches, min_match, branches > 1

    # --- making and keeping -----------------------------------------------------------------------------------------

    @classmethod
    def from_texts(cls, texts: Iterable[str | Path], tokenizer, **options) -> RetrievalDraft:
        """A datastore of texts; a Path is a text file (UTF-8). Matches do not cross texts, and no special tokens are added."""
        documents, vocab_size = read_texts(texts, tokenizer)
        return cls(Datastore.build(documents, vocab_size, fingerprint(tokenizer)), **options)

    @classmethod
    def from_tokens(cls, sources: Iterable, vocab_size: int | None = None, tokenizer=None, **options) -> RetrievalDraft:
        """A datastore of token ids. A source is a sequence of ids, or the path of a token file: `.npy` (one row of integers, one
        document) or text (ids separated by blanks, one document per line). tokenizer: the one that made the ids."""
        documents, vocab_size = read_tokens(sources, vocab_size, tokenizer)
        return cls(Datastore.build(documents, vocab_size, fingerprint(tokenizer)), **options)

    def save(self, path: str | Path) -> Path:
        """Write the datastore as safetensors; `path` is either the whole new file or what it was."""
        return self.datastore.save(path)

    @classmethod
    def load(cls, path: str | Path, tokenizer=None, **options) -> RetrievalDraft:
        """Map a saved datastore. ValueError, naming the file, if it is truncated, damaged or foreign, or, with `tokenizer`, if that is
        not the one it was built with (where the file knows)."""
        store = Datastore.load(path)
        check_tokenizer(path, "datastore", store.fingerprint, tokenizer)
        return cls(store, **options)

    # --- proposing --------------------------------------------------------------------------------------------------

    def start(self, context: Context) -> None:
        self.vocab_size = context.vocab_size
        self.found: list[tuple[int, int, int]] = []

    def evidence(self, context: Context) -> list[int]:
        """Per row the length of the match, or -1."""
        self.found = [self.datastore.match(row, self.min_match) for row in context.rows]
        return [n or -1 for n, _, _ in self.found]

    def propose(self, context: Context, k: list[int]) -> Proposal:
        branches = 1 if context.chains else self.branches
        rows = [Branches(_most_frequent(self._continuations(match), size, branches)) for match, size in zip(self.found, k)]
        return together(rows, context.vocab_size, context.device, self.name)

    def _continuations(self, match: tuple[int, int, int]) -> list[list[int]]:
        """What followed in the datastore, up to the first token that the target does not have."""
        rows = self.datastore.continuations(*match, self.DEPTH, self.SAMPLES) if match[0] else []
        if self.datastore.vocab_size <= self.vocab_size:
            return rows
        return [row[: next((i for i, token in enumerate(row) if token >= self.vocab_size), len(row))] for row in rows]

    def prior(self, strength: int) -> tuple[float, float]:
        rate = min(0.15 + 0.1 * strength, 0.8)
        return rate, rate

    # --- one token at a time: a place is (length of the match, what may follow) --------------------------------------------

    def place(self, b: int) -> tuple[int, list[list[int]]] | None:
        return (self.found[b][0], self._continuations(self.found[b])) if self.found[b][0] else None

    def guesses(self, place: tuple[int, list[list[int]]]) -> list[Guess]:
        n, rows = place
        counts = Counter(row[0] for row in rows if row)
        total = max(sum(counts.values()), 1)
        return [(token, (min(n, 8), rank, count * 4 // total), self.prior(n)[0] * count / total)
                for rank, (token, count) in enumerate(counts.most_common(4))]

    def step(self, place: tuple[int, list[list[int]]], token: int) -> tuple[int, list[list[int]]] | None:
        n, rows = place
        rows = [row[1:] for row in rows if row and row[0] == token]
        return (n + 1, rows) if rows else None

    def keep(self, rows: list[int]) -> None:
        self.found = [self.found[row] for row in rows] if self.found else []

    def rewind(self, context: Context, lengths: list[int]) -> None:
        """Every `evidence` looks the rows up anew."""

    def finish(self) -> None:
        self.found = []
        super().finish()

    def _stock_vocab_size(self) -> int:
        return self.datastore.vocab_size


def _most_frequent(rows: list[list[int]], size: int, branches: int) -> list[tuple[int, int]]:
    """The `size` most frequent nodes (parent, token) of the prefix tree of `rows`, parents first, at most `branches` after each."""
    counts, parents, children = [len(rows)], [(0, 0)], [{}]
    for row in rows:
        node = 0
        for token in row:
            after = children[node].get(token)
            if after is None:
                after = children[node][token] = len(counts)
                counts.append(0)
                parents.append((node, token))
                children.append({})
            node = after
            counts[node] += 1
    kept = {0}
    for node in range(len(counts)):  # a parent comes before its children
        if node in kept:
            kept.update(nsmallest(branches, children[node].values(), key=lambda child: (-counts[child], child)))
    order = sorted(kept - {0}, key=lambda node: (-counts[node], node))[:size]
    number = {0: 0} | {node: i for i, node in enumerate(order, start=1)}
    return [(number[parents[node][0]], parents[node][1]) for node in order]
