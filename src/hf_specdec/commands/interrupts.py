"""Ctrl-C at whatever time it comes."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_at_any_time() -> Iterator[None]:
    """Ctrl-C ends the block even where Python or a library would drop it: in a `__del__` or a callback, whose exceptions are reported and forgotten, and in
    an import, where torch aborts and transformers says that a module is missing. It waits until that is over."""
    report, handle, outer = sys.unraisablehook, signal.getsignal(signal.SIGINT), _imports(sys._getframe())
    if threading.current_thread() is not threading.main_thread() or not callable(handle):  # nobody listens
        yield
        return

    def dropped(what) -> None:
        if what.exc_type is KeyboardInterrupt:
            _once_more(outer)
        else:
            report(what)

    sys.unraisablehook = dropped
    signal.signal(signal.SIGINT, lambda number, frame: _once_more(outer) if _imports(frame) > outer else handle(number, frame))
    try:
        yield
    finally:
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, handle)


def _once_more(outer: int) -> None:
    """Ctrl-C again, in a moment, when the main thread is in no more imports than `outer`."""
    _thread.start_new_thread(_interrupt, (threading.main_thread().ident, outer))  # a Thread would have to be waited for, in a handler


def _interrupt(thread: int, outer: int) -> None:
    time.sleep(0.02)
    while _imports(sys._current_frames().get(thread)) > outer:
        time.sleep(0.02)
    _thread.interrupt_main()


def _imports(frame) -> int:
    """How many of the frames that led to this one are of an import."""
    count = 0
    while frame is not None:
        count, frame = count + (frame.f_code.co_filename == "<frozen importlib._bootstrap>"), frame.f_back
    return count
