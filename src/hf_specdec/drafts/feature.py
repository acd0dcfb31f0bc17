"""A drafter that reads the target's hidden states and goes on from its own (EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .. import parts
from ..proposal import Proposal, Verdict
from ..tap import Tap
from ..uploads import upload
from .base import Context, Run
from .features import fused, inputs, rows_at, tapped
from .inner import Judged, common
from .model import ModelDraft


class FeatureDraft(ModelDraft):
    """Drafts with a small model made by `training`, whose place t sees the target's states at t and the token at t + 1. After the
    committed tokens it takes its own output for the target's states.

    model:  the feature drafter (`training.load_drafter` makes the whole draft).
    target: the model whose generate() it is used in. Its passes show their hidden states; nothing of it is touched.

    It has nothing to propose before the target has read the prompt, nor under stock assisted decoding. Raises ValueError if `model` is no feature drafter.
    """

    name = "feature"
    reads_pass = True

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, **options):
        if not getattr(model, "reads", None):
            raise ValueError(f"model: {type(model).__name__} reads no hidden states; load a feature drafter with training.load_drafter.")
        super().__init__(model, **options)
        self.target, self.layers = target, model.reads
        self.tap: Tap | None = None

    def start(self, context: Context) -> None:
        parts.of_one_dtype(self.model.feature_fuse.weight, self.model.get_input_embeddings().weight.dtype)
        if self.traits.states and len(context.rows) > 1:
            raise ValueError("assistant_model: layers of a feature drafter that carry states take one row. Generate the rows one by one, or make the drafter of "
                             "layers of attention.")
        super().start(context)
        self.tap = None
        self.known = [0] * len(context.rows)  # of every row, places whose states are there
        if context.stock:  # stock decoding shows no states
            return
        self.tap, self.cached.embed = tapped(self.target, self.layers, context), self._inputs
        self.own = self.cached.watch(self._last())
        width = self.model.feature_fuse.weight.shape[0]
        self.states = torch.zeros((len(context.rows), 0, width), dtype=self.model.dtype, device=self.model.device)
        self.output: torch.Tensor | None = None
        self.first = True

    def _last(self) -> tuple[int, ...]:
        return (self.model.config.get_text_config().num_hidden_layers,)

    def watching(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.layers)))

    def models(self) -> list[Run]:
        return [Run(self.model, inputs, self.model.feature_fuse.weight.shape[0], self._last(), self.alone)]

    # --- the target's states ------------------------------------------------------------------------------------------

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        """Keep the states of all that was committed; those of the candidates wait for the verdict."""
        if self.tap is None:
            return
        for states, starts in self.tap.take(len(self.context.rows)):
            states = fused(self.model, states.to(self.model.device))
            for b, (row, start) in enumerate(zip(self.context.rows, starts)):
                self._store(b, start, states[b, : len(row) - start])
        self.judged = proposal, states, [len(row) - 1 - start for row, start in zip(self.context.rows, starts)]

    def commit(self, verdict: Verdict) -> None:
        proposal, states, roots = self.judged
        if self.stop is not None:
            self.stop.learn(list(map(common, self._drafted(), Judged(proposal, verdict).taken)))
        for b, (path, root) in enumerate(zip(verdict.paths(), roots)):
            nodes = [node for node, taken in enumerate(path) if taken and node]
            self._store(b, len(self.context.rows[b]), rows_at(states[b], [root + node for node in nodes]))

    def _store(self, b: int, start: int, states: torch.Tensor) -> None:
        end = start + len(states)
        if end > self.states.shape[1]:
            room = min(max(2 * end, 128), self.context.max_length + 1)
            more = self.states.new_zeros((len(self.states), max(room, end) - self.states.shape[1], self.states.shape[2]))
            self.states = torch.cat([self.states, more], dim=1)
        self.states[b, start:end] = states
        self.known[b] = max(self.known[b], end)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def evidence(self, context: Context) -> list[int]:
        fits = self._fits(context) and min(self.known) > 0
        return [0 if fits else -1] * len(context.rows)

    def propose(self, context: Context, k: list[int]) -> Proposal:
        return super().propose(context, k if min(self.known) > 0 else [0] * len(k))

    def _forget_what_was_rejected(self, context: Context) -> None:
        """What was drafted stands on states of the draft's own: none of it is kept. Inside a cascade, a row may not have grown."""
        self.cached.crop([min(base - 1, len(row) - 2) for base, row in zip(self.base, context.rows)])
        self.base = [len(row) for row in context.rows]
        self.drafted = [[] for _ in context.rows]

    def _known(self, context: Context) -> list[list[int]]:
        return [row[1:] for row in context.rows]

    def _scores(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> torch.Tensor:
        self.first = step == 0
        logits = super()._scores(context, tokens, k, step)
        self.output = self._shown()
        if self.first:  # go on from the last place that stands on the target's states
            last = upload(self.cached.fresh, self.output.device) - 1
            self.output = self.output[torch.arange(len(last), device=last.device), last][:, None]
        return logits

    def _embeds(self) -> tuple:
        return inputs, self.output

    def _went_on(self, states: torch.Tensor) -> None:
        self.first, self.output = False, states

    def _inputs(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first layer's input [B, L, H]: the tokens beside the target's states, or the draft's own output."""
        return inputs(self.model, self._ahead(tokens.shape[1]) if self.first else self.output, tokens)

    def _shown(self) -> torch.Tensor:
        """What the last layer has put out in the last pass, [B, L, H]."""
        (*_, (output, _)) = self.own.take(len(self.context.rows))
        return output

    def _ahead(self, width: int) -> torch.Tensor:
        """The target's states [B, width, H] at the places that come next in the draft's cache; the last one where there are none."""
        starts, last = upload([self.cached.lengths, self.known], self.states.device)
        places = starts[:, None] + torch.arange(width, device=self.states.device)
        rows = torch.arange(len(places), device=places.device)[:, None]
        return self.states[rows, torch.minimum(places, last[:, None] - 1)]

    # --- the end ------------------------------------------------------------------------------------------------------

    def rewind(self, context: Context, lengths: list[int]) -> None:
        super().rewind(context, lengths)
        self.known = [min(own, length) for own, length in zip(self.known, lengths)]

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.states, self.known = self.states[upload(rows, self.states.device)], [self.known[row] for row in rows]

    def finish(self) -> None:
        self.tap, self.own, self.states, self.judged, self.output = None, None, None, None, None
        super().finish()
