"""The rounds of a call on a time line, to scale, after Leviathan et al. 2023 (arXiv 2211.17192), Figure 5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from transformers.utils import ModelOutput

from ..hints import short
from ..trace import SpeculationTrace
from .canvas import new_figure
from .pieces import trace_of

COLOURS = {"prompt": "#e69f00", "draft": "#56b4e9", "target": "#7b4fa3", "rest": "#b8b8b8"}
MEANING = {
    "prompt": "first round: prompt pass",
    "draft": "draft (a box per drafted token where a model drafts)",
    "target": "target pass",
    "rest": "accepting, bookkeeping",
}


@dataclass(frozen=True)
class Span:
    """A box: what it is (a key of COLOURS), when it begins and how long it takes, in seconds."""

    kind: str
    begin: float
    seconds: float


def spans(value: Any) -> list[Span]:
    """The boxes of one lane. value: an output, a trace, or the seconds of one target step after another (plain decoding)."""
    if isinstance(value, (list, tuple)):
        return _plain(value)
    trace = trace_of(value)
    if len(trace.round_seconds) != len(trace.rounds):
        raise ValueError("this trace holds no seconds per round: it was made by an older version; generate again.")
    boxes, now = [], 0.0
    for number, (draft, verify, rest) in enumerate(trace.round_seconds):
        steps = _steps(trace, number)
        for step in range(steps):
            boxes.append(Span("draft", now + draft * step / steps, draft / steps))
        boxes.append(Span("target" if number else "prompt", now + draft, verify))
        boxes.append(Span("rest", now + draft + verify, rest))
        now += draft + verify + rest
    return boxes


def _steps(trace: SpeculationTrace, number: int) -> int:
    """Boxes that the draft's time is cut into: its forwards where it is a model, else one, also if it proposed nothing."""
    proposed = max((entry.proposed for entry in trace.rounds[number]), default=0)
    return max(proposed, 1) if trace.draft_calls else 1


def _plain(seconds: Iterable[float]) -> list[Span]:
    boxes, now = [], 0.0
    for number, step in enumerate(seconds):
        if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 <= step < float("inf"):
            raise ValueError(f"a lane of plain decoding is a list of seconds per target step; {short(step)} is none. Give several outputs as a dict, by their labels.")
        boxes.append(Span("target" if number else "prompt", now, step))
        now += step
    return boxes


def timeline(runs: Any, until: float | None = None):
    """A matplotlib figure with one lane per run, all on one axis of measured seconds.

    runs: an output, a trace, or {label: output, trace or list of seconds per step of plain decoding}. until: show so many
    seconds. Above each target pass stands how many tokens it committed, where there is room. The seconds are the host's: on a GPU,
    work that is launched is paid for where the host waits, in "accepting".
    """
    lanes = dict(runs) if isinstance(runs, Mapping) and not isinstance(runs, ModelOutput) else {"speculative": runs}
    if not lanes:
        raise ValueError("runs: nothing to draw; give an output, a trace, or a dict of them by label.")
    if until is not None and not (isinstance(until, Real) and until > 0):
        raise ValueError(f"until={until!r} must be a number of seconds above 0.")
    boxes = {name: spans(value) for name, value in lanes.items()}
    if empty := [name for name, own in boxes.items() if not own]:
        raise ValueError(f"runs: {empty[0]!r} holds no round and no step; leave it out, or give the output of a call that wrote something.")
    end = until or max(box.begin + box.seconds for own in boxes.values() for box in own) or 1.0
    figure = new_figure(10, 1.5 + 0.75 * len(lanes))
    axes = figure.subplots()
    for place, (name, own) in enumerate(boxes.items()):
        _lane(axes, place, own, end)
        _counts(axes, place, lanes[name], own, end)
    axes.set_yticks(range(len(lanes)), lanes, parse_math=False)
    axes.set_ylim(len(lanes) - 0.4, -0.7)
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    shown = {box.kind for own in boxes.values() for box in own}
    handles = [axes.barh(0, 0, color=COLOURS[kind], label=text) for kind, text in MEANING.items() if kind in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _lane(axes, place: int, boxes: list[Span], end: float) -> None:
    for kind, colour in COLOURS.items():
        own = [(box.begin, box.seconds) for box in boxes if box.kind == kind and box.begin < end]
        if own:
            height = 0.2 if kind == "rest" else 0.56
            bars = axes.broken_barh(own, (place - height / 2, height), facecolors=colour, edgecolors="white", linewidth=0.5)
            bars.set_gid(f"{place}:{kind}")


def _counts(axes, place: int, value: Any, boxes: list[Span], end: float) -> None:
    """Tokens per row and target pass, above the passes that are wide enough for a figure."""
    if isinstance(value, (list, tuple)):
        return
    passes = [box for box in boxes if box.kind in ("prompt", "target")]
    for box, entries in zip(passes, trace_of(value).rounds):
        middle = box.begin + box.seconds / 2
        if box.seconds > end / 150 and middle < end:
            mean = sum(entry.committed for entry in entries) / len(entries)
            axes.text(middle, place - 0.33, f"{mean:.3g}", ha="center", va="bottom", fontsize=7)
