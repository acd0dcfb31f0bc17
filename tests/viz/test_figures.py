"""The curves hold the theory's values, the boxes of the time line the trace's seconds, and matplotlib is loaded on demand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.utils import ModelOutput

import hf_specdec
from hf_specdec import SpeculationTrace, theory, viz
from hf_specdec.hints import install
from hf_specdec.trace import Round
from hf_specdec.viz import canvas, figures
from hf_specdec.viz.timelines import COLOURS, spans
from tests.helpers import perturbed, prompts, speculate, tiny_llama

pytest.importorskip("matplotlib")


def curves(axes) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_figure_2_holds_equation_1():
    drawn = curves(figures.expected_tokens((1, 4)).axes[0])
    assert set(drawn) == {"K = 1", "K = 4"}
    for k in (1, 4):
        x, y = drawn[f"K = {k}"]
        assert x[0] == 0 and x[-1] == 1 and y[0] == 1 and y[-1] == k + 1
        assert y[160] == pytest.approx(sum(0.8**i for i in range(k + 1)))  # alpha = 0.8


def test_figure_3_holds_the_best_k():
    drawn = curves(figures.optimal_k((0.05, 0.3)).axes[0])
    for c in (0.05, 0.3):
        x, y = drawn[f"c = {c:g}"]
        assert y == [theory.optimal_k(alpha, c) for alpha in x] and max(x) == pytest.approx(0.95)
    x, y = drawn["c = 0.3"]
    assert all(k == 0 for alpha, k in zip(x, y) if alpha <= 0.3) and y[-1] > 0
    assert all(low <= high for low, high in zip(y, y[1:])) and drawn["c = 0.05"][1][-1] > y[-1]


def test_figure_4_holds_both_theorems_against_alpha():
    left, right = figures.speedup_and_operations((2, 6), c=0.1, c_hat=0.2).axes
    for k in (2, 6):
        x, y = curves(left)[f"K = {k}"]
        assert y[100] == pytest.approx(theory.expected_tokens(0.5, k) / (0.1 * k + 1)) and x[100] == 0.5
        x, y = curves(right)[f"K = {k}"]
        assert y[100] == pytest.approx((0.2 * k + k + 1) / theory.expected_tokens(0.5, k))


def test_figure_4_holds_both_theorems_against_k():
    left, right = figures.speedup_and_operations((1, 8), c=0.1, c_hat=0.0, against="k", alphas=(0.6,)).axes
    x, y = curves(left)[r"$\alpha$ = 0.6"]
    assert x == list(range(9)) and y == [pytest.approx(theory.walltime_improvement(0.6, k, 0.1)) for k in x] and y[0] == 1
    x, y = curves(right)[r"$\alpha$ = 0.6"]
    assert y == [pytest.approx(theory.operations_factor(0.6, k)) for k in x]


# --- from traces ----------------------------------------------------------------------------------------------------------


def chain(*rounds: tuple[int, int, int]) -> SpeculationTrace:
    """Rounds of (proposed, accepted, rejected)."""
    made = [Round(0, proposed, accepted, accepted + 1, "model", [1] * (accepted + 1), [2] * rejected) for proposed, accepted, rejected in rounds]
    return SpeculationTrace({}, rounds=[[entry] for entry in made])


def test_positions_are_judged_up_to_the_first_rejection():
    trace = chain((3, 0, 3), (3, 2, 1), (3, 3, 0), (2, 1, 1), (0, 0, 0))
    assert figures.position_rates(trace) == [(4, 3), (3, 2), (2, 1)]
    assert figures.position_rates([trace, trace]) == [(8, 6), (6, 4), (4, 2)]


def test_what_was_cut_off_at_the_end_of_a_row_is_not_judged():
    assert figures.position_rates(chain((4, 2, 0))) == [(1, 1), (1, 1)]
    ended = SpeculationTrace({}, rounds=[[Round(0, 5, 2, 2, "model", [1, 1], [2, 2])]])  # the end of the text was the second of three right tokens
    assert figures.position_rates(ended) == [(1, 1), (1, 1)]


def test_labels_are_no_formulas():
    figure = viz.timeline({r"$\frac$": timed(), "$5 to $7": timed()})
    assert figure._repr_png_() and [text.get_text() for text in figure.axes[0].get_yticklabels()] == [r"$\frac$", "$5 to $7"]


def test_acceptance_by_position_shows_rates_counts_and_alpha():
    axes = figures.acceptance_by_position({"a": chain((2, 0, 2), (2, 2, 0)), "b": chain((1, 1, 0))}).axes[0]
    x, y = curves(axes)["a"]
    assert x == [1, 2] and y == [0.5, 1.0]
    assert r"$\alpha$ = 0.67 a" in curves(axes) and r"$\alpha$ = 1.00 b" in curves(axes)
    assert [text.get_text() for text in axes.texts] == ["n=2", "n=1", "n=1"]


def test_acceptance_by_position_of_a_real_call_adds_up():
    target = tiny_llama(1)
    out = speculate(target, prompts(5, 9), perturbed(target, 0.1), 4, seed=1, do_sample=True, max_new_tokens=40)
    rates = figures.position_rates(out)
    assert sum(accepted for _, accepted in rates) == out.speculation.accepted
    assert all(later == accepted for (_, accepted), (later, _) in zip(rates, rates[1:]) if not _cut(out))
    assert len(figures.acceptance_by_position(out).axes) == 1


def _cut(out) -> bool:
    """Whether some round proposed fewer than the others, or was cut short."""
    entries = [entry for entries in out.speculation.rounds for entry in entries]
    return any(entry.proposed < 4 or entry.accepted + len(entry.rejected) < entry.proposed for entry in entries)


def test_prediction_and_measurement_are_the_points():
    rows = [
        {"arm": "plain generate", "category": "chat", "decoding_speed_up": 1.0},
        {"arm": "ours", "category": "chat", "decoding_speed_up": 1.5, "predicted": 2.0, "predicted_width": 1.6},
        {"label": "own $x$", "measured": 2.5, "predicted": 2.4},
    ]
    axes = figures.predicted_and_measured({"results": rows}).axes[0]
    drawn = curves(axes)
    assert drawn["Theorem 3.8"] == ([2.0, 2.4], [1.5, 2.5])
    assert drawn["with the measured cost of a wide pass"] == ([1.6], [1.5])
    assert [text.get_text() for text in axes.texts] == ["ours chat", "own $x$"]
    (low, high), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert low < 1.5 and high > 2.5 and (low, high) == (bottom, top)


# --- the time line --------------------------------------------------------------------------------------------------------


def timed() -> SpeculationTrace:
    trace = chain((3, 1, 2), (3, 3, 0))
    trace.draft_calls, trace.round_seconds = 7, [[0.3, 1.0, 0.1], [0.6, 0.5, 0.1]]
    return trace


def test_spans_are_to_scale_with_a_box_per_draft_step():
    boxes = spans(timed())
    assert [box.kind for box in boxes] == ["draft"] * 3 + ["prompt", "rest"] + ["draft"] * 3 + ["target", "rest"]
    assert [box.begin for box in boxes] == pytest.approx([0, 0.1, 0.2, 0.3, 1.3, 1.4, 1.6, 1.8, 2.0, 2.5])
    assert [box.seconds for box in boxes] == pytest.approx([0.1] * 3 + [1.0, 0.1] + [0.2] * 3 + [0.5, 0.1])


def test_a_draft_without_a_model_is_one_box():
    trace = timed()
    trace.draft_calls = 0
    assert [box.kind for box in spans(trace)] == ["draft", "prompt", "rest", "draft", "target", "rest"]


def test_the_time_line_has_a_lane_per_run_with_the_boxes_in_their_colours():
    from matplotlib.colors import to_hex

    axes = viz.timeline({"K = 3": timed(), "plain": [1.0, 0.5, 0.5]}).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["K = 3", "plain"]
    bars = {bar.get_gid(): bar for bar in axes.collections}
    assert {gid: len(bar.get_paths()) for gid, bar in bars.items()} == {
        "0:prompt": 1, "0:draft": 6, "0:target": 1, "0:rest": 2, "1:prompt": 1, "1:target": 2,
    }  # fmt: skip
    assert all(to_hex(bar.get_facecolor()[0]) == COLOURS[gid[2:]] for gid, bar in bars.items())
    box = bars["0:target"].get_paths()[0].get_extents()
    assert (box.x0, box.x1) == pytest.approx((2.0, 2.5)) and axes.get_xlim() == pytest.approx((0, 2.6))
    assert [text.get_text() for text in axes.texts] == ["2", "4"]  # tokens per pass


def test_the_time_line_of_a_real_call_is_as_long_as_its_seconds():
    target = tiny_llama(1)
    out = speculate(target, prompts(5), perturbed(target, 0.1), 4)
    boxes, seconds = spans(out), out.speculation.seconds
    total = sum(seconds[name] for name in ("prompt", "draft", "verify", "rest"))
    assert boxes[-1].begin + boxes[-1].seconds == pytest.approx(total) == pytest.approx(sum(box.seconds for box in boxes))
    assert sum(box.kind == "draft" for box in boxes) == sum(max(entries[0].proposed, 1) for entries in out.speculation.rounds)
    assert viz.timeline(out, until=total / 2).axes[0].get_xlim()[1] == pytest.approx(total / 2)


# --- matplotlib and bad input ---------------------------------------------------------------------------------------------


def test_a_notebook_shows_a_figure_by_itself():
    assert figures.expected_tokens()._repr_png_().startswith(b"\x89PNG")


def test_importing_viz_loads_no_matplotlib_and_drawing_sets_no_global_state():
    program = (
        "import sys\nfrom hf_specdec import viz\nassert not [m for m in sys.modules if m.startswith('matplotlib')]\n"
        "viz.figures.expected_tokens()\nassert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {"PYTHONPATH": str(Path(hf_specdec.__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    canvas._kind.cache_clear()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    try:
        for draw in (figures.expected_tokens, lambda: viz.timeline([0.1])):
            with pytest.raises(ImportError, match=re.escape(install("demo"))):
                draw()
    finally:
        canvas._kind.cache_clear()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: figures.expected_tokens(()), "ks"),
        (lambda: figures.expected_tokens((-1,)), "k=-1"),
        (lambda: figures.optimal_k((-0.1,)), "c=-0.1"),
        (lambda: figures.speedup_and_operations(against="gamma"), "against='gamma'"),
        (lambda: figures.acceptance_by_position(chain((0, 0, 0))), "no drafted token"),
        (lambda: figures.acceptance_by_position("trace"), "no speculation trace"),
        (lambda: figures.predicted_and_measured([{"arm": "plain", "decoding_speed_up": 1.0}]), "no row"),
        (lambda: viz.timeline({}), "nothing to draw"),
        (lambda: viz.timeline([]), "runs: 'speculative' holds no round and no step; leave it out"),
        (lambda: viz.timeline({"plain": [], "K = 3": timed()}), "runs: 'plain' holds no round"),
        (lambda: viz.timeline({"a": None}), "no speculation trace"),
        (lambda: viz.timeline(ModelOutput(sequences=torch.ones(1, 3))), "ModelOutput has no speculation trace"),
        (lambda: viz.timeline([0.1, "x"]), "'x'"),
        (lambda: viz.timeline([timed()]), r"^a lane .*; SpeculationTrace.* is none\. Give several outputs as a dict, by their labels\.$"),
        (lambda: viz.timeline([0.1], until=0), "until=0"),
        (lambda: viz.timeline([0.1], until="x"), "until='x'"),
        (lambda: figures.expected_tokens(3), "ks: give a list"),
        (lambda: figures.predicted_and_measured({}), "no row has both"),
        (lambda: figures.predicted_and_measured(3), "rows: give a report of the benchmark"),
        (lambda: figures.predicted_and_measured([3]), "rows: give a report of the benchmark"),
        (lambda: viz.timeline(chain((1, 1, 0))), "no seconds per round"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
