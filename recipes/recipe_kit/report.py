"""A recipe's result as a table and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_specdec.hints import many

from . import quality
from .recipe import ARTICLE, BASELINE, LOOKUP
from .store import PLOT
from .summary import goal_text

FEW = 32  # decoded tokens below which a measured speed-up is mostly chance


def print_report(data: dict[str, Any], console: Console) -> None:
    print_with_notes(data, f"K = {data['settings']['k']}, batch 1, greedy", table(data), notes(data), console)
    console.print(goal_text(data["goal"]), highlight=False, markup=False)


def print_with_notes(data: dict[str, Any], how: str, table: Table, notes: list[str], console: Console) -> None:
    """Title, what was run (`how`, and what every run has) and where, the table, what there is to say of it."""
    settings, environment = data["settings"], data["environment"]
    console.print(data["title"], style="bold", highlight=False, markup=False)
    console.print(
        f"{data['label']}; {how}, up to {many(settings['new_tokens'], 'new token')}, {many(len(settings['prompts']), 'prompt')}, repetitions: "
        f"{settings['repetitions']}, {settings['dtype']}, {environment['device']}, threads: {environment['threads']}, "
        f"torch {environment['torch']}, transformers {environment['transformers']}", soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    for line in notes:
        console.print(line, style="dim", highlight=False, markup=False)


def table(data: dict[str, Any]) -> Table:
    simulated = data["acceptance"]["kind"] == "SIMULATED"
    result = Table(title=data["label"] if simulated else None, header_style="bold", box=None, padding=(0, 1, 0, 0))
    names = ["run", "tokens/s", "speed-up", "theory", "whole call", "accepted", "alpha", "block eff.", "weights GB", "= plain"]
    if any(row["article"] for row in data["summary"]):
        names.insert(4, "article")
    for name in names:
        result.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
    for row in data["summary"]:
        texts = cells(row, simulated) | {"run": title_of(row, data)}
        result.add_row(*(texts[name] for name in names))
    return result


def title_of(row: dict[str, Any], data: dict[str, Any]) -> str:
    return row["run"] + (f" ({data['settings']['dtype']})" if row["run"] == BASELINE else "")


def cells(row: dict[str, Any], simulated: bool) -> dict[str, str]:
    mark = " SIMULATED" if simulated and "alpha" in row else ""
    return {
        "tokens/s": text_of(row["decoding_tokens_per_second"], "{:.2f}"),
        "speed-up": text_of(row["speed_up"], "{:.2f}x") + (mark and "*"),
        "theory": text_of(row["predicted"], "{:.2f}x") + (mark and "*"),
        "article": text_of(row["article"], "about {:g}x"),
        "whole call": text_of(row["speed_up_whole_call"], "{:.2f}x") + (mark and "*"),
        "accepted": text_of(row.get("acceptance_rate"), "{:.0%}") + mark,
        "alpha": text_of(row.get("alpha"), "{:.2f}") + (mark and "*"),
        "block eff.": text_of(row.get("block_efficiency"), "{:.2f}") + (mark and "*"),
        "weights GB": f"{row['weight_bytes'] / 1e9:.3g}",
        "= plain": f"{row['identical']}/{row['outputs']}" if "outputs" in row else "-",
    }


def notes(data: dict[str, Any]) -> list[str]:
    lines = [
        "tokens/s and speed-up: decoding, without the prompt pass; whole call: with it. theory: from single forwards timed here and "
        "the acceptance of the runs (Leviathan et al. 2023, Theorem 3.8, with the cost of a wide pass). alpha: accepted / judged. = plain: "
        "outputs equal to the run of the same weights without speculation.",
    ]
    if data["acceptance"]["kind"] == "SIMULATED":
        how = "the draft model runs, and its tokens are replaced by right ones with probability"
        if data["settings"]["draft"] == LOOKUP:
            how = "in the place of lookup, K tokens a round come from nowhere, free of cost, each right with probability"
        lines.append(f"* SIMULATED acceptance: the weights are random, {how} {data['acceptance']['rate']:g}. Costs are real, text and acceptance are not.")
    if any(row["article"] for row in data["summary"]):
        lines.append(f"article: {ARTICLE}; other hardware, trained weights.")
    few = min(row["decoded_tokens"] for row in data["summary"])
    if few < FEW:
        lines.append(f"Only {few} tokens were decoded after the prompt pass in one of the runs: take more --new-tokens before reading speed-ups.")
    lines += quality.lines(data)
    for fork in data["forks"]:
        why = {True: "a near-tie: rounding explains it", False: "NOT explained by rounding", None: "not judged, for want of memory"}
        lines.append(f"{fork['run']}, {fork['prompt']}: parts from plain at token {fork['position'] + 1}: {why[fork['near_tie']]}")
    return lines


def text_of(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def save_plot(data: dict[str, Any], path: Path) -> None:
    """Measured speed-up, theory and the article's figure of every run."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the plot needs matplotlib: pip install '.[demo]' in the checkout, or pass --no-plot") from None

    rows = data["summary"]
    series = {"measured": "speed_up", "theory": "predicted", "article": "article"}
    series = {name: key for name, key in series.items() if any(row[key] for row in rows)}
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes, width = figure.subplots(), 0.8 / len(series)
    for number, (name, key) in enumerate(series.items()):
        known = [(i + (number - (len(series) - 1) / 2) * width, row[key]) for i, row in enumerate(rows) if row[key]]
        bars = axes.bar(*zip(*known), width * 0.95, label=f"{name} (Cloud AI 100)" if name == "article" else name)
        axes.bar_label(bars, [f"{value:.2f}x" if name != "article" else f"~{value:g}x" for _, value in known], fontsize=7, padding=2)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [title_of(row, data) for row in rows])
    axes.set_ylabel("decoding speed over the baseline")
    axes.set_title(f"{data['title']}\n{data['label']}", fontsize=9)
    axes.legend(fontsize=8)
    axes.margins(y=0.15)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata=PLOT)
