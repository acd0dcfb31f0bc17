"""How many tokens to draft next: a constant, or what measured acceptance and measured cost say is fastest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

from .budget import Budget, progress
from .round_cost import RoundCost


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


_calls: WeakKeyDictionary = WeakKeyDictionary()  # target -> kind of rounds -> what the last call has learned


class Learned(NamedTuple):
    """What a call leaves to the next one of its kind. known: the acceptance that it began with; counts: what it has seen since, as `Rates` has it."""

    budget: Budget
    known: dict[int, list[float]]
    counts: dict[int, list[list[float]]]


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
    WEIGHT = 10.0       # of the acceptance that such a draft has had in the calls before, in tokens judged

    def __init__(self, k_max: int, cost_ratio: float | None, timed: bool = True, prior=None, gains=None):
        self.k_max, self.drafting, self.gains = k_max, cost_ratio or 0.0, gains
        self.cost = RoundCost(timed, drafting=self.drafting)
        self.budget = Budget(self.cost)
        self.rates = Rates(prior or (lambda strength: (0.7, 0.7)))
        self.idle, self.patience = 0, self.PATIENCE[0]
        self.reach = self.START + self.STEP if cost_ratio else k_max

    def follow(self, model, kind: tuple, models: Iterable = ()) -> None:
        """Begin with what the last call has learned of the cost of `model`'s rounds of that kind, if it was ahead of plain decoding with that, and of the
        acceptance of a draft that costs something, and leave to the next one what this call learns. models: those that the draft runs; what was
        learned with one goes when it does."""
        calls = _calls.setdefault(model, {})
        for own in [own for own in list(calls) if any(isinstance(part, ref) and part() is None for part in own)]:
            calls.pop(own, None)
        kind = *kind, *map(ref, models)
        before = calls.get(kind)
        if before is not None and before.budget.ahead > 0:
            self.cost = before.budget.cost.again()
            self.budget = Budget(self.cost, before.budget)
        inherits = before is not None and self.drafting  # a model agrees with the target everywhere alike, a looked-up text where there is something to copy
        known = self._go_on_from(before) if inherits else {}
        calls[kind] = Learned(self.budget, known, self.rates.counts)

    def _go_on_from(self, before: Learned) -> dict[int, list[float]]:
        """Begin with the acceptance that the call before has ended with, and return it, by strength of the evidence."""
        own, last = self.rates.prior, Rates(self.rates.prior)
        if before.known:
            last = Rates(lambda strength: before.known.get(strength) or own(strength), self.WEIGHT)
        last.counts = before.counts
        known = before.known | {strength: last(strength) for strength in before.counts}
        if known:
            self.rates = Rates(lambda strength: known.get(strength) or own(strength), self.WEIGHT)
        return known

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
