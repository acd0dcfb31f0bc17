"""A worker's side of the protocol: JSON lines on stdin and stdout. Needs nothing but the standard library.

The first line, from the parent, holds the options; the worker answers {"ready": {mode: what it is}, "versions": {...}}. Every other line
{"mode": ..., "ids": [prompt token ids], "max_new_tokens": n} is answered by {"tokens": [new token ids], "seconds": s}, the prompt pass included
and nothing kept from the call before. What goes wrong is answered by {"error": "..."}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Run = Callable[[list[int], int], list[int]]


def serve(make: Callable[[dict], tuple[dict[str, Run], dict[str, str], dict[str, str]]]) -> None:
    """make(options) -> (runs by mode, what each mode is, versions). run(ids, max_new_tokens) -> new token ids, the end of sequence last."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines write to stdout, too

    def say(**answer) -> None:
        answers.write(json.dumps(answer) + "\n")

    try:
        runs, what, versions = make(json.loads(sys.stdin.readline()))
        say(ready=what, versions=versions)
        for line in sys.stdin:
            asked = json.loads(line)
            begin = time.perf_counter()
            tokens = runs[asked["mode"]](asked["ids"], asked["max_new_tokens"])
            seconds = time.perf_counter() - begin
            say(tokens=[int(token) for token in tokens], seconds=seconds)
    except Exception as error:  # the parent names the engine and goes on without it
        say(error=f"{type(error).__name__}: {error}")
        raise
