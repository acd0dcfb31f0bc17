"""Progress on the standard error stream, so that standard output holds results alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic as now

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

EVERY = 30.0  # seconds without a line, where no terminal shows a bar


def stderr_console() -> Console:
    return Console(file=sys.stderr, highlight=False)


@contextmanager
def working(text: str) -> Iterator[None]:
    """A spinner with the seconds elapsed while the block runs; a plain line where the stream is no terminal."""
    console = stderr_console()
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with (
        _library_bars_off(),
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        progress.add_task(text, total=None)
        if not console.is_terminal:
            console.print(text, markup=False)
        yield


@contextmanager
def _library_bars_off() -> Iterator[None]:
    """transformers' own bars would write over ours."""
    from transformers.utils import logging

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


@contextmanager
def counting(text: str, total: int, done: int = 0, console: Console | None = None) -> Iterator[Counter]:
    """A bar over `total` steps: call `step("what comes next")` after each. Without a terminal, a line for every tenth and whenever the last one is
    `EVERY` seconds old, with the time that is left."""
    console = console or stderr_console()
    bar = [BarColumn(min(console.width // 3 - 10, 40))] if console.width >= 60 else []  # where there is little room, the text folds and the figures stay
    columns = (TextColumn("{task.description}", markup=False, table_column=Column()), *bar, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not _live(console)) as progress:
        yield Counter(console, progress, text, total, done)


def _live(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


def duration(seconds: float) -> str:
    """Rounded for people: 45 s, 65 min, 2.5 h."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Counter:
    """The handle that `counting` gives out."""

    def __init__(self, console: Console, progress: Progress, text: str, total: int, done: int = 0):
        self.console, self.progress, self.text, self.total = console, progress, text, total
        self.task = progress.add_task(text, total=total, completed=done)
        self.start(done)

    def start(self, done: int) -> None:
        """As many steps were done before, and took no time of this run."""
        self.first = self.done = done
        self.begin = self.told = now()
        self.progress.update(self.task, completed=done)

    def __call__(self, note: str = "", steps: int = 1) -> None:
        self.reach(self.done + steps, note)

    def reach(self, done: int, note: str = "") -> None:
        """As many steps are done."""
        tenth, self.done = self.done * 10 // self.total, done
        self.progress.update(self.task, completed=done, total=self.total, description=self._with(note))
        if done * 10 // self.total > tenth or now() - self.told >= EVERY:
            self._print(f"{self.text} {done:,} of {self.total:,}, {self._time()}" + (f" ({note})" if note else ""))

    def reach_of(self, done: int, total: int) -> None:
        """`reach`, where the total is known only now."""
        self.total = total
        self.reach(done)

    def say(self, note: str) -> None:
        """What is done now, between two steps."""
        self.progress.update(self.task, description=self._with(note))
        self._print(self._with(note))

    def _with(self, note: str) -> str:
        return f"{self.text} ({note})" if note else self.text

    def _time(self) -> str:
        """What it took, or at this pace will take."""
        spent, made = now() - self.begin, self.done - self.first
        if self.done >= self.total:
            return f"took {duration(spent)}"
        return f"about {duration(spent * (self.total - self.done) / made)} left" if made > 0 else f"{duration(spent)} so far"

    def _print(self, line: str) -> None:
        self.told = now()
        if not _live(self.console):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
