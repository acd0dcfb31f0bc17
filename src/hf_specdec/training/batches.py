"""Shards as batches: texts of similar length side by side, in an order that the seed and the step alone decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from .features import read_features
from .shards import Part, Shard, shard_files

HELD_OUT_EVERY = 16  # of 16 shards, one is not trained on; of the texts, where there is one shard


@dataclass
class Batch:
    """tokens int64 [B, L], padded on the right; of the N positions that the target was asked about: their place in B * L
    (where, int64 [N]), ids [N, k] and logprobs [N, k] of the next token. states: the target's hidden states [B, L, F], or None."""

    tokens: torch.Tensor
    where: torch.Tensor
    ids: torch.Tensor
    logprobs: torch.Tensor
    states: torch.Tensor | None = None

    def to(self, device) -> Batch:
        parts = self.tokens, self.where, self.ids, self.logprobs, self.states
        return Batch(*(None if part is None else part.to(device) for part in parts))


class Corpus:
    """All texts of some shards in memory, the last `longest` tokens of each; `order(epoch)` cuts them into batches of about `size`
    tokens. first: of a text's tokens, those before it are not asked about, unless there are no others to ask about."""

    def __init__(self, parts: list[Part], vocab_size: int, size: int, seed: int, longest: int = 512, states: Path | None = None, first: int = 0):
        shards = [Shard.load(part.path, vocab_size) for part in parts]
        self.states = {} if states is None else {id(shard): read_features(states / part.path.name) for shard, part in zip(shards, parts)}
        self.texts = [(shard, max(a, b - longest), b) for shard, part in zip(shards, parts) for a, b in part.spans(shard)]
        self.size, self.seed, self.first = size, seed, first

    @property
    def tokens(self) -> int:
        return sum(b - a for _, a, b in self.texts)

    def order(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, each a list of texts."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
        noise = torch.rand(len(self.texts), generator=generator)
        lengths = torch.tensor([b - a for _, a, b in self.texts])
        batches, batch = [], []
        for index in (lengths * (1 + 0.1 * noise)).argsort().tolist():
            longest = max([int(lengths[index]), *(int(lengths[i]) for i in batch)])
            if batch and longest * (len(batch) + 1) > self.size:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches += [batch] if batch else []
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def batch(self, texts: list[int]) -> Batch:
        parts = [self.texts[i] for i in texts]
        tokens = pad_sequence([shard.tokens[a:b].long() for shard, a, b in parts], batch_first=True)
        states = pad_sequence([self.states[id(shard)][a:b] for shard, a, b in parts], batch_first=True) if self.states else None
        where, ids, laws = [], [], []
        for row, (shard, a, b) in enumerate(parts):
            asked = torch.isfinite(shard.logprobs[a:b, 0]).nonzero()[:, 0]
            late = asked[asked >= self.first]
            asked = late if len(late) else asked
            where.append(row * tokens.shape[1] + asked)
            ids.append(shard.ids[a:b][asked].long())
            laws.append(shard.logprobs[a:b][asked])
        return Batch(tokens, torch.cat(where), torch.cat(ids), torch.cat(laws), states)


class Stream:
    """The batches of a corpus by their number, epoch after epoch."""

    def __init__(self, corpus: Corpus):
        self.corpus = corpus
        self._begin()

    def _begin(self) -> None:
        self.epoch, self.first, self.batches = 0, 0, self.corpus.order(0)

    def batch(self, number: int) -> Batch:
        """Numbers rise, but where another stream comes in beside this one: each then counts its own part of the steps."""
        if number < self.first:
            self._begin()
        while number - self.first >= len(self.batches):
            self.first, self.epoch = self.first + len(self.batches), self.epoch + 1
            self.batches = self.corpus.order(self.epoch)
        return self.corpus.batch(self.batches[number - self.first])


def split(folder: Path) -> tuple[list[Part], list[Part]]:
    """(what to train on, what is held out): whole shards, or texts of the only one.

    Raises ValueError for a folder without shards, and for a single text.
    """
    files = shard_files(folder)
    if not files:
        raise ValueError(f"data: {folder} holds no training shards; `hf-specdec train` makes some, or name the right folder.")
    if len(files) > 1:
        train, held = _held_out(files)
        return [Part(path) for path in train], [Part(path) for path in held]
    texts = range(len(Shard.load(files[0])))
    if len(texts) < 2:
        raise ValueError(f"data: {folder} holds a single text, and one has to be held out; write more of them (tokens, prompts).")
    train, held = _held_out(texts)
    return [Part(files[0], tuple(train))], [Part(files[0], tuple(held))]


def _held_out(every: Sequence) -> tuple[list, list]:
    held = every[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] or every[-1:]
    return [one for one in every if one not in held], list(held)


def frequent_tokens(parts: list[Part], vocab_size: int, count: int) -> tuple[torch.Tensor, float]:
    """The `count` tokens that the target gives most of its probability to, ids int64 ascending, and the share that they cover."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for part in parts:
        shard = Shard.load(part.path, vocab_size)
        places = torch.cat([torch.arange(a, b) for a, b in part.spans(shard)])
        asked = places[torch.isfinite(shard.logprobs[places, 0])]
        mass.index_add_(0, shard.ids[asked].flatten().long(), shard.logprobs[asked].double().exp().flatten())
    ids = mass.topk(min(count, vocab_size)).indices.sort().values
    return ids, float(mass[ids].sum() / mass.sum())
