"""Speculation to look at: accepted tokens in colour, the rounds on a time line, the papers' figures, a race.

    from hf_specdec import viz
    viz.highlight(out, tokenizer, rejected=True)     # a line per round: in a notebook, in a terminal, .save("answer.html")
    viz.timeline({"K = 7": out, "K = 3": other})     # what the time went into, to scale
    viz.figures.expected_tokens()                    # and the other figures of Leviathan et al. 2023
    viz.race([viz.racer("plain", model, inputs), viz.racer("speculative", model, inputs, speculative=True)], tokenizer)

Figures need matplotlib (the extra `demo`), which is imported when one is drawn.
"""

from . import figures
from .highlights import Highlight, highlight
from .races import Arm, Race, race, racer
from .timelines import timeline

__all__ = ["Arm", "Highlight", "Race", "figures", "highlight", "race", "racer", "timeline"]
