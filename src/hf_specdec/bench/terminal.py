"""Progress on the standard error stream, so that standard output holds results alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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
def counting(text: str, total: int, done: int = 0, console: Console | None = None) -> Iterator["Counter"]:
    """A bar over `total` steps: call `step("what comes next")` after each. Without a terminal, ten lines at most."""
    console = console or stderr_console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not _live(console)) as progress:
        yield Counter(console, progress, text, total, done)


def _live(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


class Counter:
    """The handle that `counting` gives out."""

    def __init__(self, console: Console, progress: Progress, text: str, total: int, done: int = 0):
        self.console, self.progress, self.text, self.total, self.done = console, progress, text, total, done
        self.task = progress.add_task(text, total=total, completed=done)

    def __call__(self, note: str = "", steps: int = 1) -> None:
        self.reach(self.done + steps, note)

    def reach(self, done: int, note: str = "") -> None:
        """As many steps are done."""
        tenth, self.done = self.done * 10 // self.total, done
        self.progress.update(self.task, completed=done, total=self.total, description=f"{self.text} {note}".rstrip())
        if done * 10 // self.total > tenth:
            self._print(f"{done}/{self.total} {note}")

    def reach_of(self, done: int, total: int) -> None:
        """`reach`, where the total is known only now."""
        self.total = total
        self.reach(done)

    def say(self, note: str) -> None:
        """What is done now, between two steps."""
        self.progress.update(self.task, description=f"{self.text} {note}")
        self._print(note)

    def _print(self, note: str) -> None:
        if not _live(self.console):
            self.console.print(f"{self.text} {note}".rstrip(), markup=False, highlight=False, soft_wrap=True)
