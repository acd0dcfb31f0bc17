"""Which of several drafts to ask: the one that is expected to earn most per millisecond, row by row."""

from __future__ import annotations

from itertools import accumulate

from ..budget import progress
from ..proposal import Proposal
from .base import Context
from .earning import Earnings, path_of
from .growth import Branches, Grower, Grown

Plan = tuple[int, int]  # a draft, -1 for none, and how many of its tokens


class Choose:
    """Per row, the draft, and with K "auto" the number of its tokens, expected to earn most tokens per unit of time. Drafts of no cost
    are asked before that is decided. With K "auto" those of them that know `guesses` go on where the chain of a costly draft ends, as far as
    that pays, and in a batch as far as the pass is wide anyway: a token more costs the pass little, and the draft nothing."""

    LEAST = 4  # tokens that a draft of no cost is asked for, to learn from

    def __init__(self, mixture, context: Context):
        self.mixture, self.context, self.earnings = mixture, context, Earnings(mixture, context)
        self.plans: list[Plan] | None = None
        self.grower, self.caps = Grower(), [0] * len(context.rows)  # caps: per row, most nodes with K "auto"
        self.tails: list[tuple[list[int], Grown]] = []  # per row, a chain and what was put after it

    def forget(self) -> None:
        self.earnings.forget()
        self.plans, self.tails = None, []

    def learn(self, committed: list[list[int]]) -> None:
        self.earnings.learn(committed)
        for (chain, grown), tokens in zip(self.tails, committed):
            if tokens[: len(chain)] == chain:
                self.grower.learn(grown, tokens[len(chain) :])
        self.tails = []

    def evidence(self, strengths: list[list[int]]) -> list[int]:
        self.earnings.next_round()
        self.strengths, self.plans = strengths, None
        return [0 if max(own) >= 0 else -1 for own in zip(*strengths)]

    def plan(self, caps: list[int], room: list[int]) -> list[int]:
        """Per row, how many tokens to draft, at most caps[b]; room: tokens that it may still get."""
        self.room, self.caps = room, caps
        self._ask_the_free(caps)
        plans = [self._best(b, range(1, cap + 1)) for b, cap in enumerate(caps)]
        single = [[self._best(b, range(1, cap + 1), d) for b, cap in enumerate(caps)] for d in range(len(self.strengths))] if len(caps) > 1 else []
        nothing = [(-1, 0)] * len(caps)
        best, most = nothing, self.earnings.margin / self.earnings.seconds(0, {})
        for own in ([] if self.earnings.looks_at_plain() else [plans, *single]):
            wide, asked, worth = max(k for _, k in own), _asked(own), self._worth(own)
            rate = worth / self.earnings.seconds(wide, asked)
            best, most = (own, rate) if rate > most and self.earnings.covers(wide, asked, worth - 1) else (best, most)
        self.plans = best
        return [k for _, k in best]

    def _ask_the_free(self, k: list[int]) -> None:
        self.proposals: dict[int, Proposal] = {}
        for d, strengths in enumerate(self.strengths):
            own = [max(size, min(self.LEAST, left)) if strength >= 0 else 0 for size, strength, left in zip(k, strengths, self._left())]
            if self.earnings.free[d] and any(own):
                self.proposals[d] = self.earnings.ask(d, own, self.strengths)

    def _left(self) -> list[int]:
        return [max(self.context.max_length - len(row) - 1, 0) for row in self.context.rows]

    def _best(self, b: int, ks: range, only: int | None = None) -> Plan:
        best, most = (-1, 0), 0.0
        for d, strengths in enumerate(self.strengths):
            if strengths[b] < 0 or not ks or only not in (None, d):
                continue
            said = self.proposals[d].sizes[b] if self.earnings.free[d] and not self._drew(d) else ks[-1]
            limit = min(said, ks[-1])
            reach = limit if self.earnings.free[d] or len(ks) == 1 else min(limit, self.earnings.reach[d])
            tokens = self.earnings.tokens(b, d, strengths[b], limit)
            for k in ks:
                k = min(k, reach)
                rate = tokens[k] / self.earnings.seconds(k, {d: k})
                best, most = ((d, k), rate) if k and rate > most and self.earnings.covers(k, {d: k}, tokens[k] - 1) else (best, most)
        return best

    def _drew(self, d: int) -> bool:
        """Whether the draft drew its tokens at random: how many there are may then depend on which, and must not count."""
        return self.proposals[d].probs is not None and self.context.sampler.do_sample

    def _worth(self, plans: list[Plan]) -> float:
        """`progress` of a round of all rows."""
        return progress([self.earnings.tokens(b, d, self.strengths[d][b], k)[k] if k else 1.0 for b, (d, k) in enumerate(plans)], self.room)

    def propose(self, context: Context, k: list[int]) -> tuple[list[Branches], list[str]]:
        if self.plans is None:
            self._ask_the_free(k)
            self.plans = [self._best(b, range(size, size + 1)) if size else (-1, 0) for b, size in enumerate(k)]
        for d in _asked(self.plans):
            if not self.earnings.free[d]:
                self.proposals[d] = self.earnings.ask(d, [size if own == d else 0 for (own, _), size in zip(self.plans, k)], self.strengths)
        rows = [self._branches(context, b, d, size) for b, ((d, _), size) in enumerate(zip(self.plans, k))]
        if not context.stock:
            width = max((len(row.nodes) for row in rows), default=0)
            rows = [self._with_tail(b, d, row, width) for b, ((d, _), row) in enumerate(zip(self.plans, rows))]
        self.earnings.shown = max((len(row.nodes) for row in rows), default=0)
        return rows, [self.mixture.parts[d].name if d >= 0 else "" for d, _ in self.plans]

    def _branches(self, context: Context, b: int, d: int, size: int) -> Branches:
        if d < 0:
            return Branches([])
        proposal = self.proposals[d]
        if context.stock:
            return Branches(list(enumerate(path_of(proposal, b)[:size])))
        found = Branches.of(proposal, b)
        return found if not self.earnings.free[d] else Branches(found.nodes[:size], found.laws and found.laws[:size])

    def _with_tail(self, b: int, d: int, found: Branches, width: int) -> Branches:
        """The chain of a costly draft d for row b, and after it the likeliest guesses of the other drafts, one after the other. They depend on
        what was drawn before them, as all that is drafted may. width: of the round without them."""
        chain, grown = [token for _, token in found.nodes], Grown()
        most = (self.caps[b] if len(self.caps) == 1 else min(self.caps[b], width)) - len(chain)
        if most > 0 and chain and not self.earnings.free[d] and self.proposals[d].tree.is_chain:
            places = [(part, place) for part in self.mixture.parts if (place := part.place(b)) is not None]
            for token in chain:
                places = [(part, after) for part, place in places if (after := part.step(place, token)) is not None]
            grown = self.grower.tree(places, most, self.context.vocab_size, branches=1)
            tokens = self.earnings.tokens(b, d, self.strengths[d][b], len(chain))
            gains = accumulate((chance * (tokens[-1] - tokens[-2]) for chance in grown.chances), initial=tokens[-1])
            rates = [self._rate_of(max(len(chain) + n, width), width, {d: len(chain)}, gain) for n, gain in enumerate(gains)]
            grown = grown.first(rates.index(max(rates)))
        self.tails.append((chain, grown))
        nodes = [(parent + len(chain), token) for parent, token in grown.nodes]
        return Branches(found.nodes + nodes, found.laws and found.laws + [None] * len(nodes))

    def _rate_of(self, end: int, width: int, asked: dict[int, int], tokens: float) -> float:
        """Tokens per second of a row in a round of `end` nodes, `width` of them there already; 0 where the budget does not cover more than those."""
        return tokens / self.earnings.seconds(end, asked) if end == width or self.earnings.covers(end, asked, tokens - 1) else 0.0

    def keep(self, rows: list[int]) -> None:
        self.earnings.keep(rows)
        self.tails = [self.tails[row] for row in rows] if self.tails else []


def _asked(plans: list[Plan]) -> dict[int, int]:
    """Of every draft that is asked, for how many tokens."""
    return {d: max(k for own, k in plans if own == d) for d in {d for d, k in plans if k}}
