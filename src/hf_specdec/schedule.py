"""How many tokens to draft next: a constant, or what measured acceptance and measured cost say is fastest."""

from __future__ import annotations

from copy import deepcopy
from itertools import accumulate
from weakref import WeakKeyDictionary

from .budget import Budget, progress


class FixedSchedule:
    """K tokens a round, wherever the draft has anything to propose and the row has room."""

    def __init__(self, k: int):
        self.k = k

    def next_k(self, evidence: list[int], room: list[int]) -> list[int]:
        """Tokens to draft per row. evidence: what the draft says of each row (-1: nothing); room: tokens the row may still get,
        one of which is always the target's own."""
        return [min(self.k, left - 1) if strength >= 0 else 0 for strength, left in zip(evidence, room)]

    def observe(self, proposed: list[int], accepted: list[int], seconds: float | None, told: bool = False) -> None:
        """What the round brought: tokens proposed and accepted per row, and its wall time (None: the prompt was in it). told: it was no plain step although
        nothing was proposed, but made up for tokens that had been rejected."""


class HeuristicSchedule(FixedSchedule):
    """Two tokens more after a round in which every drafted token of every row was accepted, else one less, 1 at least and `most` at
    most: transformers' "heuristic" schedule."""

    def __init__(self, k: int, most: int):
        super().__init__(min(k, most))
        self.most = most

    def observe(self, proposed: list[int], accepted: list[int], seconds: float | None, told: bool = False) -> None:
        if any(proposed):
            self.k = min(self.k + 2, self.most) if proposed == accepted else max(self.k - 1, 1)


class Rates:
    """Acceptance of a draft's first token, and of one whose forerunners were accepted, by strength of the evidence: running means, which
    forget by 2 % a token judged, shrunk towards the draft's own `prior` times what the other strengths have so far made of theirs: where
    two matches of three tokens have led nowhere, one of five is trusted less, too. With both rates equal this is the alpha of Leviathan et
    al. 2023; a looked-up continuation that has been right so far is likelier to go on being right.

    weight: of the prior, in tokens judged. memory: what a token judged leaves of the ones before.
    """

    TRUST = 2.0  # of the other strengths, in tokens judged

    def __init__(self, prior, weight: float = 5.0, memory: float = 0.98):
        self.prior, self.weight, self.memory = prior, weight, memory
        self.counts: dict[int, list[list[float]]] = {}  # strength -> [right, judged] of first and later tokens

    def copy(self) -> Rates:
        made = Rates(self.prior, self.weight, self.memory)
        made.counts = {strength: [list(count) for count in counts] for strength, counts in self.counts.items()}
        return made

    def update(self, strength: int, proposed: int, accepted: int) -> None:
        counts = self.counts.setdefault(strength, [[0.0, 0.0], [0.0, 0.0]])
        seen = (min(accepted, 1), 1), (max(accepted - 1, 0), max(min(accepted + 1, proposed) - 1, 0))
        for count, new in zip(counts, seen):
            count[:] = [value * self.memory ** new[1] + more for value, more in zip(count, new)]

    def __call__(self, strength: int) -> list[float]:
        """(first, later)."""
        found = []
        for i, prior in enumerate(self.prior(strength)):
            others = [(counts[i], self.prior(other)[i]) for other, counts in self.counts.items() if other != strength]
            right, expected = sum(own[0] for own, _ in others), sum(own[1] * rate for own, rate in others)
            prior = min(prior * (right + self.TRUST) / (expected + self.TRUST), (1 + prior) / 2)
            right, judged = self.counts[strength][i] if strength in self.counts else (0.0, 0.0)
            found.append((right + self.weight * prior) / (judged + self.weight))
        return found

    def expected_tokens(self, strength: int, most: int, more: float = 0.0) -> list[float]:
        """Tokens that a round commits if it drafts 0, 1, ... `most`, the target's own included (Eq. 1, with a first rate of its own), where
        the rates are by `more` above what was measured."""
        first, later = (min(rate + more, 0.995) for rate in self(strength))
        return list(accumulate((first * later**i for i in range(most)), initial=1.0))


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
    PLAIN_EVERY = 48, 384           # rounds until the second look at what a plain step costs; twice as many to every further one, at most
    INHERITED = 0.5                 # what a call leaves to the next one, in rounds timed

    def __init__(self, timed: bool = True, rows: int = 1, drafting: float = 0.0, blocks: tuple[int, ...] = ()):
        self.timed, self.plain, self.rounds = timed, None, 0
        self.since_plain, self.plain_every = self.PLAIN_EVERY[0] if timed else 0, self.PLAIN_EVERY[0]
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
            self.sums[wide] = [self.DOUBT * old for old in self.sums[wide]]  # so were these
        if expected is not None and (k == 0 and self.plain is not None or k and self.sums[wide][0] > 2):
            seconds = min(seconds, 2 * expected)  # a busy machine is not a cost
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


