"""Highlighted lines as HTML: no script, nothing loaded, light and dark as the reader's system has it."""

from __future__ import annotations

from html import escape

from .pieces import Piece

CLASSES = {"accepted": "accepted", "rejected": "rejected", "corrected": "own", "bonus": "own", "plain": "own"}
LEGEND = {"accepted": "drafted and accepted", "rejected": "drafted, not taken", "own": "the target's own: correction, bonus or plain"}

STYLE = """
.hf-specdec { color-scheme: light dark; background: #ffffff; color: #1f2328; padding: 0.6em 0.8em; border-radius: 6px;
  font-size: 14px; line-height: 1.55; }
.hf-specdec ol { margin: 0.5em 0; padding-left: 3em; font-family: ui-monospace, Menlo, Consolas, monospace; }
.hf-specdec li { white-space: pre-wrap; overflow-wrap: anywhere; background: inherit; }
.hf-specdec li::marker { color: #6e7781; }
.hf-specdec p { margin: 0.3em 0; }
.hf-specdec small { color: #57606a; }
.hf-specdec span { border-radius: 3px; padding: 0.05em 0; }
.hf-specdec p span { padding: 0.1em 0.5em; margin-right: 0.6em; }
.hf-specdec .accepted { background: #cdf2d6; color: #0a4a1c; }
.hf-specdec .rejected { background: #fbd9d7; color: #8c1713; text-decoration: line-through; }
.hf-specdec .own { background: #d5e5ff; color: #123f8c; }
@media (prefers-color-scheme: dark) {
  .hf-specdec { background: #14171c; color: #e6edf3; }
  .hf-specdec small, .hf-specdec li::marker { color: #9aa4af; }
  .hf-specdec .accepted { background: #12472280; color: #7ee2a0; }
  .hf-specdec .rejected { background: #5c1a1a80; color: #ff9d97; }
  .hf-specdec .own { background: #17386f80; color: #9cc4ff; }
}
"""


def fragment(lines: list[list[Piece]], rejected: bool, summary: str) -> str:
    """A <div> to be put into any page: legend, one list item per round, the summary."""
    legend = "".join(f'<span class="{name}">{text}</span>' for name, text in LEGEND.items() if rejected or name != "rejected")
    rounds = "\n".join(f'<li value="{line[0].round}">{"".join(map(_span, line))}</li>' for line in lines)
    return (
        f'<div class="hf-specdec"><style>{STYLE}</style>\n<p>{legend}</p>\n<ol>\n{rounds}\n</ol>\n'
        f"<p><small>{escape(summary)}</small></p></div>"
    )


def document(body: str) -> str:
    """The fragment as a page of its own."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">\n'
        '<meta name="color-scheme" content="light dark"><title>Accepted tokens</title></head>\n'
        f"<body>{body}</body></html>\n"
    )


def _span(piece: Piece) -> str:
    return f'<span class="{CLASSES[piece.kind]}" title="{escape(piece.title, quote=True)}">{escape(piece.text)}</span>'
