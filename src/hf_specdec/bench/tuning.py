"""From measured numbers to the choice: tokens per second of every draft, K and tree shape on the texts measured, and the best of them.

No model is run here. A round that proposes n tokens takes T(n + 1), the measured pass of that width, and the draft's own time, and
commits what the draft got right on the measured texts; Leviathan et al. 2023, Theorem 3.8, with acceptances counted in place of one
alpha. Trees come from `tree_shapes.best_tree` (Sequoia) by measured acceptance by sibling rank, and are then counted, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..config import MAX_ASSISTANT_TOKENS as MOST
from ..tree import Tree
from ..tree_shapes import best_tree

RANKS = 8
BUDGETS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


@dataclass(frozen=True)
class Costs:
    """In seconds. passes: of a target pass over each of `widths` tokens. plain: of one token of plain generate. rest: of a round outside
    draft and target."""

    widths: tuple[int, ...]
    passes: tuple[float, ...]
    plain: float
    rest: float = 0.0

    @cached_property
    def _rising(self) -> list[float]:
        """The passes nearest to the measured ones that never fall (isotonic regression)."""
        blocks: list[tuple[float, int]] = []
        for seconds in self.passes:
            blocks.append((seconds, 1))
            while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
                (high, m), (low, n) = blocks[-2:]
                blocks[-2:] = [((high * m + low * n) / (m + n), m + n)]
        return [seconds for seconds, n in blocks for _ in range(n)]

    def verify(self, width: int) -> float:
        """Of a pass of any width: between two measured ones a straight line, never falling, and the last line beyond the widest."""
        if width <= self.widths[0] or len(self.widths) == 1:
            return self._rising[0]
        right = min(bisect_left(self.widths, width), len(self.widths) - 1)
        x, y = self.widths[right - 1 : right + 1], self._rising[right - 1 : right + 1]
        return y[0] + (y[1] - y[0]) * (width - x[0]) / (x[1] - x[0])


@dataclass(frozen=True)
class Replayed:
    """What a draft proposed at every position of every text: (tokens proposed, its nodes that were right, by number).

    The proposal of K tokens is taken to be the beginning of that of 64.
    """

    texts: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]

    def rounds(self, k: int) -> tuple[int, Counter]:
        """(tokens committed, {tokens proposed: rounds}) of decoding the texts with K = k."""
        tokens, sizes = 0, Counter()
        for text in self.texts:
            at = 0
            while at < len(text):
                size, right = text[at]
                sizes[min(size, k)] += 1
                at += 1 + sum(node <= k for node in right)
            tokens += len(text)  # the last round may have drafted to the end
        return tokens, sizes


@dataclass(frozen=True)
class Recorded:
    """The rounds of a real call with a large K, for drafts that learn from the target's passes: as in `Replayed`, at round starts only."""

    records: tuple[tuple[int, tuple[int, ...]], ...]

    def rounds(self, k: int) -> tuple[int, Counter]:
        return (sum(1 + sum(node <= k for node in right) for _, right in self.records), Counter(min(size, k) for size, _ in self.records))


@dataclass(frozen=True)
class Ranked:
    """Per text and position, the sibling rank a draft model gives to the token that came: 0 its likeliest, `RANKS` none of the first."""

    texts: tuple[tuple[int, ...], ...]

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """How often rank 0, 1, ... was right."""
        count = Counter(rank for text in self.texts for rank in text)
        return tuple(count[rank] / max(count.total(), 1) for rank in range(RANKS))

    def rounds(self, k: int) -> tuple[int, Counter]:
        return self.tree_rounds(Tree.chain(k))

    def tree_rounds(self, tree: Tree) -> tuple[int, Counter]:
        """The same for a tree of that shape."""
        child = {(parent, rank): node for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks), start=1)}
        tokens = rounds = 0
        for text in self.texts:
            at = 0
            while at < len(text):
                node, rounds = 0, rounds + 1
                while at < len(text) and (node, text[at]) in child:
                    node, at = child[node, text[at]], at + 1
                at += 1
            tokens += len(text)
        return tokens, Counter({len(tree): rounds})


