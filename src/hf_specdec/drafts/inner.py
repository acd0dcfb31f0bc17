"""Drafts that hold others, or a model. A draft inside another one has rows of its own, which may run ahead of what is committed, and streams of
its own; and it learns of verdicts on passes whose nodes others have proposed, too."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from .. import compat
from ..cached_model import CachedModel
from ..hints import what
from ..probe import check_batch, check_mode
from ..proposal import Proposal, Verdict
from ..seq2seq import Source
from ..uploads import upload
from .base import Context, Draft


class Holder(Draft):
    """A draft that holds a model with its cache, or other drafts, its `parts`: their forwards count as its own, and they are kept and end with it.

    cached: the model, from the start of a call on; its cache is None where it is somebody else's to release.
    """

    cached: CachedModel | None = None

    def hold(self, model: PreTrainedModel, traits: compat.ModelTraits, context: Context, limit: int, role: str = "assistant_model",
             source: Source | None = None) -> None:
        """`model` with an empty cache of at most `limit` slots a row, which reads prompts in pieces where the target does. ValueError naming `role` if it
        cannot score the rows of the call."""
        check_mode(model, role)
        check_batch(compat.unwrap(model), traits, len(context.rows), role)
        self.cached = CachedModel(model, limit, role, traits, source, compile=context.compiles)
        self.cached.chunk = context.target and context.target.chunk
        self.cached.lengths = [0] * len(context.rows)

    @property
    def calls(self) -> int:
        return (self.cached.calls if self.cached else 0) + sum(part.calls for part in self.parts)

    @property
    def forward_seconds(self) -> float:
        return (self.cached.seconds if self.cached else 0.0) + sum(part.forward_seconds for part in self.parts)

    def keep(self, rows: list[int]) -> None:
        for part in self.parts:
            part.keep(rows)

    def finish(self) -> None:
        if self.cached is not None and self.cached.cache is not None:
            self.cached.cache.release()
        for part in self.parts:
            part.finish()
        super().finish()


class Composed(Holder):
    """A draft whose parts look at the target's passes with it. `prior`, `stops` and `relative_cost` are those of the first of them.

    asked:  of every part, what it has proposed in this round, if anything; a subclass says so.
    judged: what the target's last pass was about in place of that.
    """

    reads_pass = True

    def __init__(self, parts: tuple[Draft, ...]):
        self.parts, self.judged = parts, None
        self.forget_asked()

    def forget_asked(self) -> None:
        self.asked: list[Proposal | None] = [None] * len(self.parts)

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        self.judged = proposal
        for part in self.parts:
            part.observe(proposal, logits)

    def commit(self, verdict: Verdict) -> None:
        """Every part learns which nodes of the pass are on the accepted path, or which of its own, if it has proposed any."""
        if any(type(part).commit is not Draft.commit for part in self.parts):
            judged = Judged(self.judged, verdict)
            for part, proposal in zip(self.parts, self.asked):
                judged.tell(part, proposal)

    def finish(self) -> None:
        self.judged = None
        self.forget_asked()
        super().finish()

    @property
    def reads_prompt(self) -> bool:
        return any(part.reads_prompt for part in self.parts)

    @property
    def stops(self) -> bool:
        return self.parts[0].stops

    def prior(self, strength: int) -> tuple[float, float]:
        return self.parts[0].prior(strength)

    def relative_cost(self, target) -> float | None:
        return self.parts[0].relative_cost(target)


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
        """Only these rows go on; the draft is told by the one that holds it."""
        self.rows[:] = [self.rows[row] for row in rows]


class Judged:
    """The verdict on a pass over `shown`: which tokens of each row were taken."""

    def __init__(self, shown: Proposal, verdict: Verdict):
        self.shown, self.verdict = shown, verdict
        self.taken = [[token for token, on in zip(tokens, path[1:]) if on] for tokens, path in zip(shown.listed(), verdict.paths())]

    def tell(self, draft: Draft, proposal: Proposal | None) -> None:
        """Let the draft learn of the pass, if it `reads_pass`, or of its own proposal from the root, if it has made one."""
        if draft.reads_pass or proposal is self.shown:
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
