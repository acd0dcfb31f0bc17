"""The n-gram draft: what most often followed the last tokens in a corpus, with back-off to shorter contexts.

A draft of negligible cost in the sense of Leviathan et al. 2023, section 3.6.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..hints import check_int
from ..proposal import Proposal
from ..uploads import upload
from .base import Context, Draft
from .ngram_table import MAX_ORDER, MAX_VOCAB, NGramTable
from .progress import progress


class NGramDraft(Draft):
    """Proposes from an `NGramTable`; make one with `from_texts`, `from_tokens` or `load`.

    sample:    False (default): the most frequent continuation, a point mass. True: in a call that samples, tokens are drawn
               from the normalised counts, and those are q. A greedy call takes the most frequent continuation either way.
    min_order: the shortest match that counts; without one nothing is proposed. 2 by default (1 for a table of order 1), since a
               bare unigram knows nothing of the text and would be drafted in vain; 1 backs off to it.
    """

    name = "ngram"
    trusted = True
    cost_ratio = 0.0

    def __init__(self, table: NGramTable, sample: bool = False, min_order: int | None = None):
        min_order = min(2, table.order) if min_order is None else min_order
        check_int("min_order", min_order, 1, table.order, ", the order of the table")
        self.table, self.sample, self.min_order = table, bool(sample), min_order

    # --- making and keeping -----------------------------------------------------------------------------------------

    @classmethod
    def from_texts(cls, texts: Iterable[str | Path], tokenizer, order: int = 5, min_count: int = 1, **options) -> NGramDraft:
        """Count the n-grams of texts; a Path is a text file (UTF-8). n-grams do not cross texts, and no special tokens are added.

        min_count: leave out n-grams of order 2 and more seen less often. options: those of `NGramDraft`.
        """
        _check_order(order, min_count)
        documents, vocab_size = read_texts(texts, tokenizer)
        return cls(_count(documents, vocab_size, order, min_count, fingerprint(tokenizer)), **options)

    @classmethod
    def from_tokens(cls, sources: Iterable, order: int = 5, min_count: int = 1, vocab_size: int | None = None, tokenizer=None,
                    **options) -> NGramDraft:
        """Count the n-grams of token ids. A source is a sequence of ids, or the path of a token file: `.npy` (one row of integers,
        one document) or text (ids separated by blanks, one document per line).

        vocab_size: ids must be below it; by default the largest id + 1. tokenizer: the one that made the ids, so that `load` can
        check it; its size is the default of vocab_size.
        """
        _check_order(order, min_count)
        documents, vocab_size = read_tokens(sources, vocab_size, tokenizer)
        return cls(_count(documents, vocab_size, order, min_count, fingerprint(tokenizer)), **options)

    def save(self, path: str | Path) -> Path:
        """Write the table as safetensors (`NGramTable.save`); `path` is either the whole new file or what it was."""
        return self.table.save(path)

    @classmethod
    def load(cls, path: str | Path, tokenizer=None, **options) -> NGramDraft:
        """Map a saved table. ValueError, naming the file, if it is damaged or foreign, or, with `tokenizer`, if that is not the
        one it was built with (where the file knows)."""
        table = NGramTable.load(path)
        check_tokenizer(path, "table", table.fingerprint, tokenizer)
        return cls(table, **options)

    # --- proposing --------------------------------------------------------------------------------------------------

    def evidence(self, context: Context) -> list[int]:
        """Per row the order of the longest match, -1 where nothing can be proposed."""
        return [self._continuations(row, context.vocab_size)[0] or -1 for row in context.rows]

    def prior(self, strength: int) -> tuple[float, float]:
        """A longer match is likelier to go on."""
        rate = 0.1 + 0.1 * min(strength, 5)
        return rate, rate

    def propose(self, context: Context, k: list[int]) -> Proposal:
        if self.sample and context.sampler.do_sample:
            return self._drawn(context, k)
        rows = [self._chain(row, own, context.vocab_size, _most_frequent) for row, own in zip(context.rows, k)]
        return Proposal.from_lists(rows, context.device, self.name)

    def _drawn(self, context: Context, k: list[int]) -> Proposal:
        """Chains of tokens drawn from the normalised counts; probs float32 [B, n, V] holds these laws."""
        laws: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in k]
        noise = context.noise("draft", max(k, default=0)).tolist()
        rows = [
            self._chain(row, own, context.vocab_size, partial(_draw, own_noise, own_laws))
            for row, own, own_noise, own_laws in zip(context.rows, k, noise, laws)
        ]
        proposal = Proposal.from_lists(rows, context.device, self.name)
        probs = torch.zeros((*proposal.tokens.shape, context.vocab_size), dtype=torch.float32, device=context.device)
        for b, own_laws in enumerate(laws):
            for i, (tokens, q) in enumerate(own_laws):
                probs[b, i, upload(tokens.astype(np.int64), context.device)] = upload(q, context.device)
        return Proposal.chain(proposal.tokens, probs, proposal.sizes, self.name)

    def _chain(self, row: list[int], k: int, vocab_size: int, choose) -> list[int]:
        """At most k tokens, one after another, each chosen among what followed the longest match: choose(i, tokens, counts)."""
        tail, chain = row[-self.table.order:], []
        for i in range(k):
            order, tokens, counts = self._continuations(tail + chain, vocab_size)
            if not order:
                break
            chain.append(choose(i, tokens, counts))
        return chain

    def _continuations(self, tail: list[int], vocab_size: int) -> tuple[int, np.ndarray, np.ndarray]:
        """`NGramTable.match` less the tokens that the target does not have."""
        order, tokens, counts = self.table.match(tail, self.min_order)
        if order and self.table.vocab_size > vocab_size:
            known = tokens < vocab_size
            tokens, counts = tokens[known], counts[known]
        return (order, tokens, counts) if len(tokens) else (0, tokens, counts)

    def _stock_vocab_size(self) -> int:
        return self.table.vocab_size


def _most_frequent(i: int, tokens: np.ndarray, counts: np.ndarray) -> int:
    return int(tokens[0])


def _draw(noise: list[float], laws: list, i: int, tokens: np.ndarray, counts: np.ndarray) -> int:
    """A token drawn from the normalised counts by inverse CDF with noise[i]; appends (tokens, q) to `laws`."""
    q = (counts / counts.sum()).astype(np.float32)
    laws.append((tokens, q))
    cdf = np.cumsum(q, dtype=np.float64)
    return int(tokens[min(int(cdf.searchsorted(noise[i] * cdf[-1], side="right")), len(q) - 1)])


def fingerprint(tokenizer) -> str:
    """16 hex digits that tell vocabularies apart: a hash of every token and its id; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    lines = sorted(f"{index}\t{token}" for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def check_tokenizer(path: str | Path, what: str, known: str, tokenizer) -> None:
    """ValueError if the file's tokenizer, with the fingerprint `known`, is not this one; what: the file's contents, for the message."""
    if tokenizer is not None and known and known != fingerprint(tokenizer):
        raise ValueError(f"{path} was built with another tokenizer; build the {what} again with this one.")


# --- reading and counting -----------------------------------------------------------------------------------------------


def _check_order(order: int, min_count: int) -> None:
    check_int("order", order, 1, MAX_ORDER)
    check_int("min_count", min_count, 1, 2**31 - 1)


def _count(documents: list[np.ndarray], vocab_size: int, order: int, min_count: int, tokenizer: str) -> NGramTable:
    if not any(len(document) for document in documents):
        raise ValueError("there is not a single token to count; give at least one text or token file that is not empty.")
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size={vocab_size!r} must be in 1..{MAX_VOCAB}.")
    with progress("Counting n-grams", range(order)) as steps:
        steps = iter(steps)
        return NGramTable.count(documents, vocab_size, order, min_count, tokenizer, step=lambda: next(steps))


def read_texts(texts: Iterable[str | Path], tokenizer) -> tuple[list[np.ndarray], int]:
    """int64 ids of every text, and the size of their vocabulary; a Path is a text file (UTF-8). No special tokens are added."""
    if isinstance(texts, (str, Path)):
        raise ValueError("texts: expected a list of texts (or Paths of text files), got a single one; put it into a list.")
    documents = []
    with progress("Tokenizing", texts) as texts:
        for number, text in enumerate(texts):
            text = _read_text(text) if isinstance(text, Path) else text
            if not isinstance(text, str):
                raise ValueError(f"texts[{number}] is a {type(text).__name__}; expected a str, or the Path of a text file.")
            documents.append(np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64))
    return documents, max(len(tokenizer), _largest(documents) + 1)


