"""All drafts of a mixture in one tree, the likeliest tokens first."""

from __future__ import annotations

from itertools import accumulate
from math import log2
from typing import Any

from ..budget import progress
from ..proposal import Proposal
from .base import Context, Draft, Guess
from .earning import Earnings
from .growth import Branches, Grower, Grown


class _Whole(Draft):
    """The last proposal of a draft, token by token: a place is (row, node, depth). A guess is known by the chance that the draft gives
    it, in steps of a factor of 1.4, or else by its rank among its siblings; the first of them is as likely as `Earnings` has measured."""

    def __init__(self):
        self.children: list[list[dict[int, int]]] = []

    def show(self, proposal: Proposal, strengths: list[int], rates: list[list[float]]) -> None:
        """strengths, rates: of every row, the evidence and the acceptance of a first and of a later token."""
        self.strengths, self.rates, self.children = strengths, rates, []
        self.chances = None if proposal.chances is None else proposal.chances.tolist()
        for tokens, size in zip(proposal.listed(), proposal.sizes):
            children: list[dict[int, int]] = [{} for _ in range(size + 1)]
            for node, (parent, token) in enumerate(zip(proposal.tree.parents[:size], tokens), start=1):
                children[parent].setdefault(token, node)
            self.children.append(children)

    def guesses(self, place: tuple[int, int, int]) -> list[Guess]:
        b, node, depth = place
        if self.chances is not None:
            own = [(token, self.chances[b][child - 1]) for token, child in self.children[b][node].items()]
            return [(token, (min(depth, 8), round(-2 * log2(max(chance, 1e-4)))), chance) for token, chance in own]
        rate = self.rates[b][depth > 0]
        return [(token, (self.strengths[b], min(depth, 8), rank) if rank else None, rate * 0.3**rank) for rank, token in enumerate(self.children[b][node])]

    def step(self, place: tuple[int, int, int], token: int) -> tuple[int, int, int] | None:
        b, node, depth = place
        after = self.children[b][node].get(token)
        return None if after is None else (b, after, depth + 1)


