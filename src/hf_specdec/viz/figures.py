"""The figures of Leviathan et al. 2023 (arXiv 2211.17192) from `hf_specdec.theory`, and beside them what was measured.

Every function returns a matplotlib figure; alpha is the acceptance rate, K the number of drafted tokens (the paper's gamma), c the
time of a draft step over that of a target step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .. import theory
from .canvas import PALETTE, label, new_figure
from .pieces import trace_of

ALPHA = "acceptance rate $\\alpha$"


def _grid(high: float = 1.0, points: int = 201) -> list[float]:
    return [high * i / (points - 1) for i in range(points)]


def expected_tokens(ks: Sequence[int] = (1, 3, 5, 7, 10)):
    """Figure 2: tokens per target pass against alpha, a curve per K (Equation 1)."""
    _some("ks", ks)
    figure = new_figure()
    axes, alphas = figure.subplots(), _grid()
    for number, k in enumerate(ks):
        axes.plot(alphas, [theory.expected_tokens(a, k) for a in alphas], label=f"K = {k}", color=PALETTE[number % len(PALETTE)])
    label(axes, ALPHA, "expected tokens per target pass", "Tokens that one round commits")
    return figure


def optimal_k(cs: Sequence[float] = (0.01, 0.02, 0.05, 0.1, 0.2), highest: float = 0.95):
    """Figure 3: the best K against alpha up to `highest`, a curve per c."""
    _some("cs", cs)
    figure = new_figure()
    axes, alphas = figure.subplots(), _grid(highest, 96)
    for number, c in enumerate(cs):
        values = [theory.optimal_k(a, c) for a in alphas]
        axes.step(alphas, values, where="post", label=f"c = {c:g}", color=PALETTE[number % len(PALETTE)])
    label(axes, ALPHA, "best K", "K with the highest speed-up; 0: decode plainly")
    return figure


def speedup_and_operations(
    ks: Sequence[int] = (1, 3, 5, 7, 10),
    c: float = 0.05,
    c_hat: float = 0.05,
    against: str = "alpha",
    alphas: Sequence[float] = (0.5, 0.6, 0.7, 0.8, 0.9),
):
    """Figure 4: speed-up (Theorem 3.8) and factor of arithmetic operations (Theorem 3.11), against alpha with a curve per K, or
    `against="k"` with a curve per alpha."""
    if against not in ("alpha", "k"):
        raise ValueError(f'against={against!r} must be "alpha" or "k".')
    _some("ks", ks), _some("alphas", alphas)
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    places = _grid() if against == "alpha" else list(range(max(ks) + 1))
    for number, curve in enumerate(ks if against == "alpha" else alphas):
        style = {"label": f"K = {curve}" if against == "alpha" else f"$\\alpha$ = {curve:g}", "color": PALETTE[number % len(PALETTE)]}
        pairs = [(place, curve) if against == "alpha" else (curve, place) for place in places]
        left.plot(places, [theory.walltime_improvement(a, k, c) for a, k in pairs], **style)
        right.plot(places, [theory.operations_factor(a, k, c_hat) for a, k in pairs], **style)
    for axes in (left, right):
        axes.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    x = ALPHA if against == "alpha" else "K, tokens drafted per round"
    label(left, x, "tokens per second, plain = 1", f"Speed-up, c = {c:g}")
    label(right, x, "operations per token, plain = 1", f"Arithmetic operations, $\\hat c$ = {c_hat:g}")
    return figure


def position_rates(runs: Any) -> list[tuple[int, int]]:
    """(judged, accepted) of the 1st, 2nd, ... drafted token of a round, over all rows and rounds of an output, a trace or several.

    A token is judged if those before it in the round were accepted; what was cut off at the end of a row is not. Meant for
    chains: a tree's nodes have no single order.
    """
    several = isinstance(runs, (list, tuple))
    entries = [entry for run in (runs if several else [runs]) for entries in trace_of(run).rounds for entry in entries]
    rates = []
    for place in range(1, max((entry.proposed for entry in entries), default=0) + 1):
        accepted = sum(entry.accepted >= place for entry in entries)
        refused = sum(entry.accepted == place - 1 and bool(entry.rejected) and entry.committed >= place for entry in entries)
        rates.append((accepted + refused, accepted))
    while rates and rates[-1][0] == 0:
        rates.pop()
    return rates


def acceptance_by_position(runs: Any):
    """How often the 1st, 2nd, ... drafted token of a round was accepted, given that those before it were; with the number judged.

    runs: an output, a trace, a list of them, or a dict {label: one of these}. The dashed line is alpha over all positions, which
    the theory takes to be the same everywhere.
    """
    groups = dict(runs) if type(runs) is dict else {"": runs}
    figure = new_figure()
    axes, drawn = figure.subplots(), False
    for number, (name, own) in enumerate(groups.items()):
        rates, colour = position_rates(own), PALETTE[number % len(PALETTE)]
        if not rates:
            continue
        drawn, places = True, range(1, len(rates) + 1)
        axes.plot(places, [accepted / judged for judged, accepted in rates], "o-", color=colour, label=name or "measured")
        for place, (judged, accepted) in zip(places, rates):
            axes.annotate(f"n={judged}", (place, accepted / judged), (0, 6), textcoords="offset points", ha="center", fontsize=7)
        alpha = sum(accepted for _, accepted in rates) / sum(judged for judged, _ in rates)
        axes.axhline(alpha, color=colour, linewidth=0.8, linestyle="--", label=f"$\\alpha$ = {alpha:.2f} {name}".rstrip())
    if not drawn:
        raise ValueError("runs: no drafted token was judged, so there is no acceptance to show.")
    axes.set_ylim(-0.03, 1.12)
    axes.xaxis.get_major_locator().set_params(integer=True)
    label(axes, "position in the round", "accepted, of those judged", "Acceptance by position")
    return figure


def predicted_and_measured(rows: Iterable[dict[str, Any]] | dict[str, Any]):
    """Predicted against measured speed-up; on the diagonal the prediction is right.

    rows: a report of the benchmark (`run_benchmark`, bench.json), its "results", or dicts with "label", "predicted" and "measured",
    and "predicted_width" if the cost of a wide target pass was measured, too. Rows without a prediction are left out.
    """
    rows = rows.get("results", ()) if isinstance(rows, dict) else rows
    rows = list(rows) if isinstance(rows, Iterable) else [rows]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("rows: give a report of the benchmark, its results, or dicts with label, predicted and measured.")
    points = []
    for row in rows:
        name = row.get("label") or " ".join(str(row[key]) for key in ("arm", "category") if key in row)
        measured = row.get("measured", row.get("decoding_speed_up"))
        if measured is not None and row.get("predicted") is not None:
            points.append((name, measured, row["predicted"], row.get("predicted_width")))
    if not points:
        raise ValueError("rows: no row has both a predicted and a measured speed-up.")
    figure = new_figure(6, 5)
    axes = figure.subplots()
    values = [value for _, *numbers in points for value in numbers if value is not None]
    low, high = min(0.9, *values) * 0.95, max(1.1, *values) * 1.05
    axes.plot([low, high], [low, high], color="gray", linewidth=0.8, linestyle=":")
    axes.plot([p[2] for p in points], [p[1] for p in points], "o", color=PALETTE[0], label="Theorem 3.8")
    wide = [point for point in points if point[3] is not None]
    if wide:
        axes.plot([p[3] for p in wide], [p[1] for p in wide], "s", color=PALETTE[1], label="with the measured cost of a wide pass")
    for name, measured, predicted, _ in points:
        axes.annotate(name, (predicted, measured), (6, -3), textcoords="offset points", fontsize=7, parse_math=False)
    axes.set_xlim(low, high), axes.set_ylim(low, high)
    label(axes, "predicted speed-up", "measured speed-up", "Prediction and measurement")
    return figure


def _some(name: str, values: Sequence) -> None:
    if not hasattr(values, "__len__") or not len(values):
        raise ValueError(f"{name}: give a list of at least one value.")
