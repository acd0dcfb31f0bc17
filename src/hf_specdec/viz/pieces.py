"""A trace as lines of text: one line per round, one piece per token, each with what became of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..trace import Round, SpeculationTrace
from .text import Detokenizer, visible

KINDS = {
    "accepted": "drafted and accepted",
    "rejected": "drafted, not taken",
    "corrected": "the target's own, after a rejection",
    "bonus": "the target's own, after all drafted tokens were accepted",
    "plain": "the target's own; nothing was drafted",
}
MARKS = str.maketrans({"\n": "↵", "\t": "⇥"})


@dataclass(frozen=True)
class Piece:
    """One token. kind: one of KINDS. round, position: counted from 1; the position is that among the row's new tokens.
    p, q: the target's and the draft's probability of it, None where they were not recorded or it was not drawn from q."""

    text: str
    token: int
    kind: str
    round: int
    position: int
    source: str
    p: float | None = None
    q: float | None = None

    @property
    def title(self) -> str:
        """What a tooltip says of it."""
        parts = [KINDS[self.kind], f"round {self.round}, position {self.position}, token {self.token}"]
        if self.kind in ("accepted", "rejected"):
            parts.append(f"source: {self.source}")
        parts += [f"{name} = {value:.4g}" for name, value in (("p", self.p), ("q", self.q)) if value is not None]
        return "; ".join(parts)


def trace_of(value: Any) -> SpeculationTrace:
    """The trace itself, or that of an output of `generate`; ValueError where there is none."""
    if isinstance(value, SpeculationTrace):
        return value
    trace = getattr(value, "speculation", None)
    if not isinstance(trace, SpeculationTrace):
        raise ValueError(
            f"{type(value).__name__} has no speculation trace: pass the output of generate(..., speculative=True, "
            f"return_dict_in_generate=True), or its `speculation`."
        )
    return trace


def lines_of(trace: SpeculationTrace, tokenizer, row: int = 0, rejected: bool = False) -> list[list[Piece]]:
    """One list of pieces per round of that row; proposals that were not taken stand before the token that took their place."""
    rows = len(trace.drafted)
    if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < rows:
        held = "no row (a beam search has none)" if not rows else "row 0 alone" if rows == 1 else f"rows 0 to {rows - 1}"
        raise ValueError(f"row={row!r} is not in this trace, which has {held}.")
    if not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"tokenizer={tokenizer!r} cannot decode: pass the target's tokenizer.")
    own = [(n, entry) for n, entries in enumerate(trace.rounds, 1) for entry in entries if entry.row == row]
    if any(len(entry.tokens) != entry.committed for _, entry in own):
        raise ValueError("this trace holds no token ids: it was made by an older version; generate again.")
    detokenizer, position, lines = Detokenizer(tokenizer, skip_special_tokens=False), 1, []
    for number, entry in own:
        lines.append(_line(detokenizer, number, position, entry, rejected))
        position += entry.committed
    if lines and (rest := detokenizer.flush()):
        at = max((i for i, piece in enumerate(lines[-1]) if piece.kind != "rejected"), default=-1)  # a text may end in its draft
        lines[-1][at] = _longer(lines[-1][at], rest)
    return lines


def _line(detokenizer: Detokenizer, number: int, position: int, entry: Round, rejected: bool) -> list[Piece]:
    p, q = entry.p or [None] * (entry.committed + len(entry.rejected)), entry.q or [None] * (entry.committed + len(entry.rejected))
    own_kind = "corrected" if entry.rejected else "bonus" if entry.accepted else "plain"

    def piece(decoder: Detokenizer, token: int, kind: str, place: int, index: int) -> Piece:
        return Piece(_shown(decoder.push(token)), token, kind, number, position + place, entry.source, p[index], q[index])

    line = [piece(detokenizer, token, "accepted", i, i) for i, token in enumerate(entry.tokens[: entry.accepted])]
    if rejected and entry.rejected:
        side = detokenizer.fork()
        others = [piece(side, token, "rejected", entry.accepted + i, entry.committed + i) for i, token in enumerate(entry.rejected)]
        line += others[:-1] + [_longer(others[-1], side.flush())]
    own = entry.tokens[entry.accepted :]
    return line + [piece(detokenizer, token, own_kind, entry.accepted + i, entry.accepted + i) for i, token in enumerate(own)]


def _longer(piece: Piece, text: str) -> Piece:
    return replace(piece, text=piece.text + _shown(text))


def _shown(text: str) -> str:
    """On one line, and harmless."""
    return visible(text).translate(MARKS)