def read_tokens(sources: Iterable, vocab_size: int | None, tokenizer) -> tuple[list[np.ndarray], int]:
    """The documents of sequences of ids and of token files, and the size of their vocabulary: `vocab_size`, below which all ids must be, else that of
    the tokenizer, else the largest id + 1."""
    if isinstance(sources, (str, Path)):
        sources = [sources]
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)
    with progress("Reading tokens", sources) as sources:
        documents = [ids for number, source in enumerate(sources) for ids in _documents(source, number, vocab_size)]
    return documents, _largest(documents) + 1 if vocab_size is None else vocab_size


def _largest(documents: list[np.ndarray]) -> int:
    """The largest id; 0 where there is none."""
    return max((int(ids.max()) for ids in documents if len(ids)), default=0)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file ({error}).") from None


def _documents(source, number: int, vocab_size: int | None) -> list[np.ndarray]:
    """The documents of one source; ValueError naming it if it holds anything but ids in range."""
    name = str(source) if isinstance(source, (str, Path)) else f"sources[{number}]"
    try:
        if not isinstance(source, (str, Path)):
            documents = [np.asarray(source)]
        elif Path(source).suffix == ".npy":
            documents = [np.load(source, mmap_mode="r", allow_pickle=False)]
        else:
            lines = Path(source).read_text(encoding="ascii").splitlines()
            documents = [np.array([int(word) for word in line.split()], np.int64) for line in lines if line.strip()]
    except (ValueError, OverflowError, EOFError) as error:
        raise ValueError(f"{name} is not a token file ({error}); expected .npy, or ids separated by blanks.") from None
    for ids in documents:
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise ValueError(f"{name} holds {ids.dtype} of shape {ids.shape}; expected one row of integer token ids.")
        if len(ids) and not (0 <= int(ids.min()) and int(ids.max()) < (vocab_size or MAX_VOCAB)):
            raise ValueError(f"{name} holds ids from {ids.min()} to {ids.max()}; they must be in 0..{(vocab_size or MAX_VOCAB) - 1}.")
    return documents
