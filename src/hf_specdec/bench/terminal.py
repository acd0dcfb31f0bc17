"""Progress on the standard error stream, so that standard output holds results alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


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
def counting(text: str, total: int) -> Iterator["Counter"]:
    """A bar over `total` steps: call `step("what comes next")` after each. Without a terminal, ten lines at most."""
    console = stderr_console()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Counter(console, progress, text, total)


class Counter:
    """The handle that `counting` gives out."""

    def __init__(self, console: Console, progress: Progress, text: str, total: int):
        self.console, self.progress, self.text, self.total, self.done = console, progress, text, total, 0
        self.task = progress.add_task(text, total=total)

    def __call__(self, note: str = "", steps: int = 1) -> None:
        tenth = self.done * 10 // self.total
        self.done += steps
        self.progress.update(self.task, advance=steps, description=f"{self.text} {note}".rstrip())
        if not self.console.is_terminal and self.done * 10 // self.total > tenth:
            self.console.print(f"{self.text} {self.done}/{self.total} {note}".rstrip(), markup=False)
