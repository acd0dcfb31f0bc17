"""The command line of every recipe."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hf_specdec import mx
from hf_specdec.bench.embedded import EMBEDDED
from hf_specdec.bench.terminal import counting
from hf_specdec.mx.formats import ACTIVATIONS

from . import quality
from .inputs import check_counts, check_folder, check_map, contents
from .machine import environment, use_machine
from .models import read
from .recipe import LOOKUP, RUNS, Recipe, RecipeError
from .report import print_report, save_plot
from .running import Runner
from .store import Store
from .summary import acceptance_for_goal, summarise

TINY_TOKENS = 32


def main(recipe: Recipe, argv: list[str] | None = None) -> int:
    """Run a recipe; the exit status. What the user can mend is one line on the standard error stream."""
    try:
        options = parse(recipe, argv)
        return _run(recipe, options)
    except (RecipeError, ImportError, OSError) as error:
        print(f"{recipe.name}: {error}", file=sys.stderr)
        return 2


def _run(recipe: Recipe, options: argparse.Namespace) -> int:
    tasks = {}
    if options.humaneval:
        recipe, tasks = quality.with_tasks(recipe, options.humaneval)
    names = list(recipe.texts())[: options.prompts]
    path = options.out / f"{recipe.name}_{options.scale}.json"
    store = Store(path, _head(recipe, options, names), options.restart)
    runner = Runner(recipe, options, names, store, lambda note: None)
    left = len(runner.missing())
    total = options.repetitions * len(names) * len(RUNS)
    if left < total:
        print(f"{path}: {total - left} of {total} runs are there already", file=sys.stderr)
    try:
        if left:
            with counting(recipe.name, left) as runner.step:
                runner.run()
        else:
            runner.run()
    except KeyboardInterrupt:
        done = total - len(runner.missing())
        print(f"stopped; {done} of {total} runs are kept in {path}, and the same command goes on from there", file=sys.stderr)
        return 130
    data = store.data
    data["summary"], data["goal"] = summarise(recipe, data), acceptance_for_goal(data)
    data["quality"] = quality.against_baseline(data)
    if options.execute_code:
        data["pass_at_1"] = quality.pass_rates(data, tasks, read(recipe, options.target, "tokenizer"))
    store.save()
    print_report(data, Console(width=None if sys.stdout.isatty() else 140))
    print(f"written: {path}")
    if options.plot:
        save_plot(data, path.with_suffix(".png"))
        print(f"written: {path.with_suffix('.png')}")
    return 0


def parse(recipe: Recipe, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=recipe.name, description=recipe.title)
    add = parser.add_argument
    small = recipe.target == EMBEDDED
    add("--scale", choices=recipe.scales, default="full" if small else None, required=not small,
        help="full: real weights; shape: the full architecture with random weights and SIMULATED acceptance; tiny: a toy, for tests")
    add("--target", default=recipe.target, help="full: hub id or folder of the target")
    add("--draft", help="full: hub id or folder of the draft model")
    add("--acceptance", type=float, help="shape, tiny: the rate that is SIMULATED (default 0.8)")
    add("--k", type=int, default=7, help="tokens drafted per round (default 7)")
    add("--new-tokens", type=int, help=f"most new tokens a prompt (default {recipe.new_tokens}; shape of 7B on a CPU: 8; tiny: {TINY_TOKENS})")
    add("--prompts", type=int, help="only the first N prompts")
    add("--repetitions", type=int, help="default: full 3, else 1")
    add("--layers", type=int, help="shape: a TRIAL with the first N layers of the target only")
    add("--phases", action="store_true", help="16-bit runs first, then compress in place: less memory, not interleaved")
    add("--activations", choices=(ACTIVATIONS,), help="MXFP6 runs: what the weights are multiplied by is rounded to MXINT8, too")
    add("--device", help="default: the GPU if there is one")
    add("--device-map", help="full, on GPUs: passed to from_pretrained (default: all on --device)")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default bfloat16; tiny: float32")
    add("--threads", type=int)
    add("--humaneval", type=Path, help="full, CodeGen: a JSONL file of HumanEval, whose tasks take the place of the prompts")
    add("--execute-code", action="store_true", help="full: RUN what was generated for --humaneval, in limited processes, and print pass@1")
    add("--out", type=Path, default=Path("recipes/out"), help="folder of the JSON and the plot")
    add("--restart", action="store_true", help="do away with the runs in the JSON")
    add("--no-plot", dest="plot", action="store_false")
    return _complete(recipe, parser.parse_args(argv))


def _complete(recipe: Recipe, options: argparse.Namespace) -> argparse.Namespace:
    """Defaults that depend on the scale, and what does not go together."""
    full, tiny = options.scale == "full", options.scale == "tiny"
    lookup = ("draft", "acceptance") if tiny else ("draft",)  # what prompt lookup has no use for; in a toy its acceptance is its own
    for name in ("draft", "device_map", "acceptance", "layers"):
        given, wanted = getattr(options, name) is not None, full if name in ("draft", "device_map") else not full
        if given and (not wanted or (recipe.lookup and name in lookup) or (name == "layers" and tiny)):
            raise RecipeError(f"--{name.replace('_', '-')} has no meaning at --scale {options.scale} in this recipe.")
    if options.humaneval and not (full and recipe.code):
        raise RecipeError(f"--humaneval has no meaning at --scale {options.scale} in this recipe: it needs real weights of a code model.")
    if options.execute_code and not options.humaneval:
        raise RecipeError("--execute-code needs the tasks that the code is for: --humaneval FILE.")
    check_counts(options, "k", "new_tokens", "prompts", "repetitions", "layers", "threads")
    check_folder("out", options.out)
    if options.acceptance is not None and not 0 <= options.acceptance <= 1:
        raise RecipeError(f"--acceptance {options.acceptance}: must be a rate in 0..1.")
    use_machine(options)
    check_map(options)
    options.draft = (options.draft or recipe.draft) if full else None
    if not full and options.acceptance is None and not (recipe.lookup and tiny):
        options.acceptance = 0.8
    slow = options.scale == "shape" and options.device.type == "cpu" and recipe.target != EMBEDDED
    options.new_tokens = options.new_tokens or (TINY_TOKENS if tiny else 8 if slow else recipe.new_tokens)
    options.repetitions = options.repetitions or (3 if full else 1)
    options.cost_repetitions = 3 if slow else 7
    options.dtype = getattr(torch, options.dtype or ("float32" if tiny else "bfloat16"))
    return options


def _head(recipe: Recipe, options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """What the JSON says of the runs in it; runs are only added to a file whose settings and environment are these."""
    full = options.scale == "full"
    kind = "SIMULATED" if options.acceptance is not None else "measured"
    label = {"full": "real weights", "shape": "full shape, random weights", "tiny": "tiny random models"}[options.scale]
    if options.layers:
        layers = recipe.configs[options.scale]()[0].num_hidden_layers
        label = f"TRIAL: the target with its first {options.layers} of {layers} layers, random weights: not its cost"
    label += f", acceptance SIMULATED at {options.acceptance:g}" if kind == "SIMULATED" else ""
    label += f", MXFP6 with activations in {options.activations}" if options.activations else ""
    draft = LOOKUP if recipe.lookup else options.draft if full else recipe.draft or "115M drafter"
    target = options.target if full else f"{recipe.target} (shape)" if options.scale == "shape" else "tiny"
    settings = {
        "recipe": recipe.name, "scale": options.scale, "target": target, "draft": draft, "k": options.k,
        "acceptance": options.acceptance, "new_tokens": options.new_tokens, "prompts": names, "repetitions": options.repetitions,
        "layers": options.layers, "phases": options.phases, "dtype": str(options.dtype).removeprefix("torch."),
    } | ({"humaneval": str(options.humaneval)} if options.humaneval else {})  # fmt: skip
    settings |= {"activations": options.activations} if options.activations else {}
    settings |= contents(target=options.target, draft=options.draft, humaneval=options.humaneval) if full else {}
    title = recipe.title + ("" if options.target in (recipe.target, EMBEDDED) else f" ({options.target})")
    return {"title": title, "label": label, "acceptance": {"kind": kind, "rate": options.acceptance}, "settings": settings,
            "environment": environment(options.device) | {"mx": mx.kernel_info()["path"]}}  # fmt: skip
