"""A draft inside another one: it has rows of its own, which may run ahead of what is committed, and streams of its own; and what it learns of
a verdict on a pass whose nodes others have proposed, too."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from .. import compat
from ..hints import what
from ..proposal import Proposal, Verdict
from ..uploads import upload
from .base import Context, Draft


class Inner:
    """draft: started on a context of its own, made of `context` with `changes`. rows: its rows, token ids; they are cut and grown in
    place. turn: the number under which its random streams go; numbers of different turns are independent."""

    def __init__(self, draft: Draft, context: Context, turn: int = 0, **changes):
        self.draft, self.outer, self.turn = draft, context, turn
        self.rows = [list(row) for row in context.rows]
        self.context = replace(context, rows=self.rows, noise=self.noise, stop=None, outer=context, barred=set(), **changes)
        draft.start(self.context)

    def noise(self, stream: str, n: int) -> torch.Tensor:
        return self.outer.noise(f"draft:{self.turn}/{stream}", n)

    def follow(self, rows: list[list[int]]) -> list[int]:
        """Make the rows equal to `rows`, and let the draft forget what stands no more; per row, how many tokens still stood."""
        same = [common(own, row) for own, row in zip(self.rows, rows)]
        if any(n < len(own) for n, own in zip(same, self.rows)):
            for own, n in zip(self.rows, same):
                del own[n:]
            self.draft.rewind(self.context, same)
        for own, row, n in zip(self.rows, rows, same):
            own += row[n:]
        return same

    def propose(self, k: list[int]) -> Proposal:
        """At most k[b] tokens for row b, none deeper than that; checked unless the draft is the package's own."""
        evidence = self.draft.evidence(self.context)
        k = [own if strength >= 0 else 0 for own, strength in zip(k, evidence)]
        proposal = self.draft.propose(self.context, k)
        if not self.draft.trusted:
            Proposal.check(proposal, len(k), self.context.vocab_size, self.draft.name)
        return proposal.within(k)

    def keep(self, rows: list[int]) -> None:
        self.rows[:] = [self.rows[row] for row in rows]
        self.draft.keep(rows)


class Judged:
    """The verdict on a pass over `shown`: which tokens of each row were taken."""

    def __init__(self, shown: Proposal, verdict: Verdict):
        self.verdict = verdict
        self.taken = [[token for token, on in zip(tokens, path[1:]) if on] for tokens, path in zip(shown.listed(), verdict.paths())]

    def tell(self, draft: Draft, proposal: Proposal | None) -> None:
        """Let the draft learn of the pass, if it `reads_pass`, or of its own proposal from the root, if it has made one."""
        if draft.reads_pass:
            draft.commit(self.verdict)
        elif proposal is not None:
            own = copy(self.verdict)
            own.on_path, own.on_host = self._on_path(proposal), None
            draft.commit(own)

    def _on_path(self, proposal: Proposal) -> torch.Tensor:
        """Bool [B, N+1]: which nodes of `proposal` lie on the tokens taken of their row."""
        on_path = torch.zeros((len(self.taken), len(proposal.tree) + 1), dtype=torch.bool, device="cpu")
        on_path[:, 0] = True
        for b, (tokens, path) in enumerate(zip(proposal.listed(), self.taken)):
            last, depth = 0, 0
            for node, parent in enumerate(proposal.tree.parents[: proposal.sizes[b]], start=1):
                if parent == last and depth < len(path) and tokens[node - 1] == path[depth]:
                    on_path[b, node], last, depth = True, node, depth + 1
        return upload(on_path, proposal.tokens.device)


def refuse_encoder(model, role: str) -> None:
    """ValueError if `model` has an encoder: a draft that runs it reads the rows alone; TypeError if it is no model."""
    if not isinstance(compat.unwrap(model), PreTrainedModel):
        raise TypeError(f"{role}: expected a transformers model, got {what(model)}. Load one with from_pretrained.")
    if compat.unwrap(model).config.is_encoder_decoder:
        raise ValueError(f"{role}: {type(compat.unwrap(model)).__name__} is an encoder-decoder model, which this draft cannot run. Pass a "
                         f"decoder-only one, or make the whole model the draft with ModelDraft(model).")


def common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(i for i in range(n) if one[i] != other[i])


def chains(tokens: list[list[int]], laws: list[list[torch.Tensor]] | None, context: Context, source: str) -> Proposal:
    """Chains of drawn tokens: laws[b][i] float [V] is what token i of row b was drawn from; laws None for point masses."""
    proposal = Proposal.from_lists(tokens, context.device, source)
    if laws is not None and len(proposal.tree):
        proposal.probs = torch.zeros((*proposal.tokens.shape, context.vocab_size), dtype=torch.float32, device=context.device)
        for b, own in enumerate(laws):
            if own:
                proposal.probs[b, : len(own)] = torch.stack(own)
    return proposal
