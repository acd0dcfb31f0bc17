"""`SpeculationTrace`: what happened, as plain data.

Convention: a *round* is one draft and one target forward; the forward of the first round is the prompt pass, too. Plain decoding
has a block efficiency of exactly 1.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass
class Round:
    """One row in one round: tokens proposed, drafted tokens committed, tokens committed (the target's own included)."""

    row: int
    proposed: int
    accepted: int
    committed: int
    source: str


@dataclass
class SpeculationTrace:
    """config: the settings in force. rounds: one list per round, one entry per row that was still going.

    target_calls, draft_calls: forwards, prompt passes included. seconds, on the host's clock: "prompt" (all of the first round),
    "draft", "verify", "rest" (the later rounds), and "forward" (inside the two models in the later rounds). lossless: whether the
    committed tokens follow the target's own law.
    """

    config: dict[str, Any]
    lossless: bool = True
    rounds: list[list[Round]] = field(default_factory=list)
    target_calls: int = 0
    draft_calls: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prompt", "draft", "verify", "rest", "forward"), 0.0))
    drafted: list[list[bool]] = field(default_factory=list)

    def _total(self, name: str) -> int:
        return sum(getattr(entry, name) for entries in self.rounds for entry in entries)

    @property
    def new_tokens(self) -> list[int]:
        """Committed tokens per row."""
        return [len(row) for row in self.drafted]

    @property
    def proposed(self) -> int:
        return self._total("proposed")

    @property
    def accepted(self) -> int:
        """Drafted tokens that were committed."""
        return self._total("accepted")

    @property
    def acceptance_rate(self) -> float:
        """accepted / proposed; nan where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else float("nan")

    @property
    def block_efficiency(self) -> float:
        """Tokens committed per target forward and row, bonus token included; nan without a round."""
        forwards = sum(len(entries) for entries in self.rounds)
        return self._total("committed") / forwards if forwards else float("nan")

    @property
    def draft_mask(self) -> torch.Tensor:
        """Bool [B, max new tokens]: committed tokens that were drafted (False on padding)."""
        width = max(self.new_tokens, default=0)
        return torch.tensor([row + [False] * (width - len(row)) for row in self.drafted], dtype=torch.bool).reshape(-1, width)

    def to_json(self, **kwargs) -> str:
        """Everything as JSON text; keyword arguments go to `json.dumps`."""
        ratios = {name: getattr(self, name) for name in ("acceptance_rate", "block_efficiency")}
        ratios = {name: None if value != value else value for name, value in ratios.items()}
        return json.dumps({**asdict(self), **ratios, "new_tokens": self.new_tokens}, **kwargs)
