"""What a round takes, measured: the cost side of K "auto"."""

from __future__ import annotations

from copy import deepcopy


def fitted_line(sums: list[float], prior: float, most: float) -> tuple[float, float]:
    """a and s of a + s k, the seconds of a round by least squares; s, which is in 0..most, is shrunk towards `prior`. sums: n, k, k^2, t, k t."""
    n, k, kk, t, kt = sums
    strength = 2.0  # of the prior
    slope = (kt - k * t / n + strength * prior) / (kk - k * k / n + strength)
    slope = min(max(slope, 0.0), most)
    return (t - slope * k) / n, slope


class RoundCost:
    """Wall time of a round that drafts k tokens: T(0), a plain step, and two lines a + s k, fitted with forgetting, for passes over at most
    NARROW tokens of all rows and for wider ones: small matrix products cost about what one row costs, up to a width from which they cost
    more with every row.

    s / T(0) is the cost ratio c of Leviathan et al. 2023, with the price of the wider target pass in it. Until a plain step has been
    timed, T(0) = a; until two values of k have been timed, s comes from `prior_ratio`; until rounds of one kind have been, the other's
    line holds for both. `worst_ratio` is the prior of who has to reckon with the worst.

    blocks: tokens of a row that a pass is filled up to, ascending: it costs what the filled one does. () where it is not.
    """

    PER_ROW = 0.03     # what a token more per row costs the target before it has been timed, in plain steps
    WORST = 0.12, 0.9  # and what it may: per row, and of all rows, since a pass twice as wide takes less than two
    NARROW = 8
    MEMORY, ELSEWHERE = 0.95, 0.99  # what a round leaves of those before it, on its own line and on the other one
    TRUST, FAR = 0.5, 1.25          # of the other line, in rounds; how far a wide one may raise what is timed of narrow rounds
    SLOW, DOUBT = 0.75, 0.25        # a round by so much faster than expected leaves little of those before it
    MOST = 4.0                      # times what was expected that one of the first rounds of its kind is believed to take
    BUSY = 1.5                      # and from which one that comes alone is a busy machine
    PLAIN_EVERY = 48, 384           # rounds until the second look at what a plain step costs; twice as many to every further one, at most
    INHERITED = 0.5                 # what a call leaves to the next one, in rounds timed

    def __init__(self, timed: bool = True, rows: int = 1, drafting: float = 0.0, blocks: tuple[int, ...] = ()):
        self.timed, self.plain, self.rounds = timed, None, 0
        self.since_plain, self.plain_every = self.PLAIN_EVERY[0] if timed else 0, self.PLAIN_EVERY[0]
        self.busy = [False, False]  # whether the last plain round, and the last that drafted, was left out for taking so long
        self.blocks = blocks
        self.expect(rows, drafting)
        self.sums = [[0.0] * 5 for _ in range(2)]  # narrow and wide: n, k, k^2, t, k t

    def expect(self, rows: int, drafting: float = 0.0) -> None:
        """Rounds of so many rows, with a draft that takes so many plain steps a token."""
        self.rows, self.prior_ratio = rows, drafting + min(self.PER_ROW * rows, self.WORST[1])
        self.worst_ratio = drafting + min(self.WORST[0] * rows, self.WORST[1])

    def again(self) -> RoundCost:
        """What the next call begins with."""
        made = deepcopy(self)
        made.sums = [[self.INHERITED * value for value in sums] for sums in self.sums]
        made.plain_every = self.PLAIN_EVERY[0]
        return made

    def plain_is_due(self) -> bool:
        """Whether it is time to look at what a plain step costs, as is then done."""
        due = self.since_plain >= self.plain_every
        if due and self.plain is not None:
            self.plain_every = min(2 * self.plain_every, self.PLAIN_EVERY[1])
        return due

    def update(self, k: int, seconds: float) -> None:
        if not self.timed:
            return
        self.since_plain = self.since_plain + 1 if k else 0
        k = self._filled(k)
        wide, expected = self._wide(k), self(k)
        if self.plain is not None and seconds < self.SLOW * self.plain:
            self.plain = seconds  # no round is faster than a plain step: that one was timed in a bad moment, or for other weights, and so were the others
            self.since_plain = self.plain_every if k else 0
            self.sums = [[self.DOUBT * value for value in sums] for sums in self.sums]
        if k and expected is not None and seconds < self.SLOW * expected:
            doubt = self.DOUBT if 2 * seconds > expected else 0.0
            self.sums[wide] = [doubt * old for old in self.sums[wide]]  # so were these
        self.busy[k > 0] = self.known and not self.busy[k > 0] and expected is not None and seconds > self.BUSY * expected
        if self.busy[k > 0]:
            return
        if expected is not None and (k or self.plain is not None):  # a busy machine is not a cost
            seconds = min(seconds, (2 if k == 0 or self.sums[wide][0] > 2 else self.MOST) * expected)
        if k == 0:
            weight = 0.2 if self.plain is not None and seconds > self.plain else 0.5  # the first steps of a call are slow ones
            self.plain = seconds if self.plain is None else (1 - weight) * self.plain + weight * seconds
        else:
            self.rounds += 1
            new = (1.0, k, k * k, seconds, k * seconds)
            for line, sums in enumerate(self.sums):
                own, memory = line == wide, self.MEMORY if line == wide else self.ELSEWHERE
                sums[:] = [memory * old + own * x for old, x in zip(sums, new)]

    @property
    def known(self) -> bool:
        """Whether more than two rounds with drafted tokens have been timed."""
        return not self.timed or self.rounds > 2

    def _filled(self, k: int) -> int:
        """Drafted tokens of a pass that costs as much as one over k."""
        return next((places - 1 for places in self.blocks if k < places), k)

    def _wide(self, k: int) -> bool:
        return self.rows * (k + 1) > self.NARROW

    def _line(self, sums: list[float], ratio: float) -> tuple[float, float] | None:
        n, k, _, t, _ = sums
        if n == 0:
            return None
        base = t / (n + ratio * k)  # the best a if s = ratio * a
        return fitted_line(sums, ratio * base, 0.95 * t / k)  # a plain step takes some time

    def steps(self, k: int, worst: bool = False) -> float:
        """Plain steps that a round takes which drafts k tokens. worst: by `worst_ratio`, as far as nothing else has been timed."""
        ratio, plain, k = self.worst_ratio if worst and self.timed else self.prior_ratio, self(0), self._filled(k)
        steps = 1 + ratio * k if plain is None else self(k, ratio) / plain
        return steps if self.known else min(steps, 1 + self.worst_ratio * k)

    def __call__(self, k: int, ratio: float | None = None) -> float | None:
        """Seconds of a round that drafts k tokens (1.0 per plain step where nothing has been timed); None: not known. ratio: instead of
        `prior_ratio`."""
        ratio, k = self.prior_ratio if ratio is None else ratio, self._filled(k)
        if not self.timed:
            return 1 + ratio * k
        timed = any(sums[0] for sums in self.sums)
        if self.plain is None and not timed:
            return None
        if k == 0 and self.plain is not None:
            return self.plain
        if not timed:
            return self.plain * (1 + ratio * k)
        wide = self._wide(k)
        own, other = self._line(self.sums[wide], ratio), self._line(self.sums[not wide], ratio)
        if own is None or other is None:
            base, slope = other if own is None else own
            return base + slope * k
        n, here, there = self.sums[wide][0], own[0] + own[1] * k, other[0] + other[1] * k
        if wide:
            here = max(here, other[0] + other[1] * (self.NARROW // self.rows - 1))  # no less than the widest narrow one
        else:
            there = min(there, self.FAR * here)  # a wide pass that takes long says little of a narrow one
        return (n * here + self.TRUST * there) / (n + self.TRUST)
