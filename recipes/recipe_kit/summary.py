"""From runs to figures: speed-ups, acceptance, memory, identity of outputs, and what theory says of them."""

from __future__ import annotations

from typing import Any

from hf_specdec.bench.runner import predicted
from hf_specdec.theory import speedup

from .recipe import ARTICLE_SPEED_UP, BASELINE, BOTH, GOAL, MX, PLAIN_OF, RUNS, Recipe


def summarise(recipe: Recipe, data: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each of the four runs."""
    return [_row(recipe, data, arm) for arm in RUNS]


def _row(recipe: Recipe, data: dict[str, Any], arm: str) -> dict[str, Any]:
    runs, base, costs = _runs(data, arm), _runs(data, BASELINE), data["costs"][PLAIN_OF.get(arm, arm)]
    speeds = [decoding(_of(runs, r)) for r in sorted({run["repetition"] for run in runs})]
    ratios = [_ratio(own, decoding(_of(base, r))) for r, own in enumerate(speeds)]
    row = {
        "run": arm,
        "tokens_per_second": _whole(runs),
        "decoding_tokens_per_second": decoding(runs),
        "speed_up": _ratio(decoding(runs), decoding(base)),
        "speed_up_by_repetition": ratios,
        "speed_up_whole_call": _ratio(_whole(runs), _whole(base)),
        "decoded_tokens": sum(len(run["tokens"]) - run["prompt_new_tokens"] for run in runs),
        "article": ARTICLE_SPEED_UP.get(arm) if recipe.in_article else None,
        "weight_bytes": costs["weight_bytes"] + (costs.get("draft_bytes", 0) if arm in PLAIN_OF else 0),
        "peak_memory": max((run["peak_memory"] for run in runs if run["peak_memory"]), default=None),
    }
    if arm not in PLAIN_OF:
        return row | {"predicted": data["costs"][BASELINE]["one"] / costs["one"]}
    return row | _speculation(data, arm, runs)


def _speculation(data: dict[str, Any], arm: str, runs: list[dict]) -> dict[str, Any]:
    """Acceptance, block efficiency, costs relative to one token of the same target, prediction, identical outputs."""
    rounds = [entry for run in runs for entry in run["rounds"]]
    proposed, accepted, committed = (sum(entry[i] for entry in rounds) for i in range(3))
    judged, mean_k = judged_in(rounds), proposed / len(rounds)
    alpha = accepted / judged if judged else 0.0
    c, wide, step = relative_costs(data, arm)
    plain = {(run["repetition"], run["prompt"]): run["tokens"] for run in _runs(data, PLAIN_OF[arm])}
    return {
        "acceptance_rate": accepted / proposed if proposed else None,
        "alpha": alpha if judged else None,
        "acceptance_is": data["acceptance"]["kind"],
        "block_efficiency": committed / len(rounds),
        "mean_k": mean_k,
        "c": c,
        "width_cost": wide,
        "predicted": step * interpolated(alpha, mean_k, c, wide, data["settings"]["k"]),
        "identical": sum(plain[run["repetition"], run["prompt"]] == run["tokens"] for run in runs),
        "outputs": len(runs),
    }


def judged_in(rounds: list[list[int]]) -> int:
    """Drafted tokens on which there was a verdict in rounds of [proposed, accepted, committed]; a text that ended in its draft has rejected nothing."""
    return sum(accepted + (accepted < min(proposed, committed)) for proposed, accepted, committed in rounds)


def drafting(runs: list[dict[str, Any]]) -> float:
    """Seconds that the runs spent on drafting a token; the first round is not in the seconds."""
    return sum(run["draft_seconds"] for run in runs) / max(sum(entry[0] for run in runs for entry in run["rounds"][1:]), 1)


def relative_costs(data: dict[str, Any], arm: str) -> tuple[float, float, float]:
    """(c, cost of a pass over K + 1 tokens, step of the baseline over this target's), the first two in this target's steps.

    c comes from single forwards of the draft model, or for prompt lookup from the time that the runs spent on drafting.
    """
    costs = data["costs"][PLAIN_OF[arm]]
    draft = drafting(_runs(data, arm)) if costs.get("draft") is None else costs["draft"]
    return draft / costs["one"], costs["wide"] / costs["one"], data["costs"][BASELINE]["one"] / costs["one"]


def interpolated(alpha: float, mean_k: float, c: float, wide: float, k: int) -> float:
    """`predicted` of passes of up to K + 1 tokens, the widest of which costs `wide`."""
    return predicted(alpha, mean_k, c, lambda width: 1 + (wide - 1) * (width - 1) / k)


def acceptance_for_goal(data: dict[str, Any], goal: float = GOAL) -> dict[str, Any]:
    """The alpha at which MXFP6 with speculation is `goal` times as fast as the baseline, by theory at measured costs."""
    k = data["settings"]["k"]
    c, wide, step = relative_costs(data, BOTH)

    def at(alpha: float) -> float:
        return step * speedup(alpha, k, c, lambda width: wide)

    found = {"goal": goal, "k": k, "c": c, "width_cost": wide, "mx_step": step, "at_most": at(1.0), "alpha": None}
    if at(1.0) < goal:
        return found
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle) >= goal else (middle, high)
    return found | {"alpha": high}


def goal_text(goal: dict[str, Any]) -> str:
    costs = (f"measured: a draft step {goal['c']:.3f} and a pass over {goal['k'] + 1} tokens {goal['width_cost']:.2f} of an {MX} step, "
             f"which is {goal['mx_step']:.2f}x as fast as one of the baseline")
    if goal["alpha"] is None:
        return f"By theory, {BOTH} cannot reach {goal['goal']:g}x here: {goal['at_most']:.2f}x if every token is accepted (K = {goal['k']}; {costs})."
    return f"By theory, {BOTH} reaches {goal['goal']:g}x at alpha = {goal['alpha']:.3f} (K = {goal['k']}; {costs})."


def _runs(data: dict[str, Any], arm: str) -> list[dict[str, Any]]:
    return [run for run in data["runs"] if run["run"] == arm]


def _of(runs: list[dict], repetition: int) -> list[dict]:
    return [run for run in runs if run["repetition"] == repetition]


def _whole(runs: list[dict]) -> float:
    return sum(len(run["tokens"]) for run in runs) / sum(run["seconds"] for run in runs)


def decoding(runs: list[dict]) -> float | None:
    """Tokens per second after the prompt pass, without the tokens it brought; None if it brought them all."""
    tokens = sum(len(run["tokens"]) - run["prompt_new_tokens"] for run in runs)
    return tokens / sum(run["seconds"] - run["prompt_seconds"] for run in runs) if tokens else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None
