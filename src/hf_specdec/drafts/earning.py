"""What the drafts of a mixture earn and cost: tokens per round from measured acceptance, seconds from measured rounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING

from ..budget import Budget
from ..proposal import Proposal
from ..round_cost import RoundCost, fitted_line
from ..schedule import AutoSchedule, Rates
from .base import Context, Draft

if TYPE_CHECKING:
    from .mixture import MixtureDraft


class DraftCost:
    """Seconds that a draft takes for k tokens, a + s k, fitted with forgetting; before anything is timed `ratio` plain steps a token.

    patience: rounds without the draft after which what was timed of it is doubted: twice as many whenever that was for nothing.
    """

    PATIENCE = 48, 768  # at first, and at most

    def __init__(self, ratio: float):
        self.ratio, self.sums = ratio, [0.0] * 5  # n, k, k^2, t, k t
        self.waited, self.patience = 0, self.PATIENCE[0]

    def update(self, k: int, seconds: float) -> None:
        n, total, _, spent, _ = self.sums
        if n > 2:
            seconds = min(seconds, 3 * spent / total * k)  # a busy machine is not a cost
        if n and 2 * seconds < spent / n * min(1, k * n / total):  # less than half of the time, for as many tokens or by the token: the ones before were timed in a bad moment
            self.sums = [0.0] * 5
        self.sums = [0.95 * old + new for old, new in zip(self.sums, (1.0, k, k * k, seconds, k * seconds))]

    @property
    def doubted(self) -> bool:
        return self.waited >= self.patience

    def ask(self) -> None:
        """The draft is asked, if only for doubts."""
        self.patience = min(2 * self.patience, self.PATIENCE[1]) if self.doubted else self.PATIENCE[0]
        self.waited = 0

    def __call__(self, k: int, step: float) -> float:
        """step: seconds of a plain step."""
        n, total, _, spent, _ = self.sums
        if not k:
            return 0.0
        if not n or self.doubted:
            return self.ratio * step * k
        base, slope = fitted_line(self.sums, spent / total, spent / total)
        return base + slope * k


class Experience:
    """What a mixture has learned in calls without a seed, for the next one on the same target with as many rows in passes of its kind: costs, and every draft's
    acceptance, which in here forgets twenty times as slowly as within a call. It decides what is drafted at first, never what is accepted."""

    WEIGHT, MEMORY = 20.0, 0.999  # of what earlier calls have taught, in tokens judged; and per token judged

    def __init__(self, of: tuple[int, int, tuple[int, ...]], drafts: Sequence[Draft], ratios: list[float | None], timed: bool):
        self.of, self.calls = of, 0
        self.verify = RoundCost(timed, of[1], blocks=of[2])
        self.budget: Budget | None = None  # of the last call
        self.drafting = [DraftCost(Earnings.UNKNOWN if ratio is None else ratio) for ratio in ratios]
        self.reach = [Earnings.START + Earnings.STEP] * len(ratios)  # how much more of a costly draft than the last time
        self.rates = [Rates(draft.prior, memory=self.MEMORY) for draft in drafts]

    def begin(self, rows: int) -> list[list[Rates]]:
        """Of each of so many rows and every draft, the acceptance that a call begins with."""
        self.calls += 1
        weight = {} if self.calls == 1 else {"weight": self.WEIGHT}
        return [[Rates(cache(rates.copy()), **weight) for rates in self.rates] for _ in range(rows)]


class Earnings:
    """Of a mixture's drafts in one call. A round takes `verify(k)`, the target's pass over k drafted tokens and all that is done in any
    round, and `drafting[d]`, the time of the costly draft that was asked. What a draft of no cost would have proposed is looked at in
    every round; a costly one is learned of when it is asked, and asked again after PATIENCE rounds if it might be as good as OPTIMISM.

    rates: per row (one for all rows of a greedy call) and draft, its acceptance.
    """

    START, STEP = AutoSchedule.START, AutoSchedule.STEP
    PATIENCE, OPTIMISM = 48, 0.1
    UNKNOWN = 0.1  # cost ratio of a draft that does not say

    def __init__(self, mixture: MixtureDraft, context: Context):
        self.context, self.mixture, self.drafts, self.timed = context, mixture, mixture.parts, context.timed
        self.margin = AutoSchedule.MARGIN[len(context.rows) > 1]
        target = context.target.model if context.target is not None else None
        ratios = [draft.cost_ratio if target is None else draft.relative_cost(target) for draft in self.drafts]
        self.free = [ratio == 0 for ratio in ratios]
        of = id(target), len(context.rows), () if context.target is None else context.target.blocks
        known = mixture.experience if self.timed else None
        self.known = known if known is not None and known.of == of else Experience(of, self.drafts, ratios, self.timed)
        if self.timed:
            mixture.experience = self.known
        self.verify, self.drafting, self.reach = self.known.verify, self.known.drafting, self.known.reach
        self.budget = self.known.budget = Budget(self.verify, self.known.budget)
        self.asked = [0] * len(self.drafts)  # how often
        own = len(context.rows) if context.sampler.do_sample else 1
        self.rates, self.rows = self.known.begin(own), [b % own for b in range(len(context.rows))]
        self.rounds, self.begin = 0, None
        self.forget()

    def forget(self) -> None:
        self.paths: list[list[tuple[int, int, list[int]]]] = []  # of every row, (draft, strength, likeliest path) of what was shown
        self.spent, self.shown = 0.0, 0  # seconds of costly drafts, and most nodes of a row, in this round
        self.steps = 0.0  # plain steps that costly drafts were expected to take in it

    # --- what is learned --------------------------------------------------------------------------------------------

    def learn(self, committed: list[list[int]]) -> None:
        """What every path that was shown would have earned; and what the round took."""
        for b, (paths, tokens) in enumerate(zip(self.paths, committed)):
            for d, strength, path in paths:
                same = next((i for i, (one, other) in enumerate(zip(path, tokens)) if one != other), min(len(path), len(tokens)))
                judged = same if same == len(tokens) else len(path)  # what would have come after is not known
                if judged:
                    self.rates[self.rows[b]][d].update(strength, judged, same)
                    self.known.rates[d].update(strength, judged, same)
        now = perf_counter()
        if self.begin is not None:
            seconds = max(self.context.agree(now - self.begin) - self.spent, 1e-9) if self.rounds > 1 else None  # the first round reads the prompt
            told = self.context.target is not None and self.context.target.told
            if seconds is not None and not told:
                self.verify.update(self.shown, seconds)
            self.budget.spend(self.shown, seconds, self.steps, told)
        self.begin = now
        self.forget()

    def ask(self, d: int, k: list[int], strengths: list[list[int]]) -> Proposal:
        """Draft d's proposal; its time and its likeliest paths are kept in mind."""
        begin = perf_counter()
        proposal = self.mixture.ask(d, k)
        self.paths = self.paths or [[] for _ in k]
        for b, own in enumerate(k):
            if own:
                self.paths[b].append((d, max(strengths[d][b], 0), path_of(proposal, b)))
        if not self.free[d]:
            seconds = self.context.agree(perf_counter() - begin)
            self.spent, self.steps = self.spent + seconds, self.steps + self.drafting_steps({d: max(k)})
            if self.asked[d] and self.timed:  # the first time it reads the prompt
                self.drafting[d].update(max(k), seconds)
            if self.asked[d] or not self.timed:
                self.drafting[d].ask()
            self.asked[d] += 1
            self.reach[d] = max(k) + self.STEP
        return proposal

    # --- what is expected -------------------------------------------------------------------------------------------

    def rate(self, b: int, d: int, strength: int) -> list[float]:
        """Acceptance of draft d's first token, and of a later one, in row b."""
        return self.rates[self.rows[b]][d](strength)

    def tokens(self, b: int, d: int, strength: int, most: int) -> list[float]:
        """Tokens that a round of row b is expected to commit with 0, 1, ... `most` tokens of draft d."""
        more = self.OPTIMISM if not self.free[d] and self.drafting[d].waited >= self.PATIENCE else 0.0
        return self.rates[self.rows[b]][d].expected_tokens(strength, most, more)

    def seconds(self, k: int, asked: dict[int, int]) -> float:
        """Of a round of k nodes a row in which the drafts `asked` are asked for so many tokens."""
        known = self.verify(k)
        known = 1 + self.verify.prior_ratio * k if known is None else known
        return known + self.drafting_seconds(asked)

    def drafting_seconds(self, asked: dict[int, int]) -> float:
        """Of the costly drafts among `asked`; plain steps where none has been timed."""
        step = self.verify(0) or 1.0
        return sum(self.drafting[d](n, step) for d, n in asked.items() if not self.free[d])

    def drafting_steps(self, asked: dict[int, int]) -> float:
        """The same in plain steps."""
        return self.drafting_seconds(asked) / (self.verify(0) or 1.0)

    def covers(self, k: int, asked: dict[int, int], gain: float) -> bool:
        """Whether such a round, see `seconds` and `Budget.covers`, is within the call's budget; any is where K is not "auto"."""
        return self.budget.covers(k, gain, self.drafting_steps(asked))

    def looks_at_plain(self) -> bool:
        """Whether it is time to see what a plain step costs."""
        return self.rounds > 1 and self.verify.plain_is_due()

    def next_round(self) -> None:
        self.verify.expect(len(self.rows))
        self.rounds += 1
        for cost in self.drafting:
            cost.waited += 1

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        self.paths = [self.paths[row] for row in rows] if self.paths else []


def path_of(proposal: Proposal, b: int) -> list[int]:
    """The tokens of the first branch of row b."""
    tokens = proposal.listed()[b]
    return [tokens[node - 1] for node in proposal.tree.first_branch if node <= proposal.sizes[b]]


class PlannedSchedule:
    """K "auto" of a mixture, which decides at once on drafts and numbers of tokens."""

    def __init__(self, mixture: MixtureDraft, most: int):
        self.mixture, self.most = mixture, most

    def next_k(self, evidence: list[int], room: list[int]) -> list[int]:
        """As in `schedule.FixedSchedule`."""
        self.mixture.way.earnings.budget.open(room)
        return self.mixture.way.plan([min(self.most, left - 1) if strength >= 0 else 0 for strength, left in zip(evidence, room)], room)

    def observe(self, proposed: list[int], accepted: list[int], seconds: float | None, told: bool = False) -> None:
        """The mixture learns of that by itself."""
