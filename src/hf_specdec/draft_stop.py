"""When a draft stops before K. A token that made it stop is kept and judged like the others, and what is said of a token before it is drawn
may leave it undrawn, so that every way is exact: what is proposed depends on nothing but tokens that are proposed."""

from __future__ import annotations

from dataclasses import dataclass

CHOICES = ("constant", "heuristic", "confidence", "expected_gain")


class Calibration:
    """How often a drafted token of some confidence was accepted once its forerunners were: running means in ten bins, which begin
    with the confidence itself and forget by 2 % a token."""

    BINS, WEIGHT = 10, 4.0

    def __init__(self):
        self.counts = [[(i + 0.5) / self.BINS * self.WEIGHT, self.WEIGHT] for i in range(self.BINS)]  # accepted, judged

    def _bin(self, confidence: float) -> int:
        return min(int(confidence * self.BINS), self.BINS - 1)

    def __call__(self, confidence: float) -> float:
        """Estimated acceptance of a token that the draft gave this probability."""
        hits, judged = self.counts[self._bin(confidence)]
        return hits / judged

    def update(self, confidence: float, accepted: bool) -> None:
        count = self.counts[self._bin(confidence)]
        count[0], count[1] = 0.98 * count[0] + accepted, 0.98 * count[1] + 1


@dataclass(frozen=True)
class StopRule:
    """The choice of a call. kind: "confidence" or "expected_gain". threshold: of the former, in (0, 1]. cost: c, one step of the draft
    over one of the target."""

    kind: str
    threshold: float
    cost: float

    def start(self, batch: int) -> DraftStop:
        """The state of one draft in one call."""
        return DraftStop(self, batch)


class DraftStop:
    """Ends the rows of a draft one by one. Every row learns from its own rounds alone, and only from those that are over."""

    def __init__(self, rule: StopRule, batch: int):
        self.rule = rule
        self.rows = [Calibration() for _ in range(batch)]
        self.round: list[list[float]] = [[] for _ in range(batch)]  # confidences of the tokens drafted in this round

    def begin(self) -> None:
        """A round begins."""
        self.round = [[] for _ in self.rows]

    def shortened(self, k: list[int], step: int, confidence: list[float]) -> list[int]:
        """k after token `step` of every row has been drafted with that probability of its own: rows that stop end with it."""
        out = []
        for own, seen, calibration, value in zip(k, self.round, self.rows, confidence):
            if step < own:
                seen.append(value)
                own = own if self._goes_on([calibration(one) for one in seen]) else step + 1
            out.append(own)
        return out

    def foretold(self, k: list[int], step: int, confidence: list[float]) -> list[int]:
        """k before token `step` of every row is drafted, of whose acceptance this much is expected by what knows the tokens before it alone: rows
        that stop end without it. The first token is drafted in any case."""
        out = []
        for own, seen, calibration, value in zip(k, self.round, self.rows, confidence):
            if step < own:
                if step and not self._goes_on([calibration(one) for one in seen], calibration(value)):
                    own = step
                else:
                    seen.append(value)
            out.append(own)
        return out

    def _goes_on(self, rates: list[float], ahead: float | None = None) -> bool:
        """rates: estimated acceptances of the tokens drafted so far; ahead: that of the next one, where there is any before it is drawn."""
        reached, expected = 1.0, 1.0  # probability that all are accepted; tokens of the round, the target's own included
        for rate in rates:
            reached *= rate
            expected += reached
        if self.rule.kind == "confidence":
            return (rates[-1] if ahead is None else reached * ahead) >= self.rule.threshold
        gain = reached * (sum(rates) / len(rates) if ahead is None else ahead)  # without `ahead` the next token is taken to be like those before it
        return gain > self.rule.cost * expected / (1 + self.rule.cost * len(rates))

    def learn(self, accepted: list[int]) -> None:
        """Tokens accepted per row in the round that is over."""
        for seen, calibration, hits in zip(self.round, self.rows, accepted):
            for i, value in enumerate(seen[: hits + 1]):
                calibration.update(value, i < hits)
        self.begin()

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        self.rows, self.round = [self.rows[row] for row in rows], [self.round[row] for row in rows]
