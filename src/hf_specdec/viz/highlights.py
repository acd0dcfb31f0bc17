"""Accepted tokens in colour: while they stream in a terminal, and afterwards, one line per round, in a terminal or as HTML.

The lines are those of Leviathan et al. 2023 (arXiv 2211.17192), Figure 1: green accepted, red rejected, blue the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..hints import many
from ..trace import SpeculationTrace
from . import page
from .pieces import Piece, lines_of, trace_of
from .text import Detokenizer, has_colour, printed, spelled, visible

DRAFTED, OWN = "black on green", ""
STYLES = {"accepted": DRAFTED, "rejected": "white on red strike", "own": "white on blue"}
MARKS = {"accepted": "[{}]", "rejected": "[-{}-]", "own": "{}"}  # where there is no colour


class Highlighter:
    """A streamer for `generate(streamer=...)`: prints a row's tokens as they come, drafted ones on a green ground, or, with `marks`, [like this] where there is
    no colour."""

    def __init__(self, tokenizer, console: Console, marks: bool = False):
        self.detokenizer, self.console, self.drafted = Detokenizer(tokenizer), console, False
        self.marks = marks and not has_colour(console)

    def __call__(self, row: int, tokens: list[int], drafted: list[bool]) -> None:
        piece = Text()
        for token, was, self.drafted in zip(tokens, [self.drafted, *drafted], drafted):
            if self.marks and self.drafted != was:
                piece.append("[" if self.drafted else "]")
            piece.append(visible(self.detokenizer.push(token)), style=DRAFTED if self.drafted else OWN)
        self._print(piece)

    def end(self) -> None:
        self._print(Text(visible(self.detokenizer.flush()) + "]" * (self.marks and self.drafted), style=DRAFTED if self.drafted else OWN))
        self.console.print()

    def _print(self, piece: Text) -> None:
        if piece.plain:
            self.console.print(piece, end="", soft_wrap=True, highlight=False)


class Highlight:
    """What `highlight` returns. A notebook shows it as HTML, rich prints it in colour; `str`, and rich where there is no colour, mark runs of tokens: [accepted], [-rejected-], the
    target's own as they are.

    lines: one list of `Piece` per round.
    """

    def __init__(self, lines: list[list[Piece]], rejected: bool, summary: str):
        self.lines, self.rejected, self.summary = lines, rejected, summary

    def to_html(self) -> str:
        """A <div> with its own style; `save` wraps it into a page."""
        return page.fragment(self.lines, self.rejected, self.summary)

    _repr_html_ = to_html

    def to_terminal(self, encoding: str | None = None) -> str:
        """Legend, a line per round, summary, with the escape codes of the 16 colours of every terminal; what the encoding (None: standard output's) lacks is spelled out."""
        console = Console(file=StringIO(), force_terminal=True, color_system="standard", legacy_windows=False, highlight=False)
        console.print(self, soft_wrap=True)
        return printed(console.file.getvalue(), encoding)

    def __rich_console__(self, console: Console, options) -> Iterator[Text]:
        yield self._text(coloured=has_colour(console), encoding=options.encoding)

    def _text(self, coloured: bool, encoding: str = "utf-8") -> Text:
        legend = [(name, text) for name, text in page.LEGEND.items() if self.rejected or name != "rejected"]
        parts = [Text("  ").join(_piece(f" {text} " if coloured else text, name, coloured) for name, text in legend)]
        width = len(str(self.lines[-1][0].round)) if self.lines else 1
        for line in self.lines:
            runs = [(page.CLASSES[piece.kind], spelled(piece.text, encoding)) for piece in line]
            if not coloured:
                runs = [(name, "".join(text for _, text in run)) for name, run in groupby(runs, key=itemgetter(0))]
            parts.append(Text.assemble((f"{line[0].round:>{width}} ", "dim"), *(_piece(text, name, coloured) for name, text in runs)))
        return Text("\n").join([*parts, Text(self.summary, style="dim")])

    def __str__(self) -> str:
        return printed(self._text(coloured=False).plain)

    def save(self, path: str | Path) -> Path:
        """Write a page (.html), the coloured text (.ans) or the text with marks (.txt); returns the path."""
        path = Path(path)
        writers = {".html": lambda: page.document(self.to_html()), ".ans": lambda: self.to_terminal("utf-8"), ".txt": lambda: f"{self._text(coloured=False).plain}\n"}
        if path.suffix.lower() not in writers:
            raise ValueError(f"path={str(path)!r}: the name must end in one of {', '.join(writers)}.")
        path.write_text(writers[path.suffix.lower()](), encoding="utf-8")
        return path


def highlight(output_or_trace, tokenizer, row: int = 0, rejected: bool = False) -> Highlight:
    """The tokens of one row, a line per round, coloured by what became of them.

    output_or_trace: what `generate(..., return_dict_in_generate=True)` returned, or its `speculation`. rejected: show the
    proposals that were not taken, struck through. With `speculative={"record_probs": True}`, p and q are in the tooltips.
    """
    trace = trace_of(output_or_trace)
    return Highlight(lines_of(trace, tokenizer, row, rejected), rejected, _summary(trace, row))


def _piece(text: str, name: str, coloured: bool) -> Text:
    return Text(text, style=STYLES[name]) if coloured else Text(MARKS[name].format(text) if text else "")


def _summary(trace: SpeculationTrace, row: int) -> str:
    own = [entry for entries in trace.rounds for entry in entries if entry.row == row]
    accepted, proposed, tokens = (sum(getattr(entry, name) for entry in own) for name in ("accepted", "proposed", "committed"))
    rate = f"{accepted} of {proposed} drafted tokens accepted ({accepted / proposed:.0%})" if proposed else "nothing was drafted"
    return f"{many(tokens, 'token')} in {many(len(own), 'round')}, {rate}"
