"""A feature draft that writes down what it computes, for tests that compute the same another way."""

from __future__ import annotations

from hf_specdec.drafts.feature import FeatureDraft


class Watched(FeatureDraft):
    """log: of every step of every round, its number, the rows as committed, the tokens drafted before it (a list of one per row for
    each step), and the logits [B, 1, V] that it gave."""

    def start(self, context):
        super().start(context)
        self.log = []

    def _scores(self, context, tokens, k, step):
        logits = super()._scores(context, tokens, k, step)
        self.log.append((step, [list(row) for row in context.rows], [one.tolist() for one in tokens], logits.clone()))
        return logits
