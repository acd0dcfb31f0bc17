"""`hf-specdec tune`, `bench --config`, and generate() with the config that was written."""

import dataclasses
import json
import shlex

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec import SpeculativeConfig, enable
from hf_specdec.bench.arms import padded
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench import measuring, terminal
from hf_specdec.bench.tuning import Choice, Costs, Measured, Recorded, Replayed, choices
from hf_specdec.cli import app
from hf_specdec.commands.common import check_overwrite
from hf_specdec.commands.tune import QUICK, USUAL, _confirmed, config_of
from hf_specdec.tree import Tree

from ..bench import conftest as saved
from ..helpers import assert_unchanged, build, snapshot

target_folder, draft_folder = saved.target_folder, saved.draft_folder


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def continued(model, config, **options):
    inputs = padded(model, [[97, 98, 99, 97, 98, 99, 97]])
    return model.generate(**inputs, max_new_tokens=24, do_sample=False, speculative=config, return_dict_in_generate=True, **options)


@pytest.fixture(scope="module")
def tuned(target_folder, draft_folder, tmp_path_factory):
    out, counters = tmp_path_factory.mktemp("tuned"), []

    class Kept(terminal.Counter):
        def __init__(self, *args):
            super().__init__(*args)
            counters.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "Counter", Kept)
        result = run("tune", target_folder, "--draft", draft_folder, "--prompts", "chat", "--limit", 2, "--max-new-tokens", 20, "--out", out, "--check")
    assert result.exit_code == 0, result.output
    return out, result, counters


def test_tune_prints_every_draft_and_writes_the_best(tuned, draft_folder):
    out, result, counters = tuned
    assert len(counters) >= 3 and all(counter.done == counter.total for counter in counters)
    for words in ("prompt_lookup", "suffix_automaton", "recycling", "ngram_recycling", "mixture", draft_folder[-20:], "K=8", "a pass over n tokens", "measured"):
        assert words in result.stdout
    report = json.loads((out / "tune.json").read_text())
    best = max(report["choices"], key=lambda choice: choice["tokens_per_second"])
    config = SpeculativeConfig.from_pretrained(out)
    if best["speedup"] > 1:
        assert (config.draft, config.num_assistant_tokens) == (best["draft"], best["k"])
        assert config.predicted_speedup == pytest.approx(best["speedup"], abs=1e-3)
    assert {choice["k"] for choice in report["choices"] if choice["label"] == "prompt_lookup"} == set(range(1, 65))
    assert any(choice["draft"] == "model_tree" for choice in report["choices"])
    check_overwrite(out, "tune.json", ("speculative_config.json",), {"environment", "costs", "choices"})  # a second run may
    assert len(report["costs"]["passes"]) == len(report["costs"]["widths"]) and report["measured_speedup"] > 0


def test_what_is_measured_is_written_as_it_goes_and_kept_until_another_run_knows_as_much(target_folder, tmp_path, monkeypatch):
    learner, allowed = measuring.measure_learner, [2]

    def stopped(*given):
        if not allowed[0]:
            raise KeyboardInterrupt
        allowed[0] -= 1
        return learner(*given)

    def tune(learners: int) -> dict:
        allowed[0] = learners
        done = run("tune", target_folder, "--prompts", "chat", "--quick", "--max-new-tokens", 12, "--out", tmp_path)
        assert (done.exit_code == 0) is (learners > 5), done.output
        assert {path.name for path in tmp_path.iterdir()} == {"tune.json", "speculative_config.json"}
        SpeculativeConfig.from_pretrained(tmp_path)
        return json.loads((tmp_path / "tune.json").read_text())

    monkeypatch.setattr(measuring, "measure_learner", stopped)
    first = tune(2)
    assert len(first["unfinished"]) == 3 + 2 == len(first["drafts"]) and first["choices"] and first["costs"]["plain"] > 0
    assert tune(1) == first and len(tune(3)["unfinished"]) == 6
    whole = tune(6)
    assert "unfinished" not in whole and len(whole["drafts"]) == 3 + 6 and tune(5) == whole


