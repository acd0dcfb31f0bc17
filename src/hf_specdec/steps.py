"""Where what passes put out goes in what `generate()` returns of every new token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Step:
    """The entry of one new token: what plain generate's pass has put out that it came from, over the last `width` of `total` columns.

    where: by row, the column of each of its places; those of padding are nobody's. spans: by row, the places that the pass read, from the first up to an end; (0, 0) of a
    row that has ended before.
    """

    width: int
    total: int
    where: list[list[int]]
    spans: list[tuple[int, int]]

    def columns(self, b: int, first: int, end: int) -> list[int]:
        """Of places of row b, counted from the first of the last `width` ones."""
        return [column - self.total + self.width for column in self.where[b][first:end]]


def steps(columns: list[list[int]], prompt: int, cached: int, lengths: list[int], whole: bool) -> Iterator[Step]:
    """One after the other. columns: of every row's prompt of `prompt` columns, those that are no padding; the first `cached` had been read before. lengths: new tokens per row.
    whole: a pass reads all of the text, as plain generate's do without a cache."""
    for step in range(max(lengths)):
        total = prompt + step
        width, where = 1 if step and not whole else total - cached, [[*own, *range(prompt, total)] for own in columns]
        firsts = [sum(column < total - width for column in own) for own in columns] if whole or not step else [len(own) - 1 for own in where]
        yield Step(width, total, where, [(first, len(own)) if step < n else (0, 0) for first, own, n in zip(firsts, where, lengths)])
