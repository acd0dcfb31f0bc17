"""What published drafters of DFlash's kind say of themselves beyond transformers' assistant: how they read, and how their tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Layout:
    """causal: types of layers in which a place of the block sees none behind it.
    reach:      how far a place sees to each side in windows; None: as far as the config's window says.
    scale:      of the target's embeddings, which then go in as their weights are; None: as the target's own module gives them.
    head:       an output head of the drafter's own, [.., H] -> [.., V]; None: the target's.
    multiplier, softcap: logits z become softcap * tanh(multiplier * z / softcap); multiplier * z where softcap is None.
    selector:   chooses the tokens of a chain one after another (DFlash 2, DSpark, XPress); None: each place's own law does.
    first:      the place of the block that the first token is drafted at: behind the root, or its own (DSpark).
    confidence: says how likely a place's token is to be accepted before it is drawn (DSpark), which `draft_stop` then goes by.
    normed:     whether the states of the target's last layer are read behind its final norm (as transformers shows them) or before it (speculators).
    from_root:  whether windows reach back from the root for all places of a block, which see one another (speculators), or from each place.
    """

    causal: frozenset[str] = frozenset()
    reach: int | None = None
    scale: float | None = None
    head: nn.Module | None = None
    multiplier: float = 1.0
    softcap: float | None = None
    selector: Selector | Markov | Refiner | None = None
    first: int = 1
    confidence: Confidence | None = None
    normed: bool = True
    from_root: bool = False

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits if self.multiplier == 1 else logits * self.multiplier
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


@dataclass(frozen=True, eq=False)
class Block:
    """What a selector gets to see: the states [B, P, H] of all places of a block, the logits [B, K, V] of the K places ahead, the first of which is the block's place `first`, and
    `known(n)`, int64 [B], the tokens n places before the roots (0: the roots themselves)."""

    states: torch.Tensor
    logits: torch.Tensor
    first: int
    known: Callable[[int], torch.Tensor]

    def ahead(self) -> torch.Tensor:
        """The states [B, K, H] of the places ahead."""
        return self.states[:, self.first : self.first + self.logits.shape[1]]


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

    def ahead(self, block: Block) -> Choices:
        best = block.logits.topk(min(self.likeliest, block.logits.shape[-1]))
        return Choices(self, self.hidden_projection(block.ahead()), best.values.float(), best.indices)

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

    def ahead(self, block: Block) -> Steps:
        """A state goes through the roots' own place, too, where the first token is drafted behind it (speculators)."""
        state = block.states.new_zeros((len(block.states), self.markov_w1.embedding_dim))
        for place in range(block.first if self.kind == "rnn" else 0):
            _, state = self.step(block.known(0), block.states[:, place], state)
        return Steps(self, block.ahead(), block.logits.float(), state)

    def known(self, before: torch.Tensor) -> torch.Tensor:
        """What it knows of the tokens before, int64 [B]: [B, r]."""
        return self.markov_w1(before.to(self.markov_w1.weight.device).clamp(max=self.markov_w1.num_embeddings - 1))

    def step(self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, r], of which `markov_w2` makes the bias after the tokens before, int64 [B], at a place with states [B, H], and the state [B, r] for the next place."""
        known = self.known(before)
        if self.kind == "gated":
            known = self.gate_proj(torch.cat([hidden, known], dim=-1)).sigmoid() * known
        elif self.kind == "rnn":
            gate, candidate, out = self.joint_proj(torch.cat([state, known, hidden], dim=-1)).chunk(3, dim=-1)
            gate, known = gate.sigmoid(), out.tanh()
            state = gate * state + (1 - gate) * candidate.tanh()
        return known, state


@dataclass
class Steps:
    """Of K places ahead, asked for in order: states [B, K, H], logits [B, K, V], and the state [B, r] that goes with the tokens so far."""

    markov: Markov
    states: torch.Tensor
    logits: torch.Tensor
    state: torch.Tensor

    def after(self, before: torch.Tensor, place: int, vocab: int) -> torch.Tensor:
        """As `Choices.after`, of all tokens that the head knows."""
        known, self.state = self.markov.step(before, self.states[:, place], self.state)
        return biased(self.logits[:, place, :vocab], self.markov.markov_w2(known), self.markov.ids)


def biased(logits: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """Logits [B, V] with the bias [B, V'] of the tokens `ids`; None: of the first V', minus infinity for any others."""
    if ids is None:
        return logits + nn.functional.pad(bias.float(), (0, logits.shape[-1] - bias.shape[-1]), value=-torch.inf)
    return logits.index_add(-1, ids, bias.float())


class Refiner(nn.Module):
    """A bias [V] to a place's logits, of `rank` numbers that are made of the token before, the place's state and the mean of the block's states, and mixed with those of the places
    before it (XPress, arXiv 2608.02438).

    The published code draws all places at once from their own laws, and several times again, each time from the tokens of the time before (Jacobi). As no place depends on one
    behind it, the n-th time settles the n-th token, and what it ends at are the tokens of one place after another, which is how they are drawn here: each place is computed once, and
    the law of a token is that after the tokens proposed before it.

    inner: width of its MLP; places: of a block; ids: as in `Markov`.
    """

    def __init__(self, vocab: int, width: int, rank: int, inner: int, places: int, ids: torch.Tensor | None = None):
        super().__init__()
        self.register_buffer("ids", ids, persistent=False)
        self.token_embed, self.readout = nn.Embedding(vocab, rank), nn.Linear(rank, vocab if ids is None else len(ids), bias=False)
        self.down_h, self.down_g, self.in_proj = (nn.Linear(size, rank, bias=False) for size in (width, width, 3 * rank))
        self.mix_l = nn.Parameter(torch.zeros(rank, places, places))  # what of place [.., .., j] goes into place [.., k, ..]
        self.mlp_gate, self.mlp_up, self.mlp_down = (nn.Linear(*sizes, bias=False) for sizes in ((rank, inner), (rank, inner), (inner, rank)))

    def ahead(self, block: Block) -> Refined:
        mean = self.down_g(block.states.mean(1, keepdim=True)).expand(-1, block.states.shape[1], -1)
        refined = Refined(self, torch.cat([self.down_h(block.states), mean], dim=-1), block.logits.float(), block.first)
        for place in range(block.first):
            refined.read(block.known(block.first - place), place)
        return refined


@dataclass
class Refined:
    """Of the P places of a block, asked for in order: what the states say [B, P, 2 r], the logits [B, K, V] of those ahead, and of every place so far its numbers [B, r]."""

    refiner: Refiner
    states: torch.Tensor
    logits: torch.Tensor
    first: int
    numbers: list[torch.Tensor] = field(default_factory=list)

    def read(self, before: torch.Tensor, place: int) -> None:
        """The block's next place, which comes after the tokens before, int64 [B]."""
        embed = self.refiner.token_embed
        known = embed(before.to(self.states.device).clamp(0, embed.num_embeddings - 1))
        self.numbers.append(self.refiner.in_proj(torch.cat([self.states[:, place], known], dim=-1)))

    def after(self, before: torch.Tensor, place: int, vocab: int) -> torch.Tensor:
        """As `Choices.after`, of all tokens that the head knows."""
        refiner, at = self.refiner, place + self.first
        self.read(before, at)
        x = self.numbers[at] + torch.einsum("rj,bjr->br", refiner.mix_l[:, at, : at + 1], torch.stack(self.numbers, dim=1))
        x = x + refiner.mlp_down(nn.functional.silu(refiner.mlp_gate(x)) * refiner.mlp_up(x))
        return biased(self.logits[:, place, :vocab], refiner.readout(x), refiner.ids)


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
