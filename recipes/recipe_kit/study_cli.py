"""The command line of a `Study`, and its report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hf_specdec.bench.terminal import counting

from .inputs import check_counts, check_folder
from .machine import environment, use_machine
from .recipe import RecipeError
from .report import print_with_notes, text_of
from .store import PLOT, Store
from .study import Study, StudyRunner, summarise

PAPERS = {"K": ("paper_k", "{}"), "c": ("paper_c", "{:.2f}"), "speed-up": ("paper_speed_up", "{:.1f}x")}


def main(study: Study, argv: list[str] | None = None) -> int:
    """Run a study; the exit status. What the user can mend is one line on the standard error stream."""
    try:
        return _run(study, parse(study, argv))
    except (RecipeError, ImportError, OSError) as error:
        print(f"{study.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was done is kept, and the same command goes on from there", file=sys.stderr)
        return 130


def _run(study: Study, options: argparse.Namespace) -> int:
    names = study.names(options)[: options.prompts]
    path = options.out / f"{study.name}{study.variant(options)}_{options.scale}.json"
    store = Store(path, _head(study, options, names), options.restart)
    runner = StudyRunner(study, options, names, store, lambda note: None)
    left = len(runner.missing())
    if left:
        with counting(study.name, left) as runner.step:
            runner.run()
    else:
        runner.run()
    store.data["summary"] = summarise(runner.rows, store.data)
    store.save()
    print_report(store.data, Console(width=None if sys.stdout.isatty() else 140))
    print(f"written: {path}")
    if options.plot:
        save_plot(store.data, path.with_suffix(".png"))
        print(f"written: {path.with_suffix('.png')}")
    return 0


def parse(study: Study, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=study.name, description=study.title)
    add = parser.add_argument
    add("--scale", required=True, metavar=f"{{{','.join(study.scales)}}}", help="; ".join(f"{scale}: {text}" for scale, text in study.label.items()))
    add("--k", type=int, default=study.k, help=f"tokens drafted per round{study.k_of} (default {study.k or 'as in the paper, row by row'})")
    add("--new-tokens", type=int, help=f"most new tokens a prompt (default {', '.join(f'{scale} {most}' for scale, most in study.new_tokens.items())})")
    add("--prompts", type=int, help="only the first N prompts")
    add("--repetitions", type=int, default=1)
    add("--device", help="default: the GPU if there is one")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help=f"default float32{''.join(f', {scale} {name}' for scale, name in study.dtypes.items())}")
    add("--threads", type=int)
    add("--out", type=Path, default=Path("recipes/out"), help="folder of the JSON and the plot")
    add("--restart", action="store_true", help="do away with the runs in the JSON")
    add("--no-plot", dest="plot", action="store_false")
    study.arguments(parser)
    options = parser.parse_args(argv)
    if options.scale not in study.scales:
        why = study.no_shape if options.scale == "shape" else ""
        raise RecipeError(f"--scale {options.scale}: {why}choose one of {', '.join(study.scales)}.")
    check_counts(options, "k", "new_tokens", "prompts", "repetitions", "threads")
    check_folder("out", options.out)
    use_machine(options)
    options.dtype = getattr(torch, options.dtype or study.dtypes.get(options.scale, "float32"))
    options.new_tokens = options.new_tokens or study.new_tokens[options.scale]
    options.cost_repetitions = 31
    study.check(options)
    return options


def _head(study: Study, options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    simulated = options.scale == "shape"
    settings = {
        "recipe": study.name, "scale": options.scale, "k": options.k, "new_tokens": options.new_tokens, "prompts": names,
        "repetitions": options.repetitions, "dtype": str(options.dtype).removeprefix("torch."), **study.settings(options),
    }  # fmt: skip
    return {"title": study.title, "label": study.label[options.scale], "acceptance": {"kind": "SIMULATED" if simulated else "measured"},
            "paper": study.paper, "remarks": list(study.remarks), "notes": [], "settings": settings, "environment": environment(options.device)}  # fmt: skip


# --- the report ---------------------------------------------------------------------------------------------------------


def print_report(data: dict[str, Any], console: Console) -> None:
    print_with_notes(data, "batch 1", table(data), notes(data), console)


def table(data: dict[str, Any]) -> Table:
    simulated = data["acceptance"]["kind"] == "SIMULATED"
    mark = " SIMULATED" if simulated else ""
    result = Table(header_style="bold", box=None, padding=(0, 1, 0, 0))
    rows, star = data["summary"], "*" if simulated else ""
    columns = {
        "draft": [row["draft"] for row in rows], "T": [str(row["temperature"]) for row in rows], "l": [f"{row['lenience']:g}" for row in rows],
        "K": [str(row["k"]) for row in rows], "paper's alpha": [text_of(row["paper_alpha"], "{:.2f}") for row in rows],
        "alpha": [text_of(row["alpha"], "{:.2f}") + mark for row in rows], "judged": [str(row["judged"]) for row in rows],
        "block eff.": [f"{row['block_efficiency']:.2f}" for row in rows], "Eq. 1": [f"{row['expected']:.2f}" for row in rows],
        "c": [f"{row['c']:.3f}" for row in rows], "speed-up": [text_of(row["speed_up"], "{:.2f}x") + star for row in rows],
        "theory": [text_of(row["predicted"], "{:.2f}x") + star for row in rows], "output": [_output(row) for row in rows],
    }  # fmt: skip
    if any(row.get("paper_speed_up") for row in rows):  # what the paper measured, in the place of a lenience that is 1 throughout
        del columns["l"]
        columns = _beside(columns, rows)
    for name in columns:
        result.add_column(name, justify="left" if name in ("draft", "output") else "right", no_wrap=True)
    for values in zip(*columns.values()):
        result.add_row(*values)
    return result


def _beside(columns: dict[str, list[str]], rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The columns with the paper's gamma, c and speed-up each beside ours."""
    found: dict[str, list[str]] = {}
    for name, values in columns.items():
        if name in PAPERS:
            key, pattern = PAPERS[name]
            found[f"paper's {name}"] = [text_of(row[key], pattern) for row in rows]
        found[name] = values
    return found


