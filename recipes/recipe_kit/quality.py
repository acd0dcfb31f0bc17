"""Whether the quality is unchanged: the outputs of every run against those of the baseline, and pass@1 where the prompts are tasks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hf_specdec.bench.quality import Problem, exact_match, load_problems, pass_at_1, rouge
from hf_specdec.bench.terminal import counting

from .recipe import BASELINE, RUNS, Recipe, RecipeError


def with_tasks(recipe: Recipe, path: Path) -> tuple[Recipe, dict[str, Problem]]:
    """The recipe with the tasks of a HumanEval file as its prompts, and the tasks by name. RecipeError if it is no such file."""
    try:
        tasks = {problem.task_id: problem for problem in load_problems(path)}
    except (OSError, ValueError) as error:
        raise RecipeError(f"--humaneval {path}: {error}") from error
    return dataclasses.replace(recipe, prompts={name: task.prompt for name, task in tasks.items()}), tasks


def against_baseline(data: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Per run: share of outputs equal to the baseline's, and ROUGE-L with its token ids as words (None without rouge_score)."""
    tokens = {arm: {(run["repetition"], run["prompt"]): run["tokens"] for run in data["runs"] if run["run"] == arm} for arm in RUNS}
    found = {}
    for arm in RUNS:
        ours, plain = zip(*((tokens[arm][key], tokens[BASELINE][key]) for key in tokens[BASELINE]))
        try:
            similar = rouge(ours, plain)["rougeL"]
        except ImportError:
            similar = None
        found[arm] = {"exact_match": exact_match(ours, plain), "rougeL": similar}
    return found


def pass_rates(data: dict[str, Any], tasks: dict[str, Problem], tokenizer, **limits) -> dict[str, float]:
    """pass@1 of every run's first repetition; the generated code is run in limited processes. RecipeError where these cannot be had."""
    rates = {}
    first = {(run["run"], run["prompt"]): run["tokens"] for run in data["runs"] if run["repetition"] == 0}
    names = [name for name in data["settings"]["prompts"] if name in tasks]
    try:
        with counting("pass@1", len(RUNS) * len(names)) as step:
            for arm in RUNS:
                texts = [tokenizer.decode(first[arm, name], skip_special_tokens=True) for name in names]
                rates[arm], _ = pass_at_1([tasks[name] for name in names], texts, step, **limits)
    except RuntimeError as error:
        raise RecipeError(f"--execute-code: {error}") from error
    return rates


def lines(data: dict[str, Any]) -> list[str]:
    """For the report."""
    texts = []
    for arm, found in data["quality"].items():
        if arm != BASELINE:
            similar = "not computed (pip install '.[quality]' in the checkout)" if found["rougeL"] is None else f"{found['rougeL']:.3f}"
            texts.append(f"{arm} {found['exact_match']:.0%} equal, ROUGE-L {similar}")
    result = [f"against the baseline's outputs: {'; '.join(texts)}."]
    if data.get("pass_at_1"):
        result.append("pass@1: " + ", ".join(f"{arm} {rate:.1%}" for arm, rate in data["pass_at_1"].items()))
    return result
