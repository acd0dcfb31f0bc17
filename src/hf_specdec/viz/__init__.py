"""Speculation to look at: accepted tokens in colour, the rounds on a time line, the papers' figures, a race.

    from hf_specdec import viz
    viz.highlight(out, tokenizer, rejected=True)     # a line per round: in a notebook, in a terminal, .save("answer.html")

Figures need matplotlib (`pip install 'hf-specdec[demo]'`), which is imported when one is drawn.
"""

from .highlights import Highlight, highlight

__all__ = ["Highlight", "highlight"]
