"""Which of several drafts to ask: the one that is expected to earn most per millisecond, row by row."""

from __future__ import annotations

from time import perf_counter

from ..proposal import Proposal
from ..schedule import AcceptanceEstimate, RoundCost
from .base import Context, Draft
from .growth import Branches

STRENGTHS = 1000  # evidence of draft d is d * STRENGTHS + its own


class Choose:
    """Per row, the draft that is expected to earn most tokens per unit of time.

    costs: per draft, the time of a round in which it is asked for k tokens. estimates: per row (one for all rows of a greedy call),
    draft and strength, its acceptance. A draft that costs nothing is asked in every round, chosen or not."""

    def __init__(self, mixture: Draft, context: Context):
        self.mixture, self.drafts, self.timed = mixture, mixture.parts, context.timed
        target = context.target.model if context.target is not None else None
        ratios = [draft.cost_ratio if target is None else draft.relative_cost(target) for draft in self.drafts]
        self.free = [not ratio for ratio in ratios]
        self.costs = [RoundCost((ratio or 0.0) + 0.03, self.timed) for ratio in ratios]
        self.seen = [0] * len(self.drafts)  # rounds in which it was asked
        own = len(context.rows) if context.sampler.do_sample else 1
        self.estimates: list[dict[int, AcceptanceEstimate]] = [{} for _ in range(own)]
        self.k = [[4] * len(self.drafts) for _ in range(own)]  # what the row was last given
        self.rows = [b % own for b in range(len(context.rows))]
        self.begin = None
        self.forget()

    def forget(self) -> None:
        self.shown: list[list[tuple[int, list[int]]]] = []  # of every row, (draft and strength, likeliest path) of what was shown
        self.asked: dict[int, int] = {}  # of every draft that was chosen, for how many tokens

    def _estimate(self, b: int, code: int) -> AcceptanceEstimate:
        table = self.estimates[self.rows[b]]
        if code not in table:
            table[code] = AcceptanceEstimate(self.mixture.prior(code))
        return table[code]

    def learn(self, committed: list[list[int]]) -> None:
        """What every path that was shown would have earned; and what the round took."""
        for b, (paths, tokens) in enumerate(zip(self.shown, committed)):
            for code, path in paths:
                same = next((i for i, (one, other) in enumerate(zip(path, tokens)) if one != other), min(len(path), len(tokens)))
                judged = same if same == len(tokens) else len(path)  # what would have come after is not known
                if judged:
                    self._estimate(b, code).update(judged, same)
        now = perf_counter()
        if self.begin is not None:
            self._time(now - self.begin)
        self.begin = now
        self.forget()

    def _time(self, seconds: float) -> None:
        if not any(self.asked.values()):
            for cost in self.costs:
                cost.update(0, seconds)
        elif len(self.asked) == 1:
            (d, k), = self.asked.items()
            self.seen[d] += 1
            if self.seen[d] > 1:  # the first time a model reads the prompt
                self.costs[d].update(k, seconds)

    def evidence(self, strengths: list[list[int]]) -> list[int]:
        self.strengths = strengths
        self.choice = [self._best(b, own) for b, own in enumerate(zip(*strengths))]
        return [-1 if d < 0 else d * STRENGTHS + strengths[d][b] for b, d in enumerate(self.choice)]

    def _best(self, b: int, strengths: tuple[int, ...]) -> int:
        best, most = -1, 0.0
        for d, strength in enumerate(strengths):
            if strength >= 0:
                k = self.k[self.rows[b]][d]
                rate = self._estimate(b, d * STRENGTHS + strength).expected_tokens(k) / self._cost(d, k)
                best, most = (d, rate) if rate > most else (best, most)
        return best

    def _cost(self, d: int, k: int) -> float:
        known = self.costs[d](k)
        if known is None:  # not timed yet: by size, on top of what the cheapest round of another took
            bases = [cost(0) for cost in self.costs if cost(0) is not None]
            known = (min(bases) if bases else 1.0) * (1 + self.costs[d].prior_ratio * k)
        return known

    def propose(self, context: Context, k: list[int]) -> tuple[list[Branches], list[str]]:
        rows, self.shown = [Branches([]) for _ in k], [[] for _ in k]
        self.asked = {d: 0 for d in self.choice if d >= 0}
        for d, draft in enumerate(self.drafts):
            chosen = [own == d for own in self.choice]
            own = [size if mine or self.free[d] and strength >= 0 else 0 for size, mine, strength in zip(k, chosen, self.strengths[d])]
            if not any(own):
                continue
            proposal = self.mixture.ask(d, own)
            if any(chosen):
                self.asked[d] = max(size for size, mine in zip(k, chosen) if mine)
            for b, mine in enumerate(chosen):
                path = _path(proposal, b)
                self.shown[b].append((d * STRENGTHS + max(self.strengths[d][b], 0), path))
                if mine:
                    self.k[self.rows[b]][d] = max(k[b], 1)
                    rows[b] = Branches(list(enumerate(path))) if context is self.mixture._stock else Branches.of(proposal, b)
        return rows, [self.drafts[d].name if d >= 0 else "" for d in self.choice]

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.shown = [self.shown[row] for row in rows] if self.shown else []


def _path(proposal: Proposal, b: int) -> list[int]:
    """The tokens of the first branch."""
    path, last = [], 0
    for node, (parent, token) in enumerate(zip(proposal.tree.parents[: proposal.sizes[b]], proposal.tokens[b].tolist()), start=1):
        if parent == last:
            path.append(token)
            last = node
    return path
