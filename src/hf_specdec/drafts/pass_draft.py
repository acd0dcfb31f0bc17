"""Parallel speculative sampling: trained look-ahead embeddings behind the text make the target itself say several tokens in one pass.
PaSS (Monea, Joulin and Grave 2023, arXiv 2311.13581)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import compat
from ..cached_model import CachedModel
from ..proposal import Proposal
from ..tree import Tree
from ..tree_shapes import DynamicTree
from ..uploads import upload
from .base import Context
from .inner import Holder, refuse_encoder
from .one_pass import OnePassDraft


class LookAhead(nn.Module):
    """Look-ahead embeddings [n, H], the inputs of the n places behind the root. depth: n + 1, since the root's own place says the first token.

    rates: as in `MedusaHeads`.
    """

    ids = None

    def __init__(self, embeddings: torch.Tensor, rates: Sequence[Sequence[float]] = ()):
        super().__init__()
        self.embeddings, self.rates = nn.Parameter(embeddings), rates

    @property
    def depth(self) -> int:
        """K, the tokens that one pass proposes."""
        return len(self.embeddings) + 1

    @property
    def about(self) -> dict:
        """What it takes to make another one, as JSON has it."""
        return {"kind": "pass", "heads": len(self.embeddings)}


def traits_of(target: PreTrainedModel) -> compat.ModelTraits:
    """Those of a target that look-ahead embeddings can be shown to; ValueError for another."""
    refuse_encoder(target, "target")
    model = compat.unwrap(target)
    config, traits = model.config.get_text_config(), compat.traits_of(model, "target")
    if traits.own_positions:
        raise ValueError(compat.own_mask_refusal(target, "target", branches=True))
    if config.model_type == "gemma4_text" and config.hidden_size_per_layer_input:
        raise ValueError(f"target: {type(model).__name__} looks tokens up by their embeddings for every layer, and look-ahead embeddings are those of no token. Pass "
                         f"another draft.")
    return traits


class PassDraft(OnePassDraft, Holder):
    """One pass of `target` over the root token and the look-ahead embeddings behind it, on the target's own cache: the first token comes from
    the target's own law, the others from what it says at the look-ahead places. Nothing of the pass stays: what it writes to the
    cache lies at the root's slot and behind it, and the next pass of the target overwrites it before it is read.

    heads:  made by `training` (`training.load_drafter` makes the whole draft).
    target: the model whose generate() it is used in.
    tree:   as in `OnePassDraft`. Without one, a chain; where the target samples, its tokens are drawn each from the law of its place.

    Cost: a whole pass of the target per round, beside the one that verifies. The first drafted token is practically always
    accepted, so a round commits two tokens or more in two passes; it pays from the third token on. Under stock decoding and inside drafts
    whose rows the target has not read it has nothing to propose. Raises ValueError as `MedusaDraft` does, for a target with an encoder and for Gemma 4.
    """

    name = "pass"
    drawn = True

    def __init__(self, heads: LookAhead, target: PreTrainedModel, tree: Tree | DynamicTree | Sequence[int] | int | None = None):
        if type(heads) is not LookAhead:
            raise ValueError(f"heads: {type(heads).__name__} is not LookAhead; load look-ahead embeddings with training.load_drafter.")
        super().__init__(heads, tree)
        self.target, self.traits = target, traits_of(target)
        self.context: Context | None = None

    def start(self, context: Context) -> None:
        self.context, self.cached = context, None
        if context.target is not None and compat.unwrap(context.target.model) is compat.unwrap(self.target):
            self.cached = CachedModel(context.target.model, context.max_length + self.heads.depth, "target", self.traits)
            self.cached.cache = context.target.cache

    def _ready(self) -> list[bool]:
        return [self.cached is not None and bool(self.context.target.lengths)] * len(self.context.rows)

    def _logits(self, context: Context, k: list[int]) -> torch.Tensor:
        n, cached = max(k) - 1, self.cached
        cached.lengths, cached.embed = list(context.target.lengths), lambda tokens: self._embedded(tokens, n)
        blank = torch.zeros((len(k), n), dtype=torch.long, device=cached.device)
        return cached.score(context.rows, Proposal.chain(blank, sizes=[max(own - 1, 0) for own in k])).to(context.device)

    def _embedded(self, tokens: torch.Tensor, n: int) -> torch.Tensor:
        """[B, L, H]: the tokens' embeddings, and n look-ahead embeddings behind each row's fresh tokens."""
        inputs = self.target.get_input_embeddings()(tokens)
        first = upload(self.cached.fresh, inputs.device)[:, None] + torch.arange(n, device=inputs.device)
        rows = torch.arange(len(first), device=inputs.device)[:, None]
        return inputs.index_put((rows, first), self.heads.embeddings[:n].to(inputs).expand(len(first), -1, -1))

    def relative_cost(self, target: PreTrainedModel) -> float:
        """c: one target pass for K tokens."""
        return 1 / self.heads.depth

    def rewind(self, context: Context, lengths: list[int]) -> None:
        """It keeps nothing of the rows."""

    def finish(self) -> None:
        self.context = None
        if self.cached is not None:
            self.cached.cache = None
        super().finish()
