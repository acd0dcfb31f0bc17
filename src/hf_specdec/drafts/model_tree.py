"""A smaller model that drafts a tree: several tokens after each one, all verified in one target pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from .. import compat
from ..law import Law, draw
from ..proposal import Proposal, Verdict
from ..tree import Tree
from ..tree_shapes import DynamicTree, from_json, most_nodes, shape_of
from ..uploads import upload
from .base import Context
from .model import ModelDraft

SIBLINGS = ("distinct", "independent", "likeliest")


class Seen(NamedTuple):
    """A node that a `DynamicTree` may have. parent: a node of the fed tree; tokens int64 [B]; sure float [B]: log of the confidence in it and all
    above it; value: that confidence, the mean over the rows."""

    parent: int
    tokens: torch.Tensor
    sure: torch.Tensor
    value: float


class ModelTreeDraft(ModelDraft):
    """Drafts a tree with `model`, level by level: one pass of it per level, over all nodes of the level. K (`num_assistant_tokens`) bounds
    the depth. Where the target decodes greedily the children of a node are the model's likeliest tokens.

    tree:     branches per depth, as (4, 2, 1); a `Tree`, such as `tree_shapes.best_tree` makes; or a `DynamicTree`, whose shape follows
              the model's confidence in every round (EAGLE-2). The rows of a batch share one shape. As JSON: a list of branches,
              {"parents": [...]}, {"nodes": ..., "width": ..., "branches": ...}.
    siblings: how children of a node are chosen when sampling. "distinct" (default): drawn without replacement (q of a later one is q
              without the earlier ones). "independent": drawn with replacement (SpecInfer; what acceptance="spectr" takes). "likeliest":
              the top k, as point masses; a `DynamicTree` takes these alone, because its shape depends on the tokens.

    Raises ValueError for trees of more than 256 nodes and for models that make their own masks (ALiBi), which cannot score a tree.
    """

    name = "model_tree"
    alone = False
    stops = False

    def __init__(self, model: PreTrainedModel, tree: Tree | DynamicTree | Sequence[int] = (4, 2, 1), siblings: str | None = None):
        super().__init__(model)
        if self.traits.own_positions:
            raise ValueError(compat.own_mask_refusal(model, "assistant_model", branches=True))
        self.shape = shape_of(from_json(tree))
        dynamic = isinstance(self.shape, DynamicTree)
        siblings = siblings or ("likeliest" if dynamic else "distinct")
        if siblings not in SIBLINGS:
            raise ValueError(f"siblings={siblings!r} must be one of {list(SIBLINGS)}.")
        if dynamic and siblings != "likeliest":
            raise ValueError(f'siblings={siblings!r}: a DynamicTree chooses its nodes by what they are, which would bias draws. Use "likeliest", or '
                             "give the tree a fixed shape.")
        self.siblings, self.may_branch = siblings, not self.shape.is_chain

    def start(self, context: Context) -> None:
        super().start(context)
        self.fed, self.passed = Tree(()), {}  # the tree in the model's cache; node of the proposal -> node of that tree

    def propose(self, context: Context, k: list[int]) -> Proposal:
        if self.traits.max_positions is not None:
            left = self.traits.max_positions - max(map(len, context.rows))  # all rows grow as deep as the deepest
            k = [max(min(own, left), 0) for own in k]
        self.cached.crop([len(row) - 1 for row in self._known(context)])
        self.fed, self.passed = Tree(()), {}
        if not max(k):
            return Proposal.from_lists([[] for _ in k], context.device, self.name)
        shape = Tree.chain(max(k)) if context.chains else self.shape
        grow = self._dynamic if isinstance(shape, DynamicTree) else self._fixed
        tree, tokens, laws, chances = grow(context, k, shape)
        sizes = [sum(depth <= own for depth in tree.depths[1:]) for own in k]
        return Proposal(tree, tokens, laws, sizes, self.name, chances)

    def most_nodes(self, k: int) -> int:
        return most_nodes(self.shape, k)

    # --- a fixed shape --------------------------------------------------------------------------------------------------

    def _fixed(self, context: Context, k: list[int], shape: Tree) -> tuple[Tree, torch.Tensor, torch.Tensor | None, None]:
        tree = shape.truncate(sum(depth <= max(k) for depth in shape.depths[1:]))
        tokens = torch.zeros((len(k), len(tree)), dtype=torch.long, device=context.device)
        drawn = context.sampler.do_sample and self.siblings != "likeliest"
        laws = torch.zeros((len(k), len(tree), context.vocab_size), dtype=torch.float32, device=context.device) if drawn else None
        level, logits = range(0, 1), self._scores(context, [], k, 0)
        while True:
            law = self._law(context, logits, tree, tokens, level, k)
            for place, parent in enumerate(level):
                children = [node for node, own in enumerate(tree.parents, start=1) if own == parent]
                if laws is None and children:
                    best = law.ranking[:, place, : context.vocab_size]
                    most = min(len(children), best.shape[-1])  # a vocabulary may be smaller still
                    ranks = torch.arange(len(children), device=best.device).clamp(max=most - 1)
                    tokens[:, upload(children, tokens.device) - 1] = best.topk(most).indices[:, ranks]
                elif children:
                    self._draw(context, law.probs_at(torch.full((len(k),), place, device=context.device)), children, tokens, laws)
            level = range(level.stop, level.stop + sum(own in level for own in tree.parents))
            if not any(own in level for own in tree.parents):
                break
            logits = self._grow(tokens[:, level.start - 1 : level.stop - 1], tree, level.start, context)
        self.passed = {node: node for node in range(1, level.start)}
        self.fed = tree.truncate(level.start - 1)
        return tree, tokens, laws, None

    def _draw(self, context: Context, q: torch.Tensor, children: list[int], tokens: torch.Tensor, laws: torch.Tensor) -> None:
        """Draw the children of one node from q [B, V], with or without replacement, and note the law of each."""
        for node in children:
            laws[:, node - 1, : q.shape[-1]] = q
            tokens[:, node - 1] = x = draw(q, context.noise(f"draft:{node}", 1)[:, 0])
            if self.siblings == "distinct" and node != children[-1]:
                left = q.scatter(1, x[:, None], 0.0)
                total = left.sum(-1, keepdim=True)
                q = torch.where(total > 0, left / total, torch.nn.functional.one_hot(x, q.shape[-1]).to(q.dtype))  # nothing else to draw

    # --- a shape by confidence --------------------------------------------------------------------------------------------

    def _dynamic(self, context: Context, k: list[int], shape: DynamicTree) -> tuple[Tree, torch.Tensor, None, torch.Tensor]:
        pool: list[Seen] = []
        fed_tokens = torch.zeros((len(k), 0), dtype=torch.long, device=context.device)
        fed_parents: list[int] = []
        above, place_in_pool = torch.zeros((len(k), 1), device=context.device), {0: -1}
        level, logits = range(0, 1), self._scores(context, [], k, 0)
        for depth in range(1, max(k) + 1):
            law = self._law(context, logits, Tree(tuple(fed_parents)), fed_tokens, level, k)
            best = law.ranking[..., : context.vocab_size].topk(min(shape.branches, context.vocab_size)).indices
            sure = above[..., None] + law.scores.float().log_softmax(-1).gather(-1, best)
            values, new = sure.exp().mean(0).tolist(), len(pool)
            pool += [Seen(node, best[:, place, rank], sure[:, place, rank], value)
                     for place, node in enumerate(level) for rank, value in enumerate(values[place])]
            if depth == max(k):
                break
            chosen = sorted(sorted(range(new, len(pool)), key=lambda index: -pool[index].value)[: shape.width])
            level = range(len(fed_parents) + 1, len(fed_parents) + 1 + len(chosen))
            fed_parents += [pool[index].parent for index in chosen]
            place_in_pool |= dict(zip(level, chosen))
            above = torch.stack([pool[index].sure for index in chosen], dim=1)
            fed_tokens = torch.cat([fed_tokens, torch.stack([pool[index].tokens for index in chosen], dim=1)], dim=1)
            logits = self._grow(fed_tokens[:, level.start - 1 :], Tree(tuple(fed_parents)), level.start, context)
        return self._best(pool, Tree(tuple(fed_parents)), place_in_pool, shape.nodes)

    def _best(self, pool: list[Seen], fed: Tree, place_in_pool: dict[int, int], nodes: int) -> tuple[Tree, torch.Tensor, None, torch.Tensor]:
        """The `nodes` surest of the pool. A node is never surer than its parent, and comes after it."""
        kept = sorted(sorted(range(len(pool)), key=lambda index: -pool[index].value)[:nodes])
        number = {-1: 0, **{index: node for node, index in enumerate(kept, start=1)}}
        tree = Tree(tuple(number[place_in_pool[pool[index].parent]] for index in kept))
        self.fed, self.passed = fed, {number[index]: node for node, index in place_in_pool.items() if node and index in number}
        sure = torch.stack([pool[index].sure for index in kept], dim=1)
        above = torch.cat([torch.zeros_like(sure[:, :1]), sure], dim=1)[:, upload(tree.parents, sure.device)]
        return tree, torch.stack([pool[index].tokens for index in kept], dim=1), None, (sure - above).exp()

    # --- the model --------------------------------------------------------------------------------------------------------

    def _grow(self, tokens: torch.Tensor, tree: Tree, first: int, context: Context) -> torch.Tensor:
        logits = self.cached.grow(tokens.clamp(max=self.traits.vocab_size - 1), tree, first)
        return self._common_vocabulary(logits.to(context.device), context)

    def _law(self, context: Context, logits: torch.Tensor, tree: Tree, tokens: torch.Tensor, level: range, k: list[int]) -> Law:
        """The model's laws after the nodes of a level, whose depth is the same."""

        drafted = cache(tokens.tolist)  # is asked for where the laws depend on the text

        def prefix(b: int, i: int) -> torch.Tensor | None:
            path = [(tree.parents[node - 1], drafted()[b][node - 1]) for node in tree.path(level[i])]
            if any(self.scores[parent][b, token] == -torch.inf for parent, token in path):
                return None  # the processors have ruled it out
            return context.text(b, [token for _, token in path])

        depth = tree.depths[level[0]]
        law = context.sampler(logits, [len(level) if own > depth else 0 for own in k], prefix, draft=True)
        self.scores = ({} if depth == 0 else self.scores) | {node: law.scores[:, place] for place, node in enumerate(level)}
        return law

    def commit(self, verdict: Verdict) -> None:
        """The accepted path stays in the model's cache, as far as the model has seen it."""
        if not self.passed:
            return
        paths = [[1] + [0] * len(self.fed) for _ in verdict.paths()]
        for ours, theirs in zip(paths, verdict.paths()):
            for node, own in self.passed.items():
                ours[own] = int(node < len(theirs) and theirs[node])
        self.cached.adopt([sum(path) - 1 for path in paths], self.fed, upload(paths, self.cached.device, torch.bool))
        self.fed, self.passed = Tree(()), {}

    def keep(self, rows: list[int]) -> None:
        self.cached.keep(rows)

    def rewind(self, context: Context, lengths: list[int]) -> None:
        """Only the first lengths[b] tokens of row b stand."""
        self.cached.crop([len(row) - 1 for row in self._known(context)])
        self.fed, self.passed = Tree(()), {}
