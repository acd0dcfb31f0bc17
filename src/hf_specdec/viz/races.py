"""A race between ways of decoding: each runs alone, one after the other; then all are replayed side by side at measured times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from ..hints import many, short, what
from .highlights import DRAFTED
from .text import RACE_NOTE, Detokenizer, own_console, visible

Line = list[tuple[str, bool]]


@dataclass
class Arm:
    """One contestant. run(emit) decodes and calls emit(tokens, drafted) as tokens come: token ids with one flag each (or none),
    or a str, which counts as one token. warm: called once before, for what only the first run costs."""

    label: str
    run: Callable[[Callable[..., None]], object]
    warm: Callable[[], object] | None = None


@dataclass
class Lap:
    """What an arm did: (seconds since its start, tokens so far, text, drafted) per piece of text; all its token ids; total seconds."""

    label: str
    pieces: list[tuple[float, int, str, bool]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, now: float = float("inf")) -> int:
        """Tokens that had come by then."""
        return max((count for when, count, _, _ in self.pieces if when <= now), default=0)

    def speed(self, now: float = float("inf")) -> float:
        """Tokens per second up to then, prompt pass included."""
        spent = min(now, self.seconds)
        return self.count(now) / spent if spent > 0 else 0.0

    def screen(self, now: float, width: int, height: int) -> list[Line]:
        """The text up to then, wrapped to `width` cells, the last `height` lines of it; a line is a list of (text, drafted)."""
        lines, used = [[]], 0
        for when, _, text, drafted in self.pieces:
            if when > now:
                break
            for character in text.expandtabs(4):
                cells = cell_len(character)
                if character == "\n" or used + cells > width:
                    lines.append([])
                    used = 0
                if character != "\n":
                    _extend(lines[-1], character, drafted)
                    used += cells
        return lines[-height:]


def _extend(line: Line, character: str, drafted: bool) -> None:
    if line and line[-1][1] == drafted:
        line[-1] = (line[-1][0] + character, drafted)
    else:
        line.append((character, drafted))


class Race:
    """What `race` returns: `laps`, one per arm, to be replayed and saved."""

    HEIGHT = 14
    LEAST = 18  # cells of an arm's frame, where others stand beside it

    def __init__(self, laps: list[Lap]):
        self.laps = laps

    @property
    def seconds(self) -> float:
        """How long the replay takes."""
        return max(lap.seconds for lap in self.laps)

    def status(self, lap: Lap, now: float = float("inf")) -> str:
        """The line under an arm: tokens per second so far, and once it is over how it compares with the first arm."""
        text = f"{lap.speed(now):.1f} tokens/s"
        if now < lap.seconds:
            return f"{text}, {many(lap.count(now), 'token')}"
        text += f", {many(lap.count(), 'token')} in {lap.seconds:.1f} s"
        first = self.laps[0]
        if lap is not first and now >= first.seconds and first.speed():
            text += f", {lap.speed() / first.speed():.2f}x"
            if lap.tokens and first.tokens:
                text += ", same tokens" if lap.tokens == first.tokens else ", other tokens"
        return text

    def frame(self, now: float, width: int = 100, height: int = HEIGHT) -> Group:
        """Everything as it was `now` seconds after the start of each arm, for rich; arms that do not fit beside the others stand below them."""
        across = max(min(len(self.laps), width // self.LEAST), 1)
        rows = [self.laps[first : first + across] for first in range(0, len(self.laps), across)]
        grids = [self._row(laps, now, width // across, max(height // len(rows), 3)) for laps in rows]
        clock = f"{min(now, self.seconds):.1f} s of {self.seconds:.1f} s. {RACE_NOTE}"
        return Group(*grids, Text(clock, style="dim"))

    def _row(self, laps: list[Lap], now: float, own: int, height: int) -> Group:
        """These arms side by side, `own` cells each; names that are too long for the frames stand above them."""
        top, grid = (Table.grid(*(Column(width=own, vertical=place) for _ in laps)) for place in ("bottom", "top"))
        names = [Text(visible(lap.label), style="bold", justify="center") for lap in laps]
        above = any(name.cell_len > own - 6 for name in names)
        panels = []
        for lap, name in zip(laps, names):
            body = Text("\n").join(Text.assemble(*((text, DRAFTED if drafted else "") for text, drafted in line))
                                   for line in lap.screen(now, own - 4, height))
            style = "green" if now >= lap.seconds else "dim"
            panels.append(Panel(body, title=None if above else name, border_style=style, width=own, height=height + 2))
        if above:
            top.add_row(*(Padding(name, (0, 1)) for name in names))
        grid.add_row(*panels)
        grid.add_row(*(Padding(Text(self.status(lap, now), justify="center"), (0, 1)) for lap in laps))
        return Group(top, grid)

    def replay(self, console: Console | None = None, clock=time.perf_counter, sleep=time.sleep) -> None:
        """Show the race in real time; only its end where the console is no terminal."""
        console = console or own_console()
        height = max(min(self.HEIGHT, console.height - 8), 3)
        if not console.is_terminal:
            console.print(self.frame(self.seconds, console.width, height))
            return
        begin = clock()
        with Live(console=console, auto_refresh=False) as live:
            while (now := clock() - begin) < self.seconds:
                live.update(self.frame(now, console.width, height), refresh=True)
                sleep(0.05)
            live.update(self.frame(self.seconds, console.width, height), refresh=True)

    def save_gif(self, path: str | Path, fps: float = 10) -> Path:
        """The replay as an animated GIF, in real time; needs matplotlib."""
        from .gif import save

        return save(self, path, fps)


def race(arms: Iterable, tokenizer=None, console: Console | None = None, replay: bool = True) -> Race:
    """Run the arms, one after the other, replay them side by side in the terminal, and return the `Race`.

    arms: `Arm`s or (label, run) pairs; `racer` makes them of a model. tokenizer: decodes token ids; not needed by arms that emit
    text. replay: whether to show anything.
    """
    arms = [_arm(arm) for arm in (arms if isinstance(arms, Iterable) else [arms])]
    if not arms:
        raise ValueError("arms: give at least one (label, run) pair.")
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"tokenizer={short(tokenizer)} cannot decode: pass the models' tokenizer.")
    console = console or own_console()
    laps = []
    for arm in arms:
        if replay:
            console.print(Text(f"Running {visible(arm.label)}, alone ...", style="dim"))
        laps.append(_run(arm, tokenizer))
    result = Race(laps)
    if replay:
        result.replay(console)
    return result


def _arm(given) -> Arm:
    arm = Arm(*given) if isinstance(given, tuple | list) and len(given) in (2, 3) else given
    if not isinstance(arm, Arm) or not callable(arm.run):
        raise ValueError(f"arms: give Arms, or (label, run) pairs with a function run(emit); {short(given)} is neither.")
    return arm


def _run(arm: Arm, tokenizer) -> Lap:
    if arm.warm is not None:
        arm.warm()
    lap, arrivals = Lap(arm.label), []

    def emit(tokens, drafted=None) -> None:
        arrivals.append((time.perf_counter() - begin, tokens, drafted))
        if tokenizer is None and not isinstance(tokens, str):
            raise ValueError(f"arm {arm.label!r} emits token ids: pass tokenizer= to decode them.")

    begin = time.perf_counter()
    arm.run(emit)
    lap.seconds = time.perf_counter() - begin
    if not arrivals:
        raise ValueError(f"arm {arm.label!r} emitted nothing: its run(emit) has to call emit(tokens).")
    _write(lap, arrivals, tokenizer)
    return lap


def _write(lap: Lap, arrivals: list[tuple], tokenizer) -> None:
    """Decode what came, after the clock has stopped."""
    detokenizer, count, flag = Detokenizer(tokenizer), 0, False
    for when, tokens, drafted in arrivals:
        if isinstance(tokens, str):
            count, flag = count + 1, bool(drafted)
            lap.pieces.append((when, count, visible(tokens), flag))
            continue
        tokens = [tokens] if isinstance(tokens, int) else list(tokens)
        for token, flag in zip(tokens, [False] * len(tokens) if drafted is None else drafted, strict=True):
            count += 1
            lap.tokens.append(token)
            lap.pieces.append((when, count, visible(detokenizer.push(token)), bool(flag)))
    if lap.tokens and (rest := detokenizer.flush()):
        lap.pieces.append((lap.pieces[-1][0], count, visible(rest), bool(flag)))


def racer(label: str, model, inputs, **options) -> Arm:
    """An arm that calls `model.generate(**inputs, **options)` on one prompt, with or without `speculative=`."""
    if not isinstance(inputs, Mapping) or "input_ids" not in inputs:
        raise ValueError(f"inputs: give what the tokenizer returns of one prompt, with input_ids and attention_mask, not {what(inputs)}.")
    if len(inputs["input_ids"]) != 1:
        raise ValueError(f"inputs: a race takes one prompt, these are {len(inputs['input_ids'])}.")
    if isinstance(model, type) or not callable(getattr(model, "generate", None)):
        raise ValueError(f"model: expected a transformers model with generate(), got {what(model)}; load one with from_pretrained.")
    ours = options.get("speculative") not in (None, False)

    def run(emit, **more):
        streamer = (lambda row, tokens, drafted: emit(list(tokens), list(drafted))) if ours else _Stock(emit)
        return model.generate(**inputs, **{**options, **more}, streamer=streamer)

    return Arm(label, run, lambda: run(lambda *_: None, max_new_tokens=4))


class _Stock:
    """What transformers' own generate wants of a streamer; the prompt comes first."""

    def __init__(self, emit: Callable[..., None]):
        self.emit, self.begun = emit, False

    def put(self, value) -> None:
        if self.begun:
            self.emit(value.flatten().tolist())
        self.begun = True

    def end(self) -> None:
        """Nothing is held back."""
