"""What published drafters of DFlash's kind say of themselves beyond transformers' assistant: how they read, and how their tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Layout:
    """causal: types of layers in which a place of the block sees none behind it.
    reach:      how far a place sees to each side in windows; None: as far as the config's window says.
    scale:      of the target's embeddings, which then go in as their weights are; None: as the target's own module gives them.
    head:       an output head of the drafter's own, [.., H] -> [.., V]; None: the target's.
    multiplier, softcap: logits z become softcap * tanh(multiplier * z / softcap); multiplier * z where softcap is None.
    selector:   chooses the tokens of a chain one after another (DFlash 2, DSpark); None: each place's own law does.
    first:      the place of the block that the first token is drafted at: behind the root, or its own (DSpark).
    confidence: says how likely a place's token is to be accepted before it is drawn (DSpark), which `draft_stop` then goes by.
    """

    causal: frozenset[str] = frozenset()
    reach: int | None = None
    scale: float | None = None
    head: nn.Module | None = None
    multiplier: float = 1.0
    softcap: float | None = None
    selector: Selector | Markov | None = None
    first: int = 1
    confidence: Confidence | None = None

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits if self.multiplier == 1 else logits * self.multiplier
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


class Selector(nn.Module):
    """What a token's chance becomes once the token before it is known, among the `likeliest` tokens of its place: to its logit comes a product of three vectors of `rank`
    numbers, one of the token before, one of the place's state, one of the token itself (DFlash 2).

    rows: which of the codebooks' `vocab` rows is whose, int64, by the target's tokens; None: each token has its own.
    """

    def __init__(self, vocab: int, width: int, rank: int, likeliest: int, rows: torch.Tensor | None = None):
        super().__init__()
        self.register_buffer("rows", torch.arange(vocab) if rows is None else rows, persistent=False)
        self.predecessor_codebook, self.successor_codebook = nn.Embedding(vocab, rank), nn.Embedding(vocab, rank)
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        self.likeliest = likeliest

    def ahead(self, hidden: torch.Tensor, logits: torch.Tensor) -> Choices:
        """Of states [B, K, H] and logits [B, K, V] of the places ahead."""
        best = logits.topk(min(self.likeliest, logits.shape[-1]))
        return Choices(self, self.hidden_projection(hidden), best.values.float(), best.indices)

    def row(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.rows[tokens.clamp(max=len(self.rows) - 1)]


@dataclass
class Choices:
    """Of K places ahead: states [B, K, r], and the likeliest tokens with their logits [B, K, n]."""

    selector: Selector
    states: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor

    def after(self, before: torch.Tensor, place: int, vocab: int) -> torch.Tensor:
        """Logits [B, vocab] at a place whose forerunners are the tokens before, int64 [B]; minus infinity for tokens that are not among the likeliest."""
        known = self.selector.predecessor_codebook(self.selector.row(before.to(self.states.device)))
        following = self.selector.successor_codebook(self.selector.row(self.tokens[:, place]))
        scores = self.logits[:, place] + (following * (known * self.states[:, place])[:, None]).sum(-1).float()
        return scores.new_full((len(scores), vocab), -torch.inf).scatter_(-1, self.tokens[:, place], scores)


class Markov(nn.Module):
    """A bias [V] to a place's logits, of `rank` numbers that the token before it has: as they are ("vanilla"), weighted by what the place's state says ("gated"), or of a
    state of its own that goes from place to place ("rnn"). DSpark (DeepSeek 2026).

    ids: the tokens that the biases are of, int64 [V'], all different; None: all.
    """

    KINDS = ("vanilla", "gated", "rnn")

    def __init__(self, vocab: int, width: int, rank: int, kind: str, ids: torch.Tensor | None = None):
        super().__init__()
        self.kind = kind
        self.register_buffer("ids", ids, persistent=False)
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab, rank), nn.Linear(rank, vocab if ids is None else len(ids), bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def ahead(self, hidden: torch.Tensor, logits: torch.Tensor) -> Steps:
        """Of states [B, K, H] and logits [B, K, V] of the places ahead."""
        return Steps(self, hidden, logits.float(), hidden.new_zeros((len(hidden), self.markov_w1.embedding_dim)))

    def known(self, before: torch.Tensor) -> torch.Tensor:
        """What it knows of the tokens before, int64 [B]: [B, r]."""
        return self.markov_w1(before.to(self.markov_w1.weight.device).clamp(max=self.markov_w1.num_embeddings - 1))

    def step(self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bias [B, V] after the tokens before, int64 [B], at a place with states [B, H], and the state [B, r] for the next place."""
        known = self.known(before)
        if self.kind == "gated":
            known = self.gate_proj(torch.cat([hidden, known], dim=-1)).sigmoid() * known
        elif self.kind == "rnn":
            gate, candidate, out = self.joint_proj(torch.cat([state, known, hidden], dim=-1)).chunk(3, dim=-1)
            gate, known = gate.sigmoid(), out.tanh()
            state = gate * state + (1 - gate) * candidate.tanh()
        return self.markov_w2(known), state


@dataclass
class Steps:
    """Of K places ahead, asked for in order: states [B, K, H], logits [B, K, V], and the state [B, r] that goes with the tokens so far."""

    markov: Markov
    states: torch.Tensor
    logits: torch.Tensor
    state: torch.Tensor

    def after(self, before: torch.Tensor, place: int, vocab: int) -> torch.Tensor:
        """As `Choices.after`, of all tokens that the head knows."""
        bias, self.state = self.markov.step(before, self.states[:, place], self.state)
        logits, ids = self.logits[:, place, :vocab], self.markov.ids
        if ids is None:
            return logits + nn.functional.pad(bias.float(), (0, vocab - bias.shape[-1]), value=-torch.inf)
        return logits.index_add(-1, ids, bias.float())


class Confidence(nn.Module):
    """How likely a place's token is to be accepted, by the place's state and, where there is a `markov` head to know it by, by the token before: both are known before the token
    itself is drawn. Trained on the mass that the laws of draft and target have in common (DSpark)."""

    def __init__(self, width: int, markov: Markov | None = None, bias: bool = True):
        super().__init__()
        self.proj = nn.Linear(width + (0 if markov is None else markov.markov_w1.embedding_dim), 1, bias=bias)
        self.shared = (markov,)  # in a tuple: its weights are not this module's

    def forward(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """[B] in 0..1 of a place's states [B, H] and the tokens before it, int64 [B]."""
        markov = self.shared[0]
        features = hidden if markov is None else torch.cat([hidden, markov.known(before).to(hidden)], dim=-1)
        return self.proj(features)[:, 0].float().sigmoid()