def test_the_check_is_set_beside_the_prediction_of_the_config_that_it_runs(target_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_specdec.commands.tune._confirmed", lambda model, texts, measured, costs, found: [dataclasses.replace(own, speedup=0.8) for own in found])
    result = run("tune", target_folder, "--prompts", "chat", "--quick", "--max-new-tokens", 8, "--out", tmp_path, "--check")
    assert SpeculativeConfig.from_pretrained(tmp_path).predicted_speedup == 1.0
    assert "predicted 1.00x, measured" in result.stdout


def test_a_target_that_takes_no_trees_is_tuned_by_chains(draft_folder, tmp_path):
    build("bloom", 0, "eager", vocab_size=257, hidden_size=32, n_layer=2, n_head=4).save_pretrained(tmp_path / "target")
    saved.byte_tokenizer().save_pretrained(tmp_path / "target")
    done = run("tune", tmp_path / "target", "--draft", draft_folder, "--prompts", "chat", "--quick", "--max-new-tokens", 12, "--out", tmp_path / "out", "--check")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert {choice["draft"] for choice in report["choices"]} == {"prompt_lookup", "suffix_automaton", "recycling", "model"}


def test_the_quick_form_takes_fewer_prompts_and_tokens_where_nothing_else_is_said(monkeypatch):
    asked = []
    monkeypatch.setattr("hf_specdec.commands.tune.tune", lambda *given: asked.append((given[3], given[4], given[-1])))
    for more in ((), ("--quick",), ("--quick", "--limit", 3, "--max-new-tokens", 7)):
        assert run("tune", "x", *more).exit_code == 0
    assert asked == [(None, None, False), (None, None, True), (3, 7, True)] and [a < b for a, b in zip(QUICK, USUAL)] == [True, True]


def test_tune_says_how_to_use_what_it_has_written(tuned, target_folder):
    out, result, _ = tuned
    assert f'model.generate(**inputs, speculative=hf_specdec.SpeculativeConfig.from_pretrained("{out}"))' in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("command: hf-specdec ")]
    asked = shlex.split(line.removeprefix("command: hf-specdec "))
    assert asked == ["generate", target_folder, "--config", str(out), "--prompt", "..."]
    used = run(*asked, "--max-new-tokens", 4, "--json")
    assert used.exit_code == 0 and json.loads(used.stdout)["speculation"]["config"]["predicted_speedup"] == SpeculativeConfig.from_pretrained(out).predicted_speedup


def test_bench_shows_the_prediction_beside_what_it_measures(tuned, target_folder):
    result = run("bench", target_folder, "--config", tuned[0], "--prompts", "chat", "--limit", 1, "--repetitions", 1, "--max-new-tokens", 12)
    assert result.exit_code == 0, result.output
    assert "ours tuned" in result.stdout and "tune predicted" in result.stdout and "measured: chat" in result.stdout


def recorded(k: int, right: int, rounds: int = 10) -> Recorded:
    """Rounds that propose k tokens, the first `right` of which are accepted."""
    return Recorded(((k, tuple(range(1, right + 1))),) * rounds)


COSTS = Costs((1, 65), (1.0, 1.64), 1.0)  # a token more costs 0.01


def confirmed(monkeypatch, measured: list[Measured], real: dict[str, Recorded]) -> tuple[list[Choice], list]:
    """What holds, and which (draft, options, k) was run, where a run of a draft brings `real`."""
    asked = []

    def record(model, draft, texts, k, step):
        asked.append((draft.name, k))
        step()
        return measuring.Run(real[draft.name], 0.0, 0.0)

    monkeypatch.setattr(measuring, "record", record)
    return _confirmed(None, [None], measured, COSTS, choices(measured, COSTS)), asked


def test_a_learning_draft_is_believed_at_the_width_that_it_was_run_at(monkeypatch):
    lookup = Measured("lookup", "prompt_lookup", Replayed((((3, (1, 2, 3)),) * 12,)))  # 4 tokens a round of K = 3
    learners = [Measured("recycling", "recycling", recorded(16, 12), most=16), Measured("mixture", "mixture", recorded(24, 20), most=24),
                Measured("mixture", "mixture", recorded(64, 20), least=25)]
    found, asked = confirmed(monkeypatch, [lookup, *learners], {"mixture": recorded(20, 1), "recycling": recorded(12, 8)})
    assert asked == [("mixture", 20), ("recycling", 12)]  # each once, at its best K, the next best when the best has not held
    assert found[0].label == "recycling" and found[0].k == 12 and found[0].tokens_per_second == pytest.approx(9 / COSTS.verify(13))
    assert [choice.k for choice in found if choice.label == "mixture"] == [20] and found == sorted(found, key=lambda own: -own.tokens_per_second)
    found, asked = confirmed(monkeypatch, [lookup, *learners], {"mixture": recorded(20, 0), "recycling": recorded(12, 0)})
    assert found[0].label == "lookup" and len(asked) == 2


def test_what_was_counted_or_is_no_gain_is_not_run_again(monkeypatch):
    lookup = Measured("lookup", "prompt_lookup", Replayed((((8, tuple(range(1, 9))),) * 18,)))
    assert confirmed(monkeypatch, [lookup, Measured("recycling", "recycling", recorded(4, 2), most=4)], {})[1] == []
    assert confirmed(monkeypatch, [Measured("recycling", "recycling", recorded(4, 0), most=4)], {})[1] == []
    loaded = Measured("some/heads", "medusa", recorded(4, 3), most=4)  # of a draft that was passed, the run at hand is the only one
    assert confirmed(monkeypatch, [loaded], {})[1] == []


def test_what_a_config_can_name_is_run_although_a_draft_with_another_tokenizer_is_before_it(monkeypatch):
    other = Measured("other/model", "translated", recorded(4, 4), most=4)
    found, asked = confirmed(monkeypatch, [other, Measured("recycling", "recycling", recorded(4, 3), most=3)], {"recycling": recorded(3, 1)})
    assert asked == [("recycling", 3)] and [own.block_efficiency for own in found if own.label == "recycling"] == [2.0] and found[0].label == "other/model"


