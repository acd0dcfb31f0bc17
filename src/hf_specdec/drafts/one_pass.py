"""What drafts share that get all K tokens out of one pass: a law for every place ahead, none of which knows the tokens at the places
before it. Trees of each place's likeliest tokens, or a chain that is drawn place by place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from ..draft_stop import DraftStop
from ..law import draw
from ..proposal import Proposal
from ..tree import MAX_NODES, Tree
from ..tree_shapes import DynamicTree, by_depth, most_nodes, rank_tree, shape_of
from ..uploads import upload
from .base import Context, Draft
from .vocabulary import fitted


class OnePassDraft(Draft):
    """A subclass says what the laws are (`_logits`) and for which rows there are any (`_ready`).

    heads: with `depth`, K; `ids` int64 [V'], the tokens that the logits stand for, None for all; `rates`, rates[d][r]: how often the token
           that place d ranks r-th was the one, () if it was not measured.
    tree:  None for a chain. A number of nodes: the tree of the likeliest paths by `rates`. Branches per depth, as (4, 2, 1), or a
           `Tree`: a node's token is of its sibling rank. A `DynamicTree`: the surest paths of every round by the product of the
           places' probabilities; of it, `nodes` and `branches` count. K bounds the depth, as the number of places does.
    drawn: whether the tokens of a chain are drawn where the target samples, q of each being the law of its place; else, and in a
           tree, they are point masses.
    """

    trusted = True
    drawn = False
    stop: DraftStop | None = None  # of a draft that ends its chains before K

    def __init__(self, heads: nn.Module, tree: Tree | DynamicTree | Sequence[int] | int | None = None):
        self.heads, self.shape = heads, _shape(tree, heads)
        self.may_branch = not self.shape.is_chain

    def _ready(self) -> list[bool]:
        """Of every row, whether there is something to go on from."""
        raise NotImplementedError

    def _logits(self, context: Context, k: list[int]) -> torch.Tensor:
        """[B, max(k), V'] on the context's device."""
        raise NotImplementedError

    def evidence(self, context: Context) -> list[int]:
        return [0 if ready else -1 for ready in self._ready()]

    def propose(self, context: Context, k: list[int]) -> Proposal:
        k = [min(own, self.heads.depth) if ready else 0 for own, ready in zip(k, self._ready())]
        if not max(k):
            return Proposal.from_lists([[] for _ in k], context.device, self.name)
        logits = self._logits(context, k)
        shape = Tree.chain(logits.shape[1]) if context.chains and self.may_branch else self.shape
        if self.drawn and isinstance(shape, Tree) and shape.is_chain:
            return self._chain(context, fitted(logits, context.vocab_size, self.heads.ids), k, len(shape))
        tree, tokens = self._surest(logits) if isinstance(shape, DynamicTree) else self._filled(logits, shape)
        sizes = [sum(depth <= own for depth in tree.depths[1:]) for own in k]
        return Proposal(tree, tokens, None, sizes, self.name)

    def most_nodes(self, k: int) -> int:
        return most_nodes(self.shape, k)

    def _chain(self, context: Context, logits: torch.Tensor, k: list[int], length: int) -> Proposal:
        """One token after another, up to `length`, each from its place's law after the target's processors; these may look at the tokens before it."""
        tokens, laws, start = [], [], torch.zeros(len(k), dtype=torch.long, device=context.device)
        if self.stop is not None:
            self.stop.begin()

        drafted = cache(lambda i: tokens[i].tolist())

        def prefix(b: int, _: int) -> torch.Tensor | None:
            return context.text(b, [drafted(i)[b] for i in range(len(tokens))])

        while len(tokens) < min(max(k), length):
            step = len(tokens)
            known = None if self.stop is None else self._foretold(step, tokens)
            if known is not None:
                k = self.stop.foretold(k, step, known)
                if step >= max(k):
                    break
            law = context.sampler(self._place(logits, step, tokens), [step < own for own in k], prefix, draft=True)
            if context.sampler.do_sample:
                q = law.probs_at(start)
                nothing = torch.nn.functional.one_hot(start, q.shape[-1]).to(q.dtype)  # the processors left none of `ids`
                laws.append(torch.where(q.isnan().any(-1, keepdim=True), nothing, q))
                tokens.append(draw(laws[-1], context.noise(f"draft:{step}", 1)[:, 0]))
            else:
                tokens.append(law.argmax[:, 0])
            if self.stop is not None and known is None:  # the token that makes a row stop is part of the proposal
                k = self.stop.shortened(k, step, law.prob_of(tokens[-1][:, None], start[:, None])[:, 0].nan_to_num(0.0).tolist())
        sizes = [min(own, len(tokens)) for own in k]
        return Proposal.chain(torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None, sizes, self.name)

    def _place(self, logits: torch.Tensor, step: int, tokens: list[torch.Tensor]) -> torch.Tensor:
        """[B, 1, V] of the place after the drafted `tokens`, each int64 [B]."""
        return logits[:, step : step + 1]

    def _foretold(self, step: int, tokens: list[torch.Tensor]) -> list[float] | None:
        """Of every row, how likely the token after the drafted `tokens` is to be accepted, whichever it will be; None: nothing is known of it."""
        return None

    def _filled(self, logits: torch.Tensor, shape: Tree) -> tuple[Tree, torch.Tensor]:
        """The fixed shape: a node of depth d and sibling rank r is place d's r-th token."""
        depth = logits.shape[1]
        tree = shape.truncate(sum(own <= depth for own in shape.depths[1:]))
        ranks = [min(rank, logits.shape[-1] - 1) for rank in tree.ranks]  # a vocabulary may be smaller still
        return tree, _at(self._ids(logits.topk(max(ranks) + 1).indices), tree, ranks)

    def _surest(self, logits: torch.Tensor) -> tuple[Tree, torch.Tensor]:
        """The tree of the paths that are likeliest, by the mean over the rows of the places' probabilities."""
        best = logits.float().log_softmax(-1).topk(min(self.shape.branches, logits.shape[-1]))
        tree = by_depth(rank_tree(best.values.exp().mean(0).tolist(), self.shape.nodes))
        return tree, _at(self._ids(best.indices), tree, tree.ranks)

    def _ids(self, columns: torch.Tensor) -> torch.Tensor:
        return columns if self.heads.ids is None else self.heads.ids.to(columns.device)[columns]

    def prior(self, strength: int) -> tuple[float, float]:
        rates = [row[0] for row in self.heads.rates]
        return (rates[0], math.prod(rates[1:]) ** (1 / max(len(rates) - 1, 1))) if rates else (0.5, 0.4)


def _at(tokens: torch.Tensor, tree: Tree, ranks: Sequence[int]) -> torch.Tensor:
    """[B, N] of the tokens [B, K, n] of every place ahead, the likeliest first: those of the nodes' depths and ranks."""
    places, ranks = upload([[depth - 1 for depth in tree.depths[1:]], ranks], tokens.device)
    return tokens[:, places, ranks]


def _shape(tree, heads: nn.Module) -> Tree | DynamicTree:
    """The tree that the draft fills, its nodes in order of depth."""
    if tree is None:
        return Tree.chain(heads.depth)
    if isinstance(tree, int) and not isinstance(tree, bool):
        if not heads.rates:
            raise ValueError(f"tree={tree!r}: these heads come without measured rates; give branches per depth such as (4, 2, 1), or a DynamicTree.")
        if not 1 <= tree <= MAX_NODES:
            raise ValueError(f"tree={tree!r} must be 1..{MAX_NODES} nodes.")
        tree = rank_tree(heads.rates, tree)
    shape = shape_of(tree, "a number of nodes, ")
    if isinstance(shape, Tree) and max(shape.depths) > heads.depth:
        raise ValueError(f"tree: {max(shape.depths)} levels, and there are {heads.depth} heads; take no more levels than heads.")
    return shape
