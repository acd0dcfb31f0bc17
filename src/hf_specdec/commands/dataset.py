"""`hf-specdec generate --dataset`: answers to every row of a data set, in batches, by one process or several, resumable.

Row i always has the random stream `row_seed(seed, i)` and always sits in batch i // N, which belongs to process (i // N) modulo
the number of processes: what a row's line says depends neither on who writes it nor on what was interrupted before.
"""

from __future__ import annotations

from pathlib import Path

import typer

from .common import check_folder
from .rows import fingerprint, read_rows
from .shards import Place, Shards
from .speculation import Work
from .writer import Writer, say


def generate_dataset(
    work: Work, source: str, output: Path, column: str | None, limit: int | None, batch: int, skip_invalid: bool
) -> None:
    """Write a line for every row that has none yet. What can be wrong is looked for before any work is done."""
    work = work.of_rows()
    work.check()
    place = Place.from_environment()
    check_folder(output, "--output")
    try:
        rows, column = read_rows(source, column, limit)
        data = {"column": column, "rows": len(rows), "sha256": fingerprint(rows)}
        job = {"settings": work.settings(), "data": data, "dataset": source, "made_by": _versions()}
        Shards(output, job, place, batch).refuse_other()
        writer = Writer(work, place)
        job["settings"] |= writer.settings(batch)
        writer.check(rows, source, skip_invalid)
        with Shards(output, job, place, batch) as shards:
            writer.write(rows, shards, batch)
            done, summary = shards.count(), writer.summary()
            if summary:
                say(summary, place)
            say(f"{output}: {done} of {len(rows)} rows are done" + (", complete." if done == len(rows) else "."), place)
    except KeyboardInterrupt:
        say(f"Interrupted. The same command goes on where {output} ends.")
        raise typer.Exit(130) from None


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    from .. import __version__

    return {"hf_specdec": __version__, **{name: version(name) for name in ("torch", "transformers")}}


def check_options(dataset: str | None, output: Path | None, alone: dict, together: dict) -> None:
    """ValueError for options that do not go together. alone, together: options of one prompt and of a data set; false if absent."""
    if dataset is None:
        name = next((name for name, value in {"--output": output, **together}.items() if value), None)
        if name is not None:
            raise ValueError(f"{name} has no meaning without --dataset.")
    elif output is None:
        raise ValueError("--dataset needs --output FOLDER, where the answers go.")
    elif name := next((name for name, value in alone.items() if value), None):
        raise ValueError(f"{name} and --dataset: give one of them.")