CHOICES = [
    Choice("recycling (4 branches)", "recycling", {"branches": 4}, None, 9, 9, None, 2.0, 20.0, 1.5),
    Choice("lookup", "prompt_lookup", {}, None, 7, 7, None, 2.0, 20.0, 1.5),
    Choice("mixture", "mixture", {}, None, 6, 6, None, 2.0, 20.0, 1.5),
    Choice("d", "model_tree", {"tree": {"parents": [0, 0, 1, 2]}}, "{draft}", 2, 4, Tree((0, 0, 1, 2)), 2.0, 20.0, 1.5),
    Choice("d", "model", {}, "{draft}", 3, 3, None, 2.0, 20.0, 1.5),
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.draft)
def test_generate_uses_the_choice_as_it_was_written(choice, target_folder, draft_folder, tmp_path):
    written = config_of(choice).to_dict()
    source = written["draft_source"]
    SpeculativeConfig.from_dict({**written, "draft_source": draft_folder if source else None}).save_pretrained(tmp_path)
    config = SpeculativeConfig.from_pretrained(tmp_path)
    model = enable(load_target(target_folder, device="cpu")[0])
    before = snapshot(model)
    out, plain = continued(model, config), continued(model, None)
    assert torch.equal(out.sequences, plain.sequences)
    trace = out.speculation
    assert {entry.source for entries in trace.rounds for entry in entries if entry.proposed} == {choice.draft}
    assert max(entry.proposed for entries in trace.rounds for entry in entries) == choice.nodes
    assert_unchanged(model, before)


def test_a_model_passed_beside_the_config_goes_into_the_draft_that_it_names(target_folder, draft_folder):
    model, draft = (load_target(folder, device="cpu")[0] for folder in (target_folder, draft_folder))
    config = SpeculativeConfig(draft="model_tree", draft_options={"tree": [2, 2]}, num_assistant_tokens=2)
    out = continued(enable(model), config, assistant_model=draft)
    assert max(entry.proposed for entries in out.speculation.rounds for entry in entries) == 6
    assert torch.equal(out.sequences, continued(model, None).sequences)


def test_where_nothing_pays_the_config_leaves_k_to_the_loop():
    config = config_of(Choice("lookup", "prompt_lookup", {}, None, 1, 1, None, 1.1, 9.0, 0.9))
    assert config == SpeculativeConfig(predicted_speedup=1.0)


@pytest.mark.parametrize(("values", "words"), [
    ({"draft": "recycling", "draft_options": {"branches": 99}}, "branches=99"),
    ({"draft": "recycling", "draft_options": {"shape": 2}}, "draft_options: RecyclingDraft has no 'shape'"),
    ({"draft": "model_tree", "draft_options": {"tree": {"parents": [3]}}}, "has to be made first"),
    ({"draft": "model"}, "has to be made first"),
    ({"draft_options": {"min_match": float("nan")}}, "draft_options="),
    ({"draft_options": [1]}, "draft_options="),
    ({"draft_options": {"min_match": {1, 2}}}, "draft_options="),
    ({"draft_source": "somewhere"}, "draft='prompt_lookup' has no weights"),
    ({"draft": "model", "draft_source": "no/such/draft"}, "draft_source='no/such/draft' is no drafter and no transformers checkpoint"),
    ({"draft": "model", "draft_source": 3}, "draft_source=3"),
    ({"predicted_speedup": -1.0}, "predicted_speedup=-1.0"),
])
def test_a_config_that_cannot_be_used_is_refused_by_name(values, words, target_folder):
    model = enable(load_target(target_folder, device="cpu")[0])
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        continued(model, values)


def test_options_of_a_draft_that_is_replaced_are_refused(target_folder):
    model = enable(load_target(target_folder, device="cpu")[0])
    with pytest.raises(ValueError, match="draft_options=.*assistant_model replaces"):
        continued(model, SpeculativeConfig(draft="recycling", draft_options={"branches": 2}), assistant_model=model)


@pytest.mark.parametrize("shape", [{"parents": [0, 5]}, {"parents": "x"}, {"nodes": 0}, {"leaves": 3}, {}])
def test_a_tree_that_is_none_is_refused(shape, target_folder):
    model = enable(load_target(target_folder, device="cpu")[0])
    with pytest.raises(ValueError, match="Tree|tree="):
        continued(model, {"draft": "model_tree", "draft_options": {"tree": shape}}, assistant_model=model)


@pytest.mark.parametrize(("arguments", "message"), [
    (("--prompts", "nothing.jsonl"), "nothing.jsonl"),
    (("--draft", "no/such/draft"), "no/such/draft"),
    (("--max-new-tokens", "1200"), "context holds 1024"),
])
def test_bad_arguments_are_named_before_anything_is_measured(target_folder, arguments, message):
    result = run("tune", target_folder, "--limit", 1, *arguments)
    assert result.exit_code == 2 and message in result.stderr and "Tuning" not in result.stderr


def test_a_bench_without_a_config_where_it_should_be_is_refused(target_folder, tmp_path):
    result = run("bench", target_folder, "--config", tmp_path)
    assert result.exit_code == 2 and "speculative_config.json" in result.stderr
