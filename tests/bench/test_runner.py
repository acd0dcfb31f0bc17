import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from hf_specdec import enable, mx
from hf_specdec.bench.arms import KERNELS, PLAIN, Answer, Arm, kernel_arms, new_tokens, padded, standard_arms
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.meter import Cost, Forwards, measured
from hf_specdec.bench.prompts import Prompt
from hf_specdec.bench.report import COLUMNS, cells, print_report, save_json, save_plot
from hf_specdec.bench.runner import Cell, Measurement, _speculation, environment, plan, run_benchmark
from hf_specdec.commands.bench import in_tiles
from hf_specdec.trace import Round, SpeculationTrace

from .conftest import tiny_model

PROMPTS = [
    Prompt(str(i), "abc" if i < 3 else "xyz", text)
    for i, text in enumerate(("abcabcabc", "hello", "one two one two", "zzz"))
]


@pytest.mark.parametrize("make", [lambda model: mx.compress(model, "mxfp4_e2m1"), lambda model: mx.compress(model, "mxfp6_e2m3"), mx.to_tiles], ids=["4 bits", "6 bits", "tiles"])
def test_parameters_are_counted_as_weights_not_as_the_bytes_that_store_them(make):
    model = tiny_model(0)
    count = sum(p.numel() for p in model.parameters())
    assert environment(make(model))["parameters"] == count


def benchmark(target_folder, batch=1, draft=None, **settings):
    model, tokenizer = load_target(target_folder, device="cpu")
    arms = standard_arms(enable(model), draft, 4)
    steps = []
    report = run_benchmark(
        model, tokenizer, PROMPTS, arms, batch=batch, repetitions=2, max_new_tokens=12, step=steps.append, **settings
    )
    return report, arms, steps


def test_every_arm_runs_on_every_prompt_and_equals_plain_generate(target_folder):
    report, arms, steps = benchmark(target_folder, draft=tiny_model(1))
    names = [PLAIN, "stock lookup", "stock draft model", "ours lookup", "ours draft model"]
    assert [row["arm"] for row in report["results"]] == names * 2
    assert len(steps) == plan(PROMPTS, arms, 1, 2) == len(PROMPTS) * 5 * 2
    for row in report["results"]:
        assert row["equal"] == row["outputs"] == {"abc": 3, "xyz": 1}[row["category"]] and row["forks"] == []
        assert row["slowest"] <= row["tokens_per_second"] <= row["fastest"]
        assert 0 < row["outside_forwards"] < 1 and row["new_tokens"] > 0


def test_plain_and_stock_arms_are_so_of_a_model_whose_calls_speculate_anyhow(target_folder):
    model, tokenizer = load_target(target_folder, device="cpu")
    arms = standard_arms(enable(model, speculative=True), tiny_model(1), 4)
    traces = {arm.name: arm.run([PROMPTS[0].ids(tokenizer)], 8).trace for arm in arms}
    assert [name for name, trace in traces.items() if trace is None] == [PLAIN, "stock lookup", "stock draft model"] and len(traces) == 5


def test_the_kernels_arms_decode_with_a_model_of_their_own(target_folder):
    model, tokenizer = load_target(target_folder, device="cpu")
    fast, _ = in_tiles(target_folder, None, "float32")
    arms = standard_arms(enable(model)) + kernel_arms(fast)
    report = run_benchmark(model, tokenizer, PROMPTS, arms, repetitions=1, max_new_tokens=12)
    rows = {row["arm"]: row for row in report["results"]}
    assert list(rows)[-2:] == [f"{PLAIN}{KERNELS}", f"ours lookup{KERNELS}"] and [arm.target for arm in arms] == [model] * 3 + [fast] * 2
    assert all(row["equal"] == row["outputs"] for row in report["results"])
    assert 0 < rows[f"ours lookup{KERNELS}"]["outside_forwards"] < 1  # its own model's forwards are watched


def test_a_ragged_batch_leaves_out_what_stock_generate_cannot_do(target_folder):
    report, _, _ = benchmark(target_folder, batch=3)
    assert report["settings"]["skipped"] == ["stock lookup"]
    assert [(row["arm"], row["equal"], row["outputs"]) for row in report["results"]] == [
        (PLAIN, 3, 3),
        ("ours lookup", 3, 3),
        (PLAIN, 1, 1),
        ("ours lookup", 1, 1),
    ]


