"""Token trees: which drafted token follows which.

Node 0 is the root, the last committed token; nodes 1..N are the drafted tokens. A chain is a tree with one branch.
This module knows torch and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

MAX_NODES = 256  # of one proposal; with them go a mask and logits for every node


@dataclass(frozen=True)
class Tree:
    """A rooted tree over the nodes 0..N in topological order.

    `parents[i - 1]` is the parent of node i (0 <= parent < i). Siblings are listed in the order in which they are to be
    judged: the first sibling has rank 0.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        for node, parent in enumerate(self.parents, start=1):
            if not hasattr(parent, "__index__"):
                raise ValueError(f"Tree(parents=...): node {node} has parent {parent!r}; a parent is the number of a node, an int.")
            if not 0 <= parent < node:
                raise ValueError(f"Tree(parents=...): node {node} has parent {parent}; a parent must come before its child.")

    @classmethod
    @lru_cache(maxsize=256)
    def chain(cls, n: int) -> Tree:
        """The tree with one branch of n tokens."""
        return cls(tuple(range(n)))

    def __len__(self) -> int:
        """Number of drafted tokens N (the root is not counted)."""
        return len(self.parents)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(len(self.parents)))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of the nodes 0..N; the root has depth 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def first_branch(self) -> tuple[int, ...]:
        """The root's first child, its first child, and so on."""
        branch = [0]
        for node, parent in enumerate(self.parents, start=1):
            if parent == branch[-1]:
                branch.append(node)
        return tuple(branch[1:])

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Sibling rank of the nodes 1..N: 0 is judged first."""
        seen: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(seen.get(parent, 0))
            seen[parent] = ranks[-1] + 1
        return tuple(ranks)

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """Bool [N+1, N+1] on the CPU: entry (i, j) says that j is i or an ancestor of i."""
        table = torch.eye(len(self) + 1, dtype=torch.bool, device="cpu")
        for node, parent in enumerate(self.parents, start=1):
            table[node] |= table[parent]
        return table

    @cached_property
    def children(self) -> torch.Tensor:
        """int64 [N+1, n] on the CPU: of every node its children by rank, 0 where there are no more; n is the most that one has."""
        table = torch.zeros((len(self) + 1, max(self.ranks, default=0) + 1), dtype=torch.long, device="cpu")
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks), start=1):
            table[parent, rank] = node
        return table

    @cached_property
    def widest(self) -> tuple[int, ...]:
        """Of every depth that has children, from the root on, the most that a node there has."""
        most = [0] * max(self.depths)
        for node, rank in enumerate(self.ranks, start=1):
            most[self.depths[node] - 1] = max(most[self.depths[node] - 1], rank + 1)
        return tuple(most)

    def path(self, node: int) -> list[int]:
        """The nodes from the first drafted token down to `node`; the root is not part of it."""
        path = []
        while node:
            path.append(node)
            node = self.parents[node - 1]
        return path[::-1]

    def truncate(self, n: int) -> Tree:
        """The tree of the first n drafted tokens."""
        return self if n >= len(self) else Tree(self.parents[:n])
