"""Trees grown token by token, likeliest first, from the guesses of one or several drafts; and trees of several rows in one proposal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import torch

from ..hints import check_int
from ..proposal import Proposal
from ..schedule import AutoSchedule
from ..tree import MAX_NODES, Tree
from ..uploads import upload
from .base import Context, Draft

Source = tuple[Draft, Any]  # a draft, and the place where a row stands in it


@dataclass
class Grown:
    """One row's tree. nodes: (parent, token) of node 1, 2, ...; kinds: of every node, the kinds of guess that it was; chances: of every
    node, how likely it is to be accepted, never rising; children: of every node, the root included, token -> node, in the order in which
    they are judged."""

    nodes: list[tuple[int, int]] = field(default_factory=list)
    kinds: list[list[Hashable]] = field(default_factory=list)
    children: list[dict[int, int]] = field(default_factory=lambda: [{}])
    chances: list[float] = field(default_factory=list)

    def add(self, parent: int, token: int, kinds: list[Hashable], chance: float = 0.0) -> int:
        self.nodes.append((parent, token))
        self.kinds.append(kinds)
        self.chances.append(chance)
        self.children.append({})
        self.children[parent][token] = len(self.nodes)
        return len(self.nodes)

    def first(self, n: int) -> Grown:
        """The tree of the first n nodes."""
        children = [{token: node for token, node in own.items() if node <= n} for own in self.children[: n + 1]]
        return Grown(self.nodes[:n], self.kinds[:n], children, self.chances[:n])


class Grower:
    """Estimates how often a guess of a kind is right, and takes the likeliest paths. Kinds are told apart by draft. A guess that
    several drafts share is as likely as the best of them says.

    WEIGHT: how many judged guesses the expected rate counts for. MOST: no token is surer than that.
    """

    WEIGHT, MOST = 10.0, 0.97

    def __init__(self):
        self.counts: dict[Hashable, list[float]] = {}  # right, judged

    def rate(self, kind: Hashable, expected: float) -> float:
        count = self.counts.get(kind)
        if count is None:
            count = self.counts[kind] = [expected * self.WEIGHT, self.WEIGHT]
        return count[0] / count[1]

    def tree(self, sources: Sequence[Source], size: int, vocab_size: int, branches: int = 8) -> Grown:
        """The `size` likeliest nodes after the places of `sources`, at most `branches` after each token; fewer where the drafts know
        no more."""
        grown, ahead, serial = Grown(), [], 0
        parent, places, probability = 0, list(sources), 1.0
        while len(grown.nodes) < size:
            likeliest = sorted(self._guesses(places, vocab_size).items(), key=lambda item: -item[1][0])
            for token, (rate, kinds) in likeliest[:branches]:
                serial += 1
                heappush(ahead, (-probability * rate, serial, parent, token, kinds, places))
            if not ahead:
                break
            probability, _, above, token, kinds, places = heappop(ahead)
            probability, parent = -probability, grown.add(above, token, kinds, -probability)
            places = [(draft, after) for draft, place in places if (after := draft.step(place, token)) is not None]
        return grown

    def _guesses(self, places: list[Source], vocab_size: int) -> dict[int, tuple[float, list[Hashable]]]:
        """token -> (rate, kinds)."""
        found: dict[int, tuple[float, list[Hashable]]] = {}
        for draft, place in places:
            for token, kind, expected in draft.guesses(place):
                if 0 <= token < vocab_size:
                    kinds = [] if kind is None else [(id(draft), kind)]
                    rate = min(self.rate(kinds[0], expected) if kinds else expected, self.MOST)
                    known = found.get(token, (0.0, []))
                    found[token] = max(rate, known[0]), known[1] + kinds
        return found

    def learn(self, grown: Grown, committed: list[int]) -> None:
        """`committed` is what followed the root: every guess that was made along it was right or wrong."""
        node = 0
        for token in committed:
            for other, child in grown.children[node].items():
                for kind in grown.kinds[child - 1]:
                    count = self.counts[kind]
                    count[0] += other == token
                    count[1] += 1
            if token not in grown.children[node]:
                break
            node = grown.children[node][token]


class GrownDraft(Draft):
    """A draft that knows `place`, `guesses` and `step`, and `strengths` instead of `evidence`. Proposes the tree of the K likeliest nodes, and measures during
    the call how often its guesses are right.

    branches: most tokens tried after each one, at most `most`; 1 proposes a chain.
    """

    def __init__(self, branches: int, most: int):
        check_int("branches", branches, 1, most)
        self.branches, self.may_branch, self.grower = branches, branches > 1, Grower()
        self.context: Context | None = None
        self.ready: list[Grown] = []  # trees of which `propose` takes the beginning
        self.grown: list[tuple[Grown, int]] = []  # the last tree of every row, and the row's length then

    def start(self, context: Context) -> None:
        self.context, self.grown, self.ready = context, [], []

    def strengths(self, context: Context) -> list[int]:
        """As `Draft.evidence` has it."""
        raise NotImplementedError

    def evidence(self, context: Context) -> list[int]:
        for row, (grown, length) in zip(context.rows, self.grown):
            self.grower.learn(grown, row[length:])
        self.grown, self.ready = [], []
        return self.strengths(context)

    def propose(self, context: Context, k: list[int]) -> Proposal:
        trees = [tree.first(own) for tree, own in zip(self.ready or self._trees(k), k)]
        self.grown = [(tree, len(row)) for tree, row in zip(trees, context.rows)]
        return together([Branches(tree.nodes) for tree in trees], context.vocab_size, context.device, self.name)

    def _trees(self, sizes: list[int]) -> list[Grown]:
        branches = 1 if self.context.chains else self.branches
        return [self.grower.tree([(self, self.place(b))], size, self.context.vocab_size, branches) for b, size in enumerate(sizes)]

    def schedule(self, most: int, timed: bool) -> AutoSchedule:
        """As many nodes as pay, by their chances."""
        return AutoSchedule(most, self.cost_ratio, timed, self.prior, self._chances)

    def _chances(self, sizes: list[int]) -> list[list[float]]:
        self.ready = self._trees(sizes)
        return [tree.chances for tree in self.ready]

    def keep(self, rows: list[int]) -> None:
        self.grown = [self.grown[row] for row in rows] if self.grown else []

    def rewind(self, context: Context, lengths: list[int]) -> None:
        self.grown = []

    def finish(self) -> None:
        self.context, self.grown, self.ready = None, [], []
        super().finish()


@dataclass
class Branches:
    """One row's part of a proposal. nodes: (parent, token); laws: per node float [V], or None for a point mass, or None for all."""

    nodes: list[tuple[int, int]]
    laws: list[torch.Tensor | None] | None = None

    @classmethod
    def of(cls, proposal: Proposal, b: int) -> Branches:
        """Row b of a proposal."""
        size = proposal.sizes[b]
        laws = None if proposal.probs is None else list(proposal.probs[b, :size])
        return cls(list(zip(proposal.tree.parents[:size], proposal.listed()[b][:size])), laws)


