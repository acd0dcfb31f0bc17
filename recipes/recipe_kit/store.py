"""The JSON of a recipe: written whole after every run, so that a recipe that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_specdec.bench.report import finite

from .recipe import RecipeError

PLOT = {"Source": "a recipe of hf_specdec"}  # in every plot, by which it is known again


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A neighbour to write, which takes the place of `path` once it is whole, or is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class Store:
    """data: settings, environment, costs, runs, forks, summary. `save` replaces the file at once or not at all."""

    def __init__(self, path: Path, head: dict[str, Any], restart: bool = False):
        self.path = path
        self.data: dict[str, Any] = head | {"costs": {}, "runs": [], "forks": []}
        for taken in (path, path.with_suffix(".png")):
            if taken.is_dir():
                raise RecipeError(f"{taken} is a folder, and a file of this recipe goes there: move it away, or pass another --out.")
        plot = path.with_suffix(".png")
        if plot.exists() and not path.exists() and PLOT["Source"].encode() not in plot.read_bytes()[:4096]:
            raise RecipeError(f"{plot} was not written by a recipe, and the plot goes there: move it away, or pass another --out.")
        old = self._read() if path.exists() else None
        if old and not restart:
            self._resume(old)

    def _read(self) -> dict[str, Any]:
        """What a recipe wrote; RecipeError for any other file, which --restart must not delete either."""
        try:
            old = json.loads(self.path.read_text(encoding="utf-8"))
            whole = all(isinstance(old[part], dict) for part in ("settings", "environment", "costs"))
            whole = whole and all(isinstance(old[part], list) for part in ("runs", "forks"))
            whole = whole and all(isinstance(one, dict) for part in ("runs", "forks") for one in old[part])
            if not whole or not all({"repetition", "prompt", "run"} <= run.keys() for run in old["runs"]):
                raise ValueError("parts of another kind")
            return old
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RecipeError(f"{self.path} was not written by a recipe, or cannot be read: move it away, or pass another --out.") from error

    def _resume(self, old: dict[str, Any]) -> None:
        for part in ("settings", "environment"):
            before, now = old[part], self.data[part]
            for key in [*now, *(key for key in before if key not in now)]:
                if before.get(key) != now.get(key):
                    raise RecipeError(
                        f"{self.path} holds runs with {key} = {before.get(key)!r}, this call has {now.get(key)!r} ({part}): runs of "
                        f"different settings do not go together. Use the same settings, another --out, or --restart to begin anew."
                    )
        self.data |= {part: old[part] for part in ("costs", "runs", "forks", "notes") if part in old}

    def find(self, repetition: int, prompt: str, arm: str) -> dict[str, Any] | None:
        return next((run for run in self.data["runs"] if (run["repetition"], run["prompt"], run["run"]) == (repetition, prompt, arm)), None)

    def add(self, run: dict[str, Any]) -> None:
        self.data["runs"].append(run)
        self.save()

    def save(self) -> None:
        """Strict JSON, one run a line; what is not finite becomes null."""
        data = finite(self.data)
        runs = ",\n  ".join(json.dumps(run, allow_nan=False) for run in data.pop("runs"))
        parts = [f"{json.dumps(key)}: {json.dumps(value, indent=1, allow_nan=False)}" for key, value in data.items()]
        text = "{\n" + ",\n".join([*parts, f'"runs": [\n  {runs}\n]']) + "\n}\n"
        with replacing(self.path) as partial:
            partial.write_text(text, encoding="utf-8")
