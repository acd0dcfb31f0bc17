"""Where what passes put out goes in what `generate()` returns of every new token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Step:
    """The entry of one new token: what plain generate's pass has put out that it came from, over the last `width` of `total` columns.

    columns: of every row's prompt of `prompt` columns, those that are no padding. spans: by row, the places that the pass read, from the first up to an end; (0, 0) of a row
    that has ended before.
    """

    width: int
    total: int
    prompt: int
    columns: list[list[int]]
    spans: list[tuple[int, int]]

    def seen(self, b: int, end: int) -> slice | list[int]:
        """The columns of the first `end` places of row b."""
        return self._at(b, 0, end, 0)

    def read(self, b: int, first: int, end: int) -> slice | list[int]:
        """Those of the places from `first` up to `end` of row b, counted from the first of the last `width` ones."""
        return self._at(b, first, end, self.total - self.width)

    def _at(self, b: int, first: int, end: int, begin: int) -> slice | list[int]:
        """Counted from column `begin`; a slice, which needs no copy to the device, unless there are holes in the mask."""
        own = self.columns[b]
        gap = self.prompt - len(own)
        if first >= len(own) or gap == own[0]:
            return slice(gap + first - begin, gap + end - begin)
        return [column - begin for column in (*own[first:end], *range(self.prompt, gap + end))]


def steps(columns: list[list[int]], prompt: int, cached: int, lengths: list[int], whole: bool) -> Iterator[Step]:
    """One after the other. columns, prompt: as of a `Step`; the first `cached` columns had been read before. lengths: new tokens per row. whole: a pass reads all of the
    text, as plain generate's do without a cache."""
    fresh = [sum(column < cached for column in own) for own in columns]
    for step in range(max(lengths)):
        alone = step and not whole
        spans = [(len(own) + step - 1 if alone else first, len(own) + step) if step < n else (0, 0) for first, own, n in zip(fresh, columns, lengths)]
        yield Step(1 if alone else prompt + step - cached, prompt + step, prompt, columns, spans)
