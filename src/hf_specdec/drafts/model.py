"""A smaller model as the draft (Leviathan et al. 2023, Algorithm 1)."""

from __future__ import annotations

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from .. import compat, parts
from ..media import Media
from ..proposal import Proposal
from ..seq2seq import Source
from .base import Context, Run
from .inner import Holder
from .one_by_one import OneByOne
from .vocabulary import fitted, readable


class ModelDraft(OneByOne, Holder):
    """Drafts K tokens one by one with `model`: its argmax where the target decodes greedily, else draws from its own law after
    the same processors as the target's. The model may have another dtype, another device, and a vocabulary padded to another
    size; only ids that both have are proposed. An encoder-decoder reads what the target's encoder reads: with its own encoder, or the
    outputs of the target's if the two encoders are one module or have equal parameters.

    reads: after the start of a call, whose encoder outputs an encoder-decoder reads, and why: "its own", or "the target's: " and
           "the same module", "equal parameters" or "it has no encoder of its own"; "" for a decoder-only model.

    Raises ValueError if the model cannot be rolled back (recurrent, paged attention).
    """

    name = "model"
    alone = True  # whether it drafts one token after the other, and one alone
    learns = True  # whether the model's own logits are what it drafts by, so that it can learn from the target's

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.traits = compat.traits_of(compat.unwrap(model), "assistant_model")
        self.source: Source | None = None
        self.reads = ""

    def start(self, context: Context) -> None:
        self.begin(context)
        self.source = self._source(context)
        self.reads = "" if self.source is None else f"the target's: {self.source.shared}" if self.source.shared else "its own"
        self.hold(self.model, self.traits, context, context.max_length, source=self.source)
        self.drawing = context.sampler.traceable(self.cached.device) if self.cached.compiled is not None else None
        self.base = [len(row) for row in context.rows]
        self.cached.look(self._pictures(context))

    def _source(self, context: Context) -> Source | None:
        if context.source is not None and getattr(self.model, "reads", None):  # see drafts.feature
            raise ValueError("assistant_model: a feature drafter reads the states of a decoder-only target. Pass another draft with an encoder-decoder.")
        if context.source is not None and self.traits.encoder != "none":
            return context.source.for_draft(self.model, self.traits)
        if self.traits.encoder == "own":
            raise ValueError(f"assistant_model: {type(compat.unwrap(self.model)).__name__} is an encoder-decoder model, and the target, which has "
                             f"no encoder, gives it nothing to read. Pass a decoder-only draft.")
        return None

    def _pictures(self, context: Context) -> Media | None:
        """What the model sees of the images that the target sees."""
        return context.media and context.media.for_draft(self.model)

    def _fits(self, context: Context) -> bool:
        """Whether all rows are within the draft's own context; beyond it the target decodes alone."""
        return self.traits.max_positions is None or max(map(len, context.rows)) < self.traits.max_positions

    def evidence(self, context: Context) -> list[int]:
        return [0 if self._fits(context) else -1] * len(context.rows)

    def propose(self, context: Context, k: list[int]) -> Proposal:
        if self.traits.max_positions is not None:
            k = [max(min(own, self.traits.max_positions - len(row)), 0) for own, row in zip(k, context.rows)]
        return super().propose(context, [0] * len(k) if self._has_to_wait(context) else k)

    def _has_to_wait(self, context: Context) -> bool:
        """Whether some rows, but not all, have text behind the prompts, which are to be read with what they show in a pass of their own: inside another draft."""
        media = self.cached.media
        if media is None or any(self.cached.lengths):
            return False
        behind = [len(row) > len(own) for row, own in zip(context.rows, media.columns)]
        return any(behind) and not all(behind)

    def _several(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """The next tokens, and the laws they were drawn from, by one compiled function; None where there is none, or something is decided after
        every token: by a processor that is no part of it, or a rule that ends a draft."""
        if step == 0 or self.stop is not None or self.drawing is None:
            return None
        root = tokens[-1][:, None].clamp(max=self.traits.vocab_size - 1)
        steps = range(step, max(k))
        numbers = [context.noise(f"draft:{i}", 1) for i in steps] if context.sampler.do_sample else [torch.zeros((len(k), len(steps)), dtype=torch.float64)]
        done = self.cached.several(root, [own - step for own in k], context.vocab_size, self.drawing, torch.cat(numbers, dim=1), self._embeds())
        if done is None:
            return None
        drawn, laws, states = done
        self._went_on(states)
        laws = [] if laws is None else pad(laws.to(context.device), (0, context.vocab_size - laws.shape[-1])).unbind(1)
        return [*drawn.to(context.device).unbind(1)], [*laws]

    def _embeds(self) -> tuple | None:
        """What makes the inputs of a pass, as `compiled.several` has it; None: the model's own embedding."""
        return None

    def _went_on(self, states: torch.Tensor | None) -> None:
        """After passes that `_several` has run; states [B, 1, H]: those of the last one that were noted."""

    def _forget_what_was_rejected(self, context: Context) -> None:
        """The cache holds row b up to base[b] and drafted tokens after it: keep of these what has been committed since."""
        drafted = self._drafted()
        kept = []
        for row, length, base, guess in zip(context.rows, self.cached.lengths, self.base, drafted):
            same = 0
            while same < len(guess) and base + same < len(row) - 1 and guess[same] == row[base + same]:
                same += 1
            kept.append(min(length, base + same, len(row) - 1))  # inside a cascade, a row may not have grown
        self.cached.crop(kept)
        self.base = [len(row) for row in context.rows]
        self.drafted = [[] for _ in context.rows]

    def _scores(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> torch.Tensor:
        """Logits [B, 1, V] for the next drafted token: first from all that is not cached yet, then from one token a time."""
        cached = self.cached
        if step == 0:
            logits = cached.score(self._known(context))
            cached.commit([1] * len(k))
        else:
            logits = cached.extend(tokens[-1][:, None].clamp(max=self.traits.vocab_size - 1), [int(step < own) for own in k])
        return self._common_vocabulary(logits.to(context.device), context)

    def _known(self, context: Context) -> list[list[int]]:
        vocab_size = 2**31 if context.stock else context.vocab_size  # stock decoding does not tell the target's
        return readable(context.rows, self.traits.vocab_size, vocab_size)

    def _common_vocabulary(self, logits: torch.Tensor, context: Context) -> torch.Tensor:
        whole = context.sampler.exact_scores or context.sampler.needs_prefix  # else fewer logits are no harm
        return fitted(logits, context.vocab_size) if whole else logits[..., : context.vocab_size]

    def models(self) -> list[Run]:
        return [Run(self.model, steps=self.alone)]

    def relative_cost(self, target: PreTrainedModel) -> float:
        """c by size: decoding reads every weight once a token."""
        return parts.bytes_per_token(self.model) / max(parts.bytes_per_token(target), 1)

    def keep(self, rows: list[int]) -> None:
        self._keep_cached(rows)
        self.base = [self.base[row] for row in rows]
        super().keep(rows)

    def _keep_cached(self, rows: list[int]) -> None:
        self.cached.keep(rows)

    def rewind(self, context: Context, lengths: list[int]) -> None:
        self._forget_what_was_rejected(context)
        self.cached.crop([length - 1 for length in lengths])

    def finish(self) -> None:
        self.source = None
        super().finish()

    def _stock_vocab_size(self) -> int:
        return self.traits.vocab_size
