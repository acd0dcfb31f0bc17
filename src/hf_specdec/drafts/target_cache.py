"""Drafts that are the target itself, run for less: they read and write the target's own cache."""

from __future__ import annotations

from transformers import PreTrainedModel

from .. import compat
from ..media import Media
from ..proposal import Proposal
from .base import Context
from .model import ModelDraft


class TargetCacheDraft(ModelDraft):
    """Drafts with `model`, whose layers are `target`'s in shape, on the target's cache: it reads what the target's last pass has left for the
    committed tokens, and what it writes for drafted ones is overwritten by the target's next pass. It needs no prompt pass of its own, and has nothing
    to catch up with after rounds in which it was not asked. In a call of another target, or where there are states or an encoder, it has a cache of its own.
    """

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel):
        super().__init__(model)
        self.whole = compat.unwrap(target)
        self.shared, self.own_cache = False, None

    def start(self, context: Context) -> None:
        target = context.target
        self.shared = target is not None and target.states is None and context.source is None and compat.unwrap(target.model) is self.whole
        super().start(context)
        self.own_cache = self.cached.cache
        if self.shared:
            self.cached.cache = target.cache

    def _pictures(self, context: Context) -> Media | None:
        """Nothing but what is in the target's cache, where that is shared."""
        return None if self.shared else super()._pictures(context)

    def evidence(self, context: Context) -> list[int]:
        """-1 before the target has read the prompt."""
        return [-1] * len(context.rows) if self.shared and not context.target.lengths else super().evidence(context)

    def propose(self, context: Context, k: list[int]) -> Proposal:
        if self.shared and not any(k):  # the target's cache may be empty, and is to stay as it is
            return Proposal.from_lists([[] for _ in k], context.device, self.name)
        return super().propose(context, k)

    def _forget_what_was_rejected(self, context: Context) -> None:
        if not self.shared:
            super()._forget_what_was_rejected(context)
            return
        self.cached.lengths, self.cached.ahead = list(context.target.lengths), list(context.target.ahead)
        self.cached.sight = context.target.sight
        self.base, self.drafted = [len(row) for row in context.rows], [[] for _ in context.rows]

    def _keep_cached(self, rows: list[int]) -> None:
        """The target drops the rows of its own cache; where they begin is asked before every pass."""
        if not self.shared:
            super()._keep_cached(rows)

    def finish(self) -> None:
        if self.own_cache is not None:  # start() has come so far
            self.cached.cache, self.own_cache = self.own_cache, None
        super().finish()
