"""A feature drafter that drafts a tree (EAGLE-2, Li et al. 2024, arXiv 2406.16858)."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..tree import Tree
from ..tree_shapes import DynamicTree
from ..uploads import upload
from .base import Context
from .feature import FeatureDraft
from .model_tree import ModelTreeDraft


class FeatureTreeDraft(FeatureDraft, ModelTreeDraft):
    """`FeatureDraft` with the trees of `ModelTreeDraft`: a node stands on the drafter's output at its parent.

    tree, siblings: as in `ModelTreeDraft`; without them a `DynamicTree` when `tree` is None.
    """

    name = "feature_tree"

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, tree: Tree | DynamicTree | tuple[int, ...] | None = None,
                 siblings: str | None = None):
        super().__init__(model, target, tree=DynamicTree() if tree is None else tree, siblings=siblings)

    def _scores(self, context: Context, tokens: list[torch.Tensor], k: list[int], step: int) -> torch.Tensor:
        logits = super()._scores(context, tokens, k, step)
        self.outputs = self.output  # of the root and of every node that was fed
        return logits

    def _grow(self, tokens: torch.Tensor, tree: Tree, first: int, context: Context) -> torch.Tensor:
        parents = tree.parents[first - 1 : first - 1 + tokens.shape[1]]
        self.first, self.output = False, self.outputs[:, upload(parents, self.outputs.device)]
        logits = super()._grow(tokens, tree, first, context)
        self.outputs = torch.cat([self.outputs, self._shown()], dim=1)
        return logits
