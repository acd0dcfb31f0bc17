"""Ctrl-C at moments that a run can go on from."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Ctrl-C within takes effect at the end: half of an optimiser's step would leave weights that no number of steps gives."""
    before, asked = signal.getsignal(signal.SIGINT), []
    if threading.current_thread() is not threading.main_thread() or not callable(before):  # which alone gets signals; nobody listens
        yield
        return
    signal.signal(signal.SIGINT, lambda *given: asked.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        before(*asked[-1])