_calls: WeakKeyDictionary = WeakKeyDictionary()  # target -> kind of rounds -> the budget of the last call


class AutoSchedule:
    """K that maximises tokens per second: expected tokens (Leviathan et al. 2023, Eq. 1) over the cost of the round, which is
    Theorem 3.8 with a measured c. K = 0 is a choice; after plain rounds it tries again, less and less often while that fails.
    In a batch the tokens count by how far they bring the call (`progress`), which its slowest row ends. What a round may cost at worst is to
    be covered by the call's `Budget`.

    k_max: largest K. cost_ratio: the draft's own c, or None. timed: False leaves the clock aside, so that runs repeat.
    prior: strength -> acceptance of the first and of a later token, before anything is measured.
    gains: caps -> per row the chance of the 1st, 2nd, ... node of its tree to be accepted; K is then a number of nodes. None: acceptance is
    measured here, of chains, or of a tree by the levels it was asked for.
    """

    MARGIN = 1.03, 1.2  # a gain below this is taken for noise: in a row alone; in a batch, where a wrong guess costs all rows
    PATIENCE = 16, 64   # plain rounds before the first probe of one token, and at most, where the budget covers it
    START, STEP = 4, 2  # the first K; how much more a draft that costs something may be asked for than the last time

    def __init__(self, k_max: int, cost_ratio: float | None, timed: bool = True, prior=None, gains=None):
        self.k_max, self.drafting, self.gains = k_max, cost_ratio or 0.0, gains
        self.cost = RoundCost(timed, drafting=self.drafting)
        self.budget = Budget(self.cost)
        self.rates = Rates(prior or (lambda strength: (0.7, 0.7)))
        self.idle, self.patience = 0, self.PATIENCE[0]
        self.reach = self.START + self.STEP if cost_ratio else k_max

    def follow(self, model, kind: tuple) -> None:
        """Begin with what the last call has learned of the cost of `model`'s rounds of that kind, and leave it to the next one what this call learns."""
        calls = _calls.setdefault(model, {})
        if kind in calls:
            self.cost = calls[kind].cost.again()
            self.budget = Budget(self.cost, calls[kind])
        calls[kind] = self.budget

    def next_k(self, evidence: list[int], room: list[int]) -> list[int]:
        self.evidence = evidence
        self.cost.expect(len(evidence), self.drafting)
        self.budget.open(room)
        caps = [max(min(self.k_max, self.reach, left - 1), 0) if strength >= 0 else 0 for strength, left in zip(evidence, room)]
        k = self._best(evidence, caps, room)
        if k:
            self.idle, self.patience = 0, self.PATIENCE[0]
            if self.budget.done and self.cost(1) is not None and self.cost.plain_is_due():
                k = 0
        elif any(caps):
            self.idle += 1
            if self.idle > (self.patience if self.cost.known else self.PATIENCE[0] // 4) and self.budget.covers(1):  # has anything changed?
                k, self.idle, self.patience = 1, 0, min(2 * self.patience, self.PATIENCE[1])
        self.asked = [min(k, cap) for cap in caps]
        return self.asked

    def _best(self, evidence: list[int], caps: list[int], room: list[int]) -> int:
        cost, most = self.cost, max(caps)
        if not most:
            return 0
        blind = cost(0) is None
        if blind or not self.budget.done:
            most = min(self.START, most)
        if blind:  # nothing has been timed: a draft that costs nothing goes by its prior, another is asked for what is affordable
            cost = RoundCost(False, len(caps), self.drafting)
        expected = self._expected(evidence, caps)
        best, best_rate = 0, 0.0 if blind and self.drafting else self.MARGIN[len(caps) > 1] / cost(0)
        for k in range(1, most + 1):
            gain = progress([own[min(k, len(own) - 1)] for own in expected], room)
            rate = k if blind and self.drafting else gain / cost(k)
            if rate > best_rate and self.budget.covers(k, gain - 1):
                best, best_rate = k, rate
        return best

    def _expected(self, evidence: list[int], caps: list[int]) -> list[list[float]]:
        """Per row, tokens that a round commits if it drafts 0, 1, ... of them."""
        if self.gains:
            return [list(accumulate(chances, initial=1.0)) for chances in self.gains(caps)]
        return [self.rates.expected_tokens(strength, cap) for strength, cap in zip(evidence, caps)]

    def observe(self, proposed: list[int], accepted: list[int], seconds: float | None, told: bool = False) -> None:
        proposed = [min(n, k) for n, k in zip(proposed, self.asked)]  # a tree has more nodes than the levels it was asked for
        for strength, n, hits in zip(self.evidence, proposed, accepted):
            if n:
                self.rates.update(strength, n, hits)
        k = max(proposed, default=0)
        if k and self.reach < self.k_max:
            self.reach = k + self.STEP
        if seconds is not None and not told:
            self.cost.update(k, seconds)
        self.budget.spend(k, seconds, told=told)
