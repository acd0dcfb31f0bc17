"""A benchmark's result as a table, as JSON and as a plot."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..hints import install

COLUMNS = (
    "arm",
    "tokens/s",
    "spread",
    "speed-up",
    "decoding",
    "Thm 3.8",
    "with width",
    "block eff.",
    "accepted",
    "K",
    "c",
    "outside",
    "MB",
    "= plain",
)
NOTES = (
    "speed-up: of the whole call; decoding: without the prompt pass; Thm 3.8: prediction for decoding (Leviathan 2023); "
    "with width: with the measured cost of a wide target pass, too; K: drafted per round, mean; c: cost of drafting a token "
    "over a target step; outside: share of the decoding time outside the models' forwards; MB: peak; = plain: outputs equal "
    "to plain generate."
)


def print_report(report: dict[str, Any], console: Console) -> None:
    """Headline, one table per category, and what the columns mean."""
    console.print(headline(report), markup=False, soft_wrap=True)
    for table in tables(report):
        console.print(table)
    console.print(NOTES, style="dim")


def tables(report: dict[str, Any]) -> list[Table]:
    """One rich table per category."""
    result = []
    for category in dict.fromkeys(row["category"] for row in report["results"]):
        table = Table(title=escape(category), title_justify="left", header_style="bold", box=None, padding=(0, 1, 0, 0))
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
        for row in report["results"]:
            if row["category"] == category:
                table.add_row(*map(escape, cells(row)))
        result.append(table)
    return result


def cells(row: dict[str, Any]) -> list[str]:
    """The texts of one row, in the order of COLUMNS; a dash where nothing was measured."""
    memory = row["peak_memory"]
    near = sum(fork["near_tie"] for fork in row["forks"])
    forks = f" ({near} near-ties)" if row["forks"] else ""
    return [
        row["arm"],
        f"{row['tokens_per_second']:.1f}",
        f"{row['slowest']:.1f}-{row['fastest']:.1f}",
        f"{row['speed_up']:.2f}x",
        _text(row["decoding_speed_up"], "{:.2f}x"),
        _text(row.get("predicted"), "{:.2f}x"),
        _text(row.get("predicted_width"), "{:.2f}x"),
        _text(row.get("block_efficiency"), "{:.2f}"),
        _text(row.get("acceptance_rate"), "{:.0%}"),
        _text(row.get("mean_k"), "{:.1f}"),
        _text(row.get("c"), "{:.3f}"),
        _text(row["outside_forwards"], "{:.1%}"),
        _text(memory and memory / 1e6, "{:.0f}"),
        f"{row['equal']}/{row['outputs']}{forks}",
    ]


def _text(value: float | None, pattern: str) -> str:
    return "-" if value is None or not math.isfinite(value) else pattern.format(value)


def headline(report: dict[str, Any]) -> str:
    """One line: what ran, where, and how."""
    env, settings = report["environment"], report["settings"]
    text = (
        f"{env['model']} ({env['parameters'] / 1e6:.0f}M, {env['dtype']}, {env['device']}, threads: {env['threads']}), "
        f"batch {settings['batch']}, up to {settings['max_new_tokens']} new tokens, repetitions: {settings['repetitions']}, "
        f"{settings['clock']} clock, torch {env['torch']}, transformers {env['transformers']}"
    )
    return text + (f"; skipped at this batch size: {', '.join(settings['skipped'])}" if settings["skipped"] else "")


def save_json(report: dict[str, Any], path: str | Path) -> None:
    """Strict JSON: what is not finite becomes null. The file is whole or as it was; what is no file, /dev/stdout say, is written to."""
    text, path = json.dumps(finite(report), indent=1, allow_nan=False) + "\n", Path(path)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        (Path(folder) / path.name).write_text(text, encoding="utf-8")
        os.replace(Path(folder) / path.name, path)


def finite(value: Any) -> Any:
    """The same data with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_plot(report: dict[str, Any], path: str | Path) -> None:
    """Tokens per second by category and arm, with the spread over the repetitions."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"the plot needs matplotlib: {install('demo')}") from None

    rows = report["results"]
    categories, arms = (list(dict.fromkeys(row[key] for row in rows)) for key in ("category", "arm"))
    figure = Figure(figsize=(2 + 0.55 * len(categories) * len(arms), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes, width = figure.subplots(), 0.8 / len(arms)
    for number, arm in enumerate(arms):
        own = [row for row in rows if row["arm"] == arm]
        places = [categories.index(row["category"]) + (number - (len(arms) - 1) / 2) * width for row in own]
        middle = [row["tokens_per_second"] for row in own]
        spread = [[m - row["slowest"] for m, row in zip(middle, own)], [row["fastest"] - m for m, row in zip(middle, own)]]
        bars = axes.bar(places, middle, width * 0.95, yerr=spread, capsize=2, label=arm)
        axes.bar_label(bars, [f"{row['speed_up']:.2f}x" for row in own], fontsize=7, padding=2)
    axes.set_xticks(range(len(categories)), categories)
    axes.set_ylabel("tokens per second")
    axes.set_title(headline(report).split(",")[0] + ", " + f"batch {report['settings']['batch']}", fontsize=9)
    axes.legend(fontsize=8)
    axes.margins(y=0.15)
    figure.savefig(path, dpi=150)