def test_an_arm_that_changes_the_output_is_shown_as_unequal(target_folder):
    model, tokenizer = load_target(target_folder, device="cpu")
    arms = standard_arms(enable(model))[:1]
    plain = arms[0].run
    arms.append(
        Arm("wrong", lambda prompts, n: Answer([[(row[0] + 1) % 256, *row[1:]] for row in plain(prompts, n).tokens]))
    )
    report = run_benchmark(model, tokenizer, PROMPTS[:2], arms, repetitions=1, max_new_tokens=6)
    wrong = report["results"][1]
    assert wrong["equal"] == 0 and [fork["position"] for fork in wrong["forks"]] == [0, 0]
    assert not any(fork["near_tie"] for fork in wrong["forks"])


def test_the_cost_of_drafting_is_that_of_the_rounds_whose_seconds_are_known():
    trace = SpeculationTrace({}, rounds=[[Round(0, 8, 8, 9, "")], [Round(0, 2, 1, 2, "")]])
    trace.seconds["draft"] = 1.0  # of the second round
    ours, plain = (Cell(Arm(name, None), [[Measurement(Cost(9.0, Forwards([1.0, 0.5, 0.5])), Answer([[1]], own))]]) for name, own in (("ours", trace), (PLAIN, None)))
    assert _speculation(ours, plain)["c"] == 1.0


def test_the_report_becomes_a_table_strict_json_and_a_plot(target_folder, tmp_path):
    report, _, _ = benchmark(target_folder, clock="cpu")
    console = Console(record=True, width=150)
    print_report(report, console)
    text = console.export_text()
    assert "ours lookup" in text and "abc" in text and "LlamaForCausalLM" not in text
    assert all(len(cells(row)) == len(COLUMNS) for row in report["results"])
    report["results"][0]["outside_forwards"] = float("nan")
    save_json(report, tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text())["results"][0]["outside_forwards"] is None
    pytest.importorskip("matplotlib")
    save_plot(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_category_and_a_model_are_named_as_they_are_and_not_as_markup(target_folder):
    report, _, _ = benchmark(target_folder)
    report["environment"]["model"] = "base[/v2]"
    for row in report["results"]:
        row["category"], row["arm"] = f"[/{row['category']}]", f"ours [/bold]{row['arm']}"
    console = Console(record=True, width=150)
    print_report(report, console)
    text = console.export_text()
    assert all(name in text for name in ("base[/v2]", "[/abc]", "[/xyz]", "ours [/bold]ours lookup"))


def test_the_meter_counts_forwards_and_leaves_no_hook():
    model = tiny_model()
    with measured(model) as cost:
        model.generate(**padded(model, [[1, 2, 3]]), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert cost.target.widths == [3, 1, 1, 1, 1]
    assert cost.draft.seconds == [] and 0 < cost.outside < 1
    assert sum(cost.target.seconds) < cost.seconds
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_new_tokens_end_with_the_first_end_of_sequence():
    model = tiny_model()
    inputs = padded(model, [[1, 2, 3], [4]])
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    sequences = inputs["input_ids"].new_tensor([[1, 2, 3, 9, 256, 256], [256, 256, 4, 9, 9, 9]])
    assert new_tokens(model, sequences, 3) == [[9, 256], [9, 9, 9]]


def test_a_report_that_cannot_be_written_leaves_the_former_one(tmp_path, monkeypatch):
    save_json({"a": 1}, tmp_path / "bench.json")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        def full(path, text, **options):
            path.open("w").close()
            raise OSError("full")

        patch.setattr(Path, "write_text", full)
        save_json({"a": 2}, tmp_path / "bench.json")
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"] and json.loads((tmp_path / "bench.json").read_text()) == {"a": 1}


def test_a_report_goes_into_a_pipe_too(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = ThreadPoolExecutor(1).submit(pipe.read_text)
    save_json({"ratio": math.nan}, pipe)
    assert json.loads(reader.result(10)) == {"ratio": None} and pipe.is_fifo()
