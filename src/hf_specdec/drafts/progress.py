"""A progress bar for what takes longer than a second."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Timer


@contextmanager
def progress(what: str, items: Iterable) -> Iterator[Iterable]:
    """Gives the items back; a bar on standard error appears once the block has taken a second."""
    from rich.console import Console
    from rich.progress import Progress

    total = len(items) if hasattr(items, "__len__") else None
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not (console.is_terminal or console.is_jupyter))
    task = bar.add_task(what, total=total)
    timer = Timer(1.0, bar.start)
    timer.daemon = True
    timer.start()

    def counted():
        for item in items:
            yield item
            bar.advance(task)

    try:
        yield counted()
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