def _output(row: dict[str, Any]) -> str:
    equal = "" if row["equal_to_plain"] is None else f"{row['equal_to_plain']}/{row['outputs']} = plain"
    if not row["lossless"]:
        return ", ".join(["LOSSY", equal] if equal else ["LOSSY"])
    return equal or "the target's law"


def notes(data: dict[str, Any]) -> list[str]:
    lines = [
        f"paper's alpha: {data['paper']}; other weights and data. alpha: accepted / judged. block eff.: tokens per target forward; Eq. 1: what "
        "the paper's equation says of it from alpha and K. c: a draft step over a target step. speed-up: decoding, over plain decoding at the same "
        "temperature; theory: Theorem 3.8 with the cost of a wide pass, from single forwards timed here."
    ]
    if data["acceptance"]["kind"] == "SIMULATED":
        lines.append("* SIMULATED acceptance: the weights are random, the draft model runs, and what is proposed is replaced by right tokens at a "
                     "stated rate. Costs are real, text and acceptance are not.")
    return lines + data["remarks"] + data["notes"]


def save_plot(data: dict[str, Any], path: Path) -> None:
    """Alpha beside the paper's, and the speed-up beside theory."""
    from hf_specdec.viz.canvas import PALETTE, label, new_figure

    rows = data["summary"]
    figure = new_figure(max(7.0, 0.55 * len(rows)), 6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, series in ((upper, {"alpha": "alpha", "paper's alpha": "paper_alpha"}), (lower, {"measured": "speed_up", "theory": "predicted"})):
        for number, (name, key) in enumerate(series.items()):
            known = [(i + 0.4 * number - 0.2, row[key]) for i, row in enumerate(rows) if row[key] is not None]
            if known:
                axes.bar(*zip(*known), 0.38, label=name, color=PALETTE[number])
    lower.axhline(1, color="grey", linewidth=0.8)
    names = [f"{row['draft']}\nT={row['temperature']}, l={row['lenience']:g}" for row in rows]
    lower.set_xticks(range(len(rows)), names, fontsize=7, rotation=30 if len(rows) > 6 else 0)
    label(upper, "", "alpha", f"{data['title']}\n{data['label']}")
    label(lower, "", "decoding speed over plain")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata=PLOT)