@dataclass(frozen=True)
class Measured:
    """One draft. table: what it got right. per_token, per_round: its own seconds, for each level of a tree as for each token of a chain.
    least, most: the K for which the table holds. trees: whether the target takes trees of it. draft, options, source: as in `SpeculativeConfig`."""

    label: str
    draft: str
    table: Replayed | Recorded | Ranked
    per_token: float = 0.0
    per_round: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    least: int = 1
    most: int = MOST
    trees: bool = True


@dataclass(frozen=True)
class Choice:
    """A draft with its K or tree, and what is expected of it. k: tokens, or the depth of `tree`; block_efficiency: tokens per pass."""

    label: str
    draft: str
    options: dict[str, Any]
    source: str | None
    k: int
    nodes: int
    tree: Tree | None
    block_efficiency: float
    tokens_per_second: float
    speedup: float


def choices(measured: list[Measured], costs: Costs) -> list[Choice]:
    """Every draft with every K, and trees where the draft is a model; the fastest first."""
    found = [choice for one in measured for choice in (*_chains(one, costs), *_trees(one, costs))]
    return sorted(found, key=lambda choice: -choice.tokens_per_second)


def _chains(one: Measured, costs: Costs) -> Iterator[Choice]:
    for k in range(one.least, one.most + 1):
        tokens, sizes = one.table.rounds(k)
        if tokens:
            yield _choice(one, costs, tokens, sizes, k)


def _trees(one: Measured, costs: Costs) -> Iterator[Choice]:
    """Of a model: the best shape of every budget and depth, then of the budgets around the best."""
    if not one.trees or not isinstance(one.table, Ranked) or one.draft != "model" or not sum(one.table.rates[1:]):
        return
    seen = {(nodes, depth): _shaped(one, costs, nodes, depth) for nodes in BUDGETS for depth in DEPTHS if depth < nodes}
    seen = {key: choice for key, choice in seen.items() if choice.k}  # none where no rank that fits was ever right
    if not seen:
        return
    nodes, depth = max(seen, key=lambda key: seen[key].tokens_per_second)
    around = [own for own in range(2, MOST + 1) if abs(own - nodes) < 8 and (own, depth) not in seen and depth < own]
    yield from seen.values()
    yield from (choice for own in around if (choice := _shaped(one, costs, own, depth)).k)


def _shaped(one: Measured, costs: Costs, nodes: int, depth: int) -> Choice:
    tree = best_tree(one.table.rates, nodes, depth)
    tokens, sizes = one.table.tree_rounds(tree)
    return _choice(one, costs, tokens, sizes, max(tree.depths), tree)


def _choice(one: Measured, costs: Costs, tokens: int, sizes: Counter, k: int, tree: Tree | None = None) -> Choice:
    """sizes: {tokens proposed: rounds}."""
    seconds = 0.0
    for size, rounds in sizes.items():
        levels = k if tree is not None else size
        seconds += rounds * (costs.verify(size + 1) + costs.rest + one.per_round + one.per_token * levels)
    draft, options, nodes = one.draft, one.options, k if tree is None else len(tree)
    if tree is not None:
        draft, options = "model_tree", {**options, "tree": {"parents": list(tree.parents)}}
    return Choice(one.label, draft, options, one.source, k, nodes, tree, tokens / sizes.total(), tokens / seconds, costs.plain * tokens / seconds)


def by_position(table: Replayed | Recorded | Ranked, most: int = 8) -> list[float | None]:
    """Of the tokens of the 1st, 2nd, ... level that were proposed after a right one, how many were right; None where there were none.
    A level of a tree is right if one of its nodes is."""
    judged, hits = [0] * most, [0] * most
    for size, right in _proposals(table):
        for level in range(min(len(right) + 1, most)):
            if level < size:
                judged[level] += 1
                hits[level] += level < len(right)
    return [hit / all_of_them if all_of_them else None for hit, all_of_them in zip(hits, judged)]


def _proposals(table: Replayed | Recorded | Ranked) -> Iterator[tuple[int, tuple[int, ...]]]:
    if isinstance(table, Recorded):
        yield from table.records
    elif isinstance(table, Replayed):
        yield from (entry for text in table.texts for entry in text)
    else:
        for text in table.texts:
            for at in range(len(text)):
                run = next((i for i, rank in enumerate(text[at : at + MOST]) if rank), min(MOST, len(text) - at))
                yield MOST, tuple(range(1, run + 1))