def together(rows: list[Branches], vocab_size: int, device, source: str | list[str], most: list[int] | None = None) -> Proposal:
    """Trees of different shapes as one proposal: a node is known by the ranks of the siblings on the way to it, so that siblings keep
    their order and every node its own law. A row that lacks a node before its last one has token 0 there, a point mass like any
    other, judged after the siblings that it has. Coins are numbered by node: what is drawn for a row then depends on its
    neighbours' shapes (its law does not). most: per row, how many nodes it may get, those first that most rows have; None: MAX_NODES."""
    ranked = [by_ranks(row.nodes) for row in rows]
    wanted = Counter(path for own in ranked for path in own)
    order = ranked[0] if len(rows) == 1 else sorted(wanted, key=lambda path: (-wanted[path], len(path), path))
    number = {(): 0} | {path: node for node, path in enumerate(order, start=1)}
    columns = [{number[path] - 1: i for i, path in enumerate(own) if number[path] <= n} for own, n in zip(ranked, most or [MAX_NODES] * len(rows))]
    sizes = [max(own, default=-1) + 1 for own in columns]
    tree = Tree(tuple(number[path[:-1]] for path in order[: max(sizes, default=0)]))
    shape = len(rows), len(tree)
    tokens, fillers = torch.zeros(shape, dtype=torch.long, device="cpu"), torch.ones(shape, dtype=torch.bool, device="cpu")
    for b, (row, own) in enumerate(zip(rows, columns)):
        tokens[b, [*own]] = torch.tensor([row.nodes[i][1] for i in own.values()], dtype=torch.long, device="cpu")
        fillers[b, [*own]] = False
    known, tokens = tokens.tolist(), upload(tokens, device)
    return Proposal(tree, tokens, _laws(rows, tokens, columns, vocab_size), sizes, source, fillers=upload(fillers, device), on_host=known)


def by_ranks(nodes: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The path of sibling ranks to every node of a tree of (parent, token)."""
    paths, seen = [()], Counter()
    for parent, _ in nodes:
        paths.append((*paths[parent], seen[parent]))
        seen[parent] += 1
    return paths[1:]


def _laws(rows: list[Branches], tokens: torch.Tensor, columns: list[dict[int, int]], vocab_size: int) -> torch.Tensor | None:
    """probs float [B, N, V]: each node's own law, else the one-hot of its token; None where there is no law at all. columns: of every row,
    which of its nodes is in which column."""
    if all(row.laws is None for row in rows):
        return None
    probs = torch.nn.functional.one_hot(tokens, vocab_size).float()
    for b, row in enumerate(rows):
        for column, i in columns[b].items() if row.laws else ():
            if row.laws[i] is not None:
                probs[b, column] = row.laws[i].to(probs)
    return probs


def likeliest(logits: torch.Tensor, n: int, width: int = 96) -> torch.Tensor:
    """The indices of the n greatest of logits [B, m, V], the greatest first, and among equals, which are frequent in 16 bit, the lowest
    index, as argmax has it. On a CPU several times faster than topk: the n best are in the n groups with the best maxima."""
    vocab = logits.shape[-1]
    if logits.device.type != "cpu" or vocab // width < n:
        found = logits.topk(n).indices
    else:
        grouped = vocab // width * width
        best = logits[..., :grouped].float().unflatten(-1, (-1, width)).amax(-1).topk(n).indices
        places = (best[..., None] * width + torch.arange(width, device="cpu")).flatten(2)
        rest = torch.arange(grouped, vocab, device="cpu").expand(*places.shape[:2], -1)
        places = torch.cat([places, rest], dim=-1)
        found = places.gather(2, logits.gather(2, places).topk(n).indices)
    found = found.sort(-1).values
    return found.gather(-1, logits.gather(-1, found).sort(dim=-1, descending=True, stable=True).indices)
