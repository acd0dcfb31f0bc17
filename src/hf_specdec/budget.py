"""What a call may lose by trying a draft, and how far a round brings it."""

from __future__ import annotations

from math import exp, inf, log
from typing import Protocol


class Cost(Protocol):
    """What `Budget` asks of `round_cost.RoundCost`."""

    timed: bool
    known: bool

    def steps(self, k: int, worst: bool = False) -> float: ...

    def __call__(self, k: int) -> float | None: ...


class Budget:
    """How far a call may fall behind plain decoding: by SHARE of the plain steps to where it is, of LEAST where it is not as far yet, or of
    all that it has room for if they are fewer. What it is ahead may be spent, too. It is where its row with most room is, which ends it.

    A conservative bandit (Wu et al. 2016): a round that costs more than that at its worst is not made, and of what is expected of it no more than
    CREDIT is counted on.

    before: the budget of an earlier call, from which this one inherits what it was ahead, INHERITED at most.
    """

    SHARE, LEAST = 0.02, 48
    CREDIT, INHERITED = 0.25, 2.0  # plain steps

    def __init__(self, cost: Cost, before: Budget | None = None):
        self.cost = cost
        self.most = self.room = None  # tokens of room at first, and now
        self.inherited = 0.0 if before is None else min(max(before.ahead, 0.0), self.INHERITED)
        self.done, self.spent = 0, -self.inherited  # in plain steps: where the call is, and the time it took
        self.left = inf  # plain steps that may be lost in this round

    @property
    def ahead(self) -> float:
        """Plain steps by which the call itself is ahead of plain decoding."""
        return self.done - self.spent - self.inherited

    def open(self, room: list[int]) -> None:
        """A round of rows with so much room begins."""
        if self.most is None:
            self.most = max(room)
        else:
            self.done += max(self.room - max(room), 1)
        self.room = max(room)
        self.left = self.SHARE * min(max(self.done, self.LEAST), self.most) + self.done - self.spent
        if not self.done:
            self.left /= 2  # the round that reads the prompts is not timed: the other half is for one that teaches what a round costs

    def covers(self, k: int, gain: float = 0.0, drafting: float = 0.0) -> bool:
        """Whether a round of k drafted tokens may be made. gain: `progress` that is expected of it beyond a plain round's. drafting: plain steps that
        the draft takes, if the cost does not include them."""
        return self.cost.steps(k, worst=True) + drafting - 1 <= self.left + min(gain, self.CREDIT) + 1e-9

    def spend(self, k: int, seconds: float | None, drafting: float = 0.0, told: bool = False) -> None:
        """The round took `seconds`, without the draft's where `drafting` has them, or what such rounds usually take, if that is less. None: not known, which is
        taken for the worst. told: as `AutoSchedule.observe` has it."""
        steps, plain = self.cost.steps(k, worst=True), self.cost(0)
        if seconds is not None and self.cost.timed and plain:
            steps = min(seconds / plain, (2 if told else 1) * steps)  # a busy machine is not a cost
        self.spent += steps + drafting if k or told else 1.0


def progress(tokens: list[float], room: list[int], spread: float = 2.0, share: float = 0.2) -> float:
    """How many plain rounds a round is worth that commits tokens[b] to row b, whose room is room[b] tokens: 1 if every row gets one, n if
    every row gets n.

    A batch ends with its slowest row, and a round costs little less for a row that has ended before. So tokens count by what they add to
    the least progress of any row, a soft minimum over `spread` tokens; a `share` of the mean is for rows that end before their room does.
    """
    most = max(room)
    before = [exp((left - most) / spread) for left in room]
    after = sum(weight * exp((1 - new) / spread) for weight, new in zip(before, tokens))
    return share * sum(tokens) / len(tokens) + (1 - share) * (1 + spread * log(sum(before) / after))
