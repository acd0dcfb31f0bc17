"""Shapes of token trees: given by hand, computed for measured acceptances, or found anew every round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .hints import check_int
from .tree import MAX_NODES, Tree


@dataclass(frozen=True)
class DynamicTree:
    """A tree whose shape follows the draft's confidence (EAGLE-2, Li et al. 2024, arXiv 2406.16858): per level the `width` nodes of the
    largest product of probabilities on the way to them are expanded, each by its `branches` likeliest tokens, and of all
    nodes the best `nodes` are proposed."""

    nodes: int = 16
    width: int = 4
    branches: int = 4

    def __post_init__(self):
        for name, most in (("nodes", MAX_NODES), ("width", 64), ("branches", 64)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"DynamicTree({name}={value!r}) must be an int in 1..{most}.")

    @property
    def is_chain(self) -> bool:
        return min(self.nodes, self.branches) == 1


def branching(branches: Sequence[int]) -> Tree:
    """The tree in which every node of depth d has branches[d] children: (3, 2) has 3 + 6 nodes. (4, 1, 1) is four chains.

    Raises ValueError for numbers below 1 and for trees of more than 256 nodes.
    """
    counts = list(branches)
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        raise ValueError(f"tree={branches!r} must be numbers of branches per depth, 1 or more each, such as (4, 2, 1).")
    if sum(math.prod(counts[: depth + 1]) for depth in range(len(counts))) > MAX_NODES:
        raise ValueError(f"tree={branches!r} has more than {MAX_NODES} nodes; take fewer branches or depths.")
    parents, level = [], [0]
    for count in counts:
        first = len(parents) + 1
        parents += [node for node in level for _ in range(count)]
        level = list(range(first, len(parents) + 1))
    return Tree(tuple(parents))


def shape_of(tree: Tree | DynamicTree | Sequence[int], also: str = "") -> Tree | DynamicTree:
    """What a draft was given for its tree: branches per depth as the tree they make; nodes come in order of depth. also: what else the draft takes.

    Raises ValueError for what is none of these and for trees of no node or of more than 256.
    """
    if isinstance(tree, DynamicTree):
        return tree
    if not isinstance(tree, Tree):
        if isinstance(tree, (str, bytes)) or not isinstance(tree, Sequence):
            raise ValueError(f"tree={tree!r} must be {also}branches per depth such as (4, 2, 1), a Tree or a DynamicTree.")
        tree = branching(tree)
    if not 1 <= len(tree) <= MAX_NODES:
        raise ValueError(f"tree: {len(tree)} nodes; a tree has 1 to {MAX_NODES}.")
    return by_depth(tree)


def from_json(shape):
    """{"parents": [...]} as a `Tree`, {"nodes": ...} and so on as a `DynamicTree`; anything else as it is.

    Raises ValueError for other keys and for parents that make no tree.
    """
    if not isinstance(shape, dict):
        return shape
    if set(shape) == {"parents"} and isinstance(shape["parents"], (list, tuple)) and all(type(parent) is int for parent in shape["parents"]):
        return Tree(tuple(shape["parents"]))
    if shape and set(shape) <= {"nodes", "width", "branches"}:
        return DynamicTree(**shape)
    raise ValueError(f'tree={shape!r} must be {{"parents": [...]}} or {{"nodes": ..., "width": ..., "branches": ...}}.')


def most_nodes(shape: Tree | DynamicTree, depth: int) -> int:
    """Nodes of the shape in at most `depth` levels."""
    return shape.nodes if isinstance(shape, DynamicTree) else sum(own <= depth for own in shape.depths[1:])


def by_depth(tree: Tree) -> Tree:
    """The same tree with its nodes in order of depth; siblings keep their order."""
    order = sorted(range(1, len(tree) + 1), key=lambda node: tree.depths[node])
    place = {0: 0, **{node: index for index, node in enumerate(order, start=1)}}
    return Tree(tuple(place[tree.parents[node - 1]] for node in order))


def expected_accepted(tree: Tree, rates: Sequence[float]) -> float:
    """Drafted tokens that a round accepts on average if the sibling of rank r is the one taken with probability rates[r], after
    every accepted token alike: the sum over the nodes of the product of the rates on the way to them. Sequoia (Chen et al. 2024,
    arXiv 2402.12374), positional acceptance. A rank beyond `rates` is never taken."""
    chance = [1.0]
    for parent, rank in zip(tree.parents, tree.ranks):
        chance.append(chance[parent] * (rates[rank] if rank < len(rates) else 0.0))
    return math.fsum(chance[1:])


def best_tree(rates: Sequence[float], nodes: int, max_depth: int = MAX_NODES) -> Tree:
    """The tree of at most `nodes` nodes and `max_depth` levels with the most `expected_accepted`, by dynamic programming (Sequoia, section
    3.1), nodes in order of depth.

    rates: how often the sibling of rank 0, 1, ... is taken, measured; they sum to 1 at most. Need not fall with the rank: a sibling
    of rank r is only there with those before it.
    Raises ValueError for rates outside of 0..1 or of a sum above 1, for a number of nodes outside of 1..256, and for a depth below 1.
    """
    rates = [float(rate) for rate in rates]
    if not rates or any(not 0 <= rate <= 1 for rate in rates) or sum(rates) > 1 + 1e-9:
        raise ValueError(f"rates={rates!r} must be acceptances by sibling rank, each in 0..1, 1 at most in all.")
    check_int("nodes", nodes, 1, MAX_NODES)
    check_int("max_depth", max_depth, 1, MAX_NODES)
    return Tree(tuple(_parents(_child_sizes(rates, nodes, min(max_depth, nodes)), nodes)))


def _child_sizes(rates: list[float], nodes: int, max_depth: int) -> list[list[list[int]]]:
    """sizes[depth][rank][n]: of n nodes below one place, with `depth` levels left, for the siblings from `rank` on: how many go to the
    subtree of that sibling."""
    best = [0.0] * (nodes + 1)  # of n nodes below a place, one level less
    table = []
    for _ in range(max_depth):
        siblings = [0.0] * (nodes + 1)  # of n nodes for the ranks after this one
        choice = []
        for rate in reversed(rates):
            taken, values = [0] * (nodes + 1), [0.0] * (nodes + 1)
            for n in range(1, nodes + 1):
                values[n], taken[n] = max(((rate * (1 + best[m - 1]) + siblings[n - m], m) for m in range(1, n + 1)), key=lambda pair: pair[0])
                if values[n] <= values[n - 1]:  # one node more earns nothing
                    values[n], taken[n] = values[n - 1], taken[n - 1]
            siblings = values
            choice.append(taken)
        table.append(choice[::-1])
        if siblings == best:  # a level more earns nothing
            break
        best = siblings
    return table


def _parents(sizes: list[list[list[int]]], nodes: int) -> list[int]:
    parents: list[int] = []
    ahead = [(0, nodes, len(sizes))]
    while ahead:
        parent, n, levels = ahead.pop(0)
        for rank in range(len(sizes[0])):
            own = sizes[levels - 1][rank][n] if levels else 0
            if not own:
                break
            parents.append(parent)
            ahead.append((len(parents), own - 1, levels - 1))
            n -= own
    return parents


def rank_tree(rates: Sequence[Sequence[float]], nodes: int) -> Tree:
    """The tree of the `nodes` likeliest paths where the sibling of rank r at depth d + 1 is right with probability rates[d][r], whatever
    came before (Medusa, Cai et al. 2024, section 2.3.3): greedily, which is the best there is, since a child is never likelier than its
    parent. Ranks are taken in order. Fewer nodes where the rates end. Nodes come in order of their probability."""
    if not len(rates) or not all(len(depth) for depth in rates):
        raise ValueError("rates: expected at least one depth, and at least one rate at each.")
    parents: list[int] = []
    depths = [0]
    ahead = [(-float(rates[0][0]), 0, 0, 1.0)]  # (-probability, parent, rank, probability of the parent)
    while ahead and len(parents) < nodes:
        chance, parent, rank, above = heappop(ahead)
        parents.append(parent)
        depth = depths[parent]
        depths.append(depth + 1)
        if depth + 1 < len(rates):
            heappush(ahead, (chance * float(rates[depth + 1][0]), len(parents), 0, -chance))
        if rank + 1 < len(rates[depth]):
            heappush(ahead, (max(-above * float(rates[depth][rank + 1]), chance), parent, rank + 1, above))
    return Tree(tuple(parents))
