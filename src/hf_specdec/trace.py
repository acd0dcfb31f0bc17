"""`SpeculationTrace`: what happened, as plain data.

Convention: a *round* is one draft and one target forward; the forward of the first round is the prompt pass, too. Plain decoding
has a block efficiency of exactly 1.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .hints import many
from .uploads import upload

if TYPE_CHECKING:
    from .law import Law
    from .proposal import Proposal


@dataclass
class Round:
    """One row in one round: tokens proposed, drafted tokens committed, tokens committed (the target's own included).

    tokens: the committed ids. rejected: the proposed ids that were not taken, in the order in which they were proposed.
    p, q: with `record_probs`, the target's and the draft's probability of each of `tokens + rejected`, processors applied; p is
    the softmax in greedy calls, too. q is None for the target's own token, and for drafted ones that were not drawn at all.
    """

    row: int
    proposed: int
    accepted: int
    committed: int
    source: str
    tokens: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    p: list[float] | None = None
    q: list[float | None] | None = None

    @classmethod
    def of(cls, row: int, proposal: Proposal, b: int, path: list[int], tokens: list[int], proposed: list[int],
           probs: tuple[list[list[float]], list[list[float | None]]] | None = None) -> Round:
        """Row b of a proposal of the ids `proposed`: the nodes `path` were accepted, `tokens` committed. probs: `probabilities`."""
        accepted, size = min(len(tokens), len(path)), proposal.sizes[b]
        others = sorted(set(range(1, size + 1)).difference(path))
        nodes = path[:accepted] + [0] * (len(tokens) - accepted) + others  # 0 stands for the target's own token, which is last
        p, q = ([side[b][node - 1] for node in nodes] for side in probs) if probs else (None, None)
        source = proposal.source if isinstance(proposal.source, str) else proposal.source[b]
        return cls(row, size, accepted, len(tokens), source, tokens, [proposed[node - 1] for node in others], p, q)


def probabilities(proposal: Proposal, on_path: torch.Tensor, token: torch.Tensor, law: Law) -> tuple[list, list]:
    """p and q per row: of the N proposed tokens, then of the target's own, `token` [B], which follows the path [B, N+1]."""
    nodes = torch.arange(on_path.shape[1], device=token.device)
    parents = upload(proposal.tree.parents, token.device, torch.long).expand(len(token), -1)
    before = torch.cat([parents, (on_path * nodes).amax(-1, keepdim=True)], dim=1)
    p = law.prob_of(torch.cat([proposal.tokens, token[:, None]], dim=1), before).tolist()
    if proposal.probs is None:
        return p, [[None] * len(row) for row in p]
    q = proposal.probs.gather(-1, proposal.tokens[..., None])[..., 0]
    return p, [row + [None] for row in q.tolist()]


@dataclass
class SpeculationTrace:
    """config: the settings in force, "draft" the name of the draft that was used. rounds: one list per round, one entry per row that was still going.

    target_calls, draft_calls: forwards, prompt passes included. seconds, on the host's clock: "prompt" (all of the first round),
    "draft", "verify", "rest" (the later rounds), and "forward" (inside the two models in the later rounds). round_seconds: of every
    round, [draft, verify, rest]. On a GPU, "draft", "verify" and "forward" are what it takes to give the orders: the wait is in
    "rest". lossless: whether the committed tokens follow the target's own law.
    """

    config: dict[str, Any]
    lossless: bool = True
    rounds: list[list[Round]] = field(default_factory=list)
    target_calls: int = 0
    draft_calls: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prompt", "draft", "verify", "rest", "forward"), 0.0))
    drafted: list[list[bool]] = field(default_factory=list)
    round_seconds: list[list[float]] = field(default_factory=list)
    prompt_forward = 0.0  # inside the two models in the first round

    def __repr__(self) -> str:
        rows = f" of {len(self.drafted)} rows" if len(self.drafted) > 1 else ""
        said = [f"{many(self._total('committed'), 'token')}{rows} in {many(self.target_calls, 'pass')}"]
        said += [f"{self.block_efficiency:.2f} tokens per forward"] if self.rounds else []
        said += [f"{self.acceptance_rate:.0%} accepted" if self.proposed else "nothing drafted", "lossless" if self.lossless else "not lossless"]
        return f"SpeculationTrace({', '.join(said)})"

    def clock(self, draft: float, verify: float, rest: float, forward: float) -> None:
        """A round has taken so long; the models have so far taken `forward`."""
        self.round_seconds.append([draft, verify, rest])
        if len(self.round_seconds) == 1:
            self.seconds["prompt"], self.prompt_forward = draft + verify + rest, forward
            return
        self.seconds["forward"] = forward - self.prompt_forward
        for name, spent in (("draft", draft), ("verify", verify), ("rest", rest)):
            self.seconds[name] += spent

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
        """Tokens committed per round and row, bonus token included; nan without a round. A round is one target forward, but for the first one where
        the draft proposes trees: there the prompt has a pass of its own."""
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