class Merge:
    """All drafts in one tree. With K "auto" a draft that costs something is asked where that is expected to earn more than the tree of
    those that cost nothing, and the tree has as many nodes as pay. In a batch where nothing has paid for IDLE rounds, trees are grown in every
    EVERY-th round only."""

    IDLE, EVERY = 8, 4

    def __init__(self, mixture, context: Context):
        self.mixture, self.context, self.grower, self.earnings = mixture, context, Grower(), Earnings(mixture, context)
        self.wholes = [None if type(draft).place is not Draft.place else _Whole() for draft in mixture.parts]
        self.costly = [d for d, whole in enumerate(self.wholes) if whole is not None and not self.earnings.free[d]]
        self.grown: list[Grown] = []
        self.idle = 0  # rounds in a row that nothing was drafted in
        self.asks: dict[int, list[int]] | None = None

    @property
    def branches(self) -> int:
        return 1 if self.context.chains else self.mixture.branches

    def forget(self) -> None:
        self.grown, self.asks = [], None
        self.earnings.forget()

    def learn(self, committed: list[list[int]]) -> None:
        for grown, tokens in zip(self.grown, committed):
            self.grower.learn(grown, tokens)
        self.earnings.learn(committed)
        self.grown = []

    def evidence(self, strengths: list[list[int]]) -> list[int]:
        self.earnings.next_round()
        self.strengths, self.asks, self.drawn = strengths, None, []
        return [0 if max(own) >= 0 else -1 for own in zip(*strengths)]

    # --- K "auto": which drafts, and how many nodes -----------------------------------------------------------------

    def plan(self, caps: list[int], room: list[int]) -> list[int]:
        """Per row, how many nodes, at most caps[b]; room: tokens that it may still get."""
        self.room, self.asks = room, {}
        self.idle += 1
        if not any(caps) or self.earnings.looks_at_plain() or len(caps) > 1 and self.idle > self.IDLE and self.idle % self.EVERY:
            return [0] * len(caps)
        self.drawn = self._ask({d: caps for d, free in enumerate(self.earnings.free) if free})
        gains = [self._gains(grown) for grown in self._trees(caps)]
        nodes, most = self._size(gains, 0)
        most = max(most, self.earnings.margin / self.earnings.seconds(0, {}))
        for d in self.costly:
            for k in range(1, min(self.earnings.reach[d], max(caps)) + 1):
                own = [min(k, cap) if strength >= 0 else 0 for cap, strength in zip(caps, self.strengths[d])]
                if any(own):
                    tokens = [max(self._tokens(b, d, size), 1 + gain[min(nodes, len(gain) - 1)]) for b, (size, gain) in enumerate(zip(own, gains))]
                    worth = progress(tokens, room)
                    rate = worth / self.earnings.seconds(max(k, nodes), {d: k})
                    if rate > most and self.earnings.covers(max(k, nodes), {d: k}, worth - 1):
                        most, self.asks = rate, {d: own}
        self.idle = 0 if nodes or self.asks else self.idle
        return caps if self.asks else [min(nodes, cap) for cap in caps]

    def _tokens(self, b: int, d: int, k: int) -> float:
        return self.earnings.tokens(b, d, self.strengths[d][b], k)[k] if k else 1.0

    def _gains(self, grown: Grown) -> list[float]:
        """Drafted tokens expected to be accepted of the first 0, 1, ... nodes."""
        return list(accumulate(grown.chances, initial=0.0))

    def _size(self, gains: list[list[float]], least: int, seconds: float = 0.0, steps: float = 0.0) -> tuple[int, float]:
        """(nodes, `progress` per second) of the trees that earn most of those that the budget covers, `least` anyway; (0, rate of a plain step)
        if none earns more. seconds, steps: of the drafts that are asked, and the same in plain steps."""
        found = 0, 0.0
        for n in range(least, max(map(len, gains))):
            worth = progress([1 + gain[min(n, len(gain) - 1)] for gain in gains], self.room)
            rate = worth / (self.earnings.seconds(n, {}) + seconds)
            margin = self.earnings.margin if not found[0] and not seconds else 1.0
            if rate > margin * found[1] and (n == least or self.earnings.budget.covers(n, worth - 1, steps)):
                found = n, rate
        return found

    # --- the tree ---------------------------------------------------------------------------------------------------

    def propose(self, context: Context, k: list[int]) -> tuple[list[Branches], str]:
        if self.asks is None:
            wholes = [d for d, whole in enumerate(self.wholes) if whole is not None]
            self.drawn = self._ask({d: [self._share(i, size) for size in k] for i, d in enumerate(wholes)})
        elif self.asks:
            asked = {d: max(own) for d, own in self.asks.items()}
            drafting = self.earnings.drafting_seconds(asked), self.earnings.drafting_steps(asked)
            self.drawn += self._ask(self.asks)  # how long this one took may depend on what was drawn: the size of the tree does not
        self.grown = self._trees(k)
        if self.asks:
            size, _ = self._size([self._gains(grown) for grown in self.grown], 1, *drafting)
            self.grown = [grown.first(size) for grown in self.grown]
        rows = [self._row(b, grown) for b, grown in enumerate(self.grown)]
        self.earnings.shown = max((len(row.nodes) for row in rows), default=0)
        return rows, self.mixture.name

    def _share(self, i: int, size: int) -> int:
        """Tokens asked of the i-th draft that says all at once, for a tree of `size` nodes: an equal part; of a small tree one each, while it lasts."""
        return min(max(size // len(self.wholes), int(i < size)), self.mixture.tokens)

    def _ask(self, wanted: dict[int, list[int]]) -> list[tuple[int, Proposal, list[int]]]:
        """Show those of the wholes what they are to say, and the others nothing new; the proposals that were drawn at random, each with
        the nodes that it counts for in every row."""
        drawn = []
        for d, k in wanted.items():
            if self.wholes[d] is None:
                continue
            own = [size if strength >= 0 else 0 for size, strength in zip(k, self.strengths[d])]
            nothing = Proposal.from_lists([[] for _ in k], self.context.device)
            proposal = self.earnings.ask(d, own, self.strengths) if any(own) else nothing
            if proposal.probs is not None and self.context.sampler.do_sample:
                drawn.append((d, proposal, _nodes(self.mixture.parts[d], proposal, own)))
                proposal = nothing
            rates = [self.earnings.rate(b, d, max(strength, 0)) for b, strength in enumerate(self.strengths[d])]
            self.wholes[d].show(proposal, self.strengths[d], rates)
        return drawn

    def _trees(self, k: list[int]) -> list[Grown]:
        trees = []
        for b, size in enumerate(k):
            sources = [source for d in range(len(self.wholes)) if (source := self._source(d, b)) is not None]
            left = size if self.branches == 1 else size - sum(nodes[b] for _, _, nodes in self.drawn)
            trees.append(self.grower.tree(sources, left, self.context.vocab_size, self.branches))
        return trees

    def _source(self, d: int, b: int) -> tuple[Draft, Any] | None:
        whole = self.wholes[d]
        if self.strengths[d][b] < 0 or whole is not None and d not in self.mixture.asked_now:
            return None
        place = self.mixture.parts[d].place(b) if whole is None else (b, 0, 0)
        return None if place is None else (whole or self.mixture.parts[d], place)

    def _row(self, b: int, grown: Grown) -> Branches:
        """Row b's guesses and what was drawn, in one tree; of a chain, the one of them that is expected to earn most. Which tokens were drawn
        plays no part in that."""
        tails = [Branches.of(proposal, b) for _, proposal, _ in self.drawn]
        if self.branches > 1:
            return _joined(grown, tails)
        earns = [self._tokens(b, d, nodes[b]) - 1 for d, _, nodes in self.drawn]
        if self._gains(grown)[-1] >= max(earns, default=0.0):
            return _joined(grown, [])
        return tails[earns.index(max(earns))]

    def keep(self, rows: list[int]) -> None:
        self.grown = [self.grown[row] for row in rows] if self.grown else []
        self.earnings.keep(rows)


def _nodes(draft: Draft, drawn: Proposal, asked: list[int]) -> list[int]:
    """Per row, how many nodes a drawn proposal counts for: what was asked, for how much was drawn may depend on which tokens were. A model's
    tree has its shape; not so one put together of several drafts', which has fillers, and nothing is known of a draft that is not ours."""
    shaped = draft.trusted and not drawn.tree.is_chain and drawn.fillers is None
    return drawn.sizes if shaped else asked


def _joined(grown: Grown, tails: list[Branches]) -> Branches:
    """The guesses, and after them, from the root, what was drawn: independent draws, so their laws stay what they were."""
    nodes, laws = list(grown.nodes), [None] * len(grown.nodes)
    for tail in tails:
        start = len(nodes)
        nodes += [(parent + start if parent else 0, token) for parent, token in tail.nodes]
        laws += tail.laws
    return Branches(nodes, laws if tails else None)
