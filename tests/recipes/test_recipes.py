"""Every recipe runs at --scale tiny, end to end; what it cannot do it says in one line. The large scales are measured elsewhere."""

import json
import os
import subprocess
import sys

import pytest
import torch

from hf_specdec.bench.simulated import SimulatedDraft

from .conftest import FOLDER

NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if "import Recipe, main" in path.read_text())  # those of four runs
SIMULATED = ["codegen_7b__350m", "llama2_7b__115m"]
RUNS = ["baseline", "MXFP6", "speculation", "MXFP6 + speculation"]
QUICK = ("--scale", "tiny", "--prompts", "1", "--no-plot", "--new-tokens", "16")


def result(tmp_path, name: str) -> dict:
    return json.loads((tmp_path / f"{name}_tiny.json").read_text())


@pytest.fixture
def kit(recipes):
    """The shared package, once the recipes can be imported."""
    import recipe_kit.memory
    import recipe_kit.models
    import recipe_kit.running
    import recipe_kit.store
    import recipe_kit.summary

    return recipe_kit


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_compares_four_runs_and_speculation_changes_no_output(name, run, recipes, tmp_path):
    status, out, _ = run(name, "--scale", "tiny")
    data = result(tmp_path, name)
    assert status == 0 and "theory" in out and "baseline (float32)" in out
    assert [row["run"] for row in data["summary"]] == RUNS
    prompts = recipes[name].RECIPE.texts()
    assert len(data["runs"]) == 4 * len(prompts) == 4 * len(data["settings"]["prompts"])
    for row in data["summary"]:
        assert row["speed_up"] > 0 and row["predicted"] > 0 and row["weight_bytes"] > 0
        if "speculation" in row["run"]:
            assert row["identical"] == row["outputs"] == len(prompts) and row["block_efficiency"] > 1
    weights = {row["run"]: row["weight_bytes"] for row in data["summary"]}
    assert weights["MXFP6"] < weights["baseline"] and data["forks"] == []
    assert (tmp_path / f"{name}_tiny.png").read_bytes()[:4] == b"\x89PNG"


def test_a_recipe_is_a_script(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(FOLDER / f"{SIMULATED[1]}.py"), *QUICK, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "SIMULATED" in done.stdout and "By theory" in done.stdout and "4 of 4, took" in done.stderr


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_acceptance_is_called_so_in_the_table_and_the_json_and_the_article_stands_beside(name, run, tmp_path):
    _, out, _ = run(name, *QUICK, "--acceptance", "1")
    data = result(tmp_path, name)
    assert data["acceptance"] == {"kind": "SIMULATED", "rate": 1.0} and "SIMULATED" in data["label"]
    assert "100% SIMULATED" in out and "acceptance SIMULATED at 1" in out and "Qualcomm's article" in out and "about 4x" in out
    assert [row["acceptance_is"] for row in data["summary"][2:]] == ["SIMULATED"] * 2
    assert data["summary"][2]["acceptance_rate"] == 1


def test_activations_are_rounded_on_request_and_that_is_another_job(run, tmp_path):
    status, out, _ = run(SIMULATED[1], *QUICK, "--activations", "mxint8")
    data = result(tmp_path, SIMULATED[1])
    assert status == 0 and data["settings"]["activations"] == "mxint8" and "activations in mxint8" in data["label"]
    assert all(row["identical"] == row["outputs"] for row in data["summary"] if "speculation" in row["run"])
    status, _, error = run(SIMULATED[1], *QUICK)
    assert status == 2 and "activations" in error and result(tmp_path, SIMULATED[1]) == data


def test_prompt_lookup_has_its_own_acceptance_and_no_figures_of_an_article(run, tmp_path):
    _, out, _ = run("smollm2__prompt_lookup", *QUICK)
    assert "SIMULATED" not in out and "article" not in out
    assert result(tmp_path, "smollm2__prompt_lookup")["summary"][2]["acceptance_is"] == "measured"


def test_the_rate_that_is_simulated_is_the_rate_that_comes_out(run, tmp_path):
    run(SIMULATED[1], "--scale", "tiny", "--no-plot", "--acceptance", "0.6", "--prompts", "3", "--new-tokens", "64")
    row = result(tmp_path, SIMULATED[1])["summary"][2]
    assert abs(row["alpha"] - 0.6) < 0.1
    assert row["acceptance_rate"] < row["alpha"]


def test_in_phases_the_same_runs_give_the_same_tokens(run, tmp_path):
    run(SIMULATED[0], *QUICK)
    together = result(tmp_path, SIMULATED[0])
    run(SIMULATED[0], *QUICK, "--phases", "--restart")
    apart = result(tmp_path, SIMULATED[0])
    tokens = [{run["run"]: run["tokens"] for run in data["runs"]} for data in (together, apart)]
    assert tokens[0] == tokens[1] and [run["run"] for run in apart["runs"]] == [RUNS[0], RUNS[2], RUNS[1], RUNS[3]]


# --- stopping and going on --------------------------------------------------------------------------------------------


def test_a_recipe_that_was_stopped_goes_on_where_it_was(run, kit, tmp_path, monkeypatch):
    add, name = kit.store.Store.add, SIMULATED[1]

    def stop_after_two(store, entry):
        add(store, entry)
        if len(store.data["runs"]) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(kit.store.Store, "add", stop_after_two)
    status, _, error = run(name, *QUICK)
    assert status == 130 and "2 of 4 runs are kept" in error
    kept = result(tmp_path, name)["runs"]
    monkeypatch.setattr(kit.store.Store, "add", add)
    status, _, error = run(name, *QUICK)
    assert status == 0 and "2 of 4 runs are there already" in error
    assert result(tmp_path, name)["runs"][:2] == kept and len(result(tmp_path, name)["runs"]) == 4
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_recipe_that_is_done_loads_no_model_again(run, kit, monkeypatch):
    run(SIMULATED[1], *QUICK)
    monkeypatch.setattr(kit.running, "make_pair", lambda *_: pytest.fail("loaded"))
    status, out, error = run(SIMULATED[1], *QUICK)
    assert status == 0 and "4 of 4 runs are there already" in error and "MXFP6 + speculation" in out


def test_an_output_that_parts_from_plain_is_listed_with_its_reason_also_after_a_stop(run, tmp_path):
    run(SIMULATED[1], *QUICK)
    path = tmp_path / f"{SIMULATED[1]}_tiny.json"
    data = json.loads(path.read_text())
    entry = next(entry for entry in data["runs"] if entry["run"] == "speculation")
    entry["tokens"][5] = (entry["tokens"][5] + 1) % 512
    path.write_text(json.dumps(data))
    status, out, _ = run(SIMULATED[1], *QUICK)
    assert status == 0 and "0/1" in out and "parts from plain at token 6: NOT explained by rounding" in " ".join(out.split())
    forks = result(tmp_path, SIMULATED[1])["forks"]
    assert [(fork["run"], fork["position"], fork["near_tie"]) for fork in forks] == [("speculation", 5, False)]


def test_runs_of_other_settings_are_refused_and_kept_until_restart_is_said(run, tmp_path):
    run(SIMULATED[1], *QUICK)
    before = (tmp_path / f"{SIMULATED[1]}_tiny.json").read_text()
    status, _, error = run(SIMULATED[1], *QUICK, "--k", "3")
    assert status == 2 and "k = 7" in error and "has 3" in error and "--restart" in error
    assert (tmp_path / f"{SIMULATED[1]}_tiny.json").read_text() == before
    assert run(SIMULATED[1], *QUICK, "--k", "3", "--restart")[0] == 0
    assert result(tmp_path, SIMULATED[1])["settings"]["k"] == 3


def test_a_file_that_no_recipe_wrote_is_refused(run, tmp_path):
    (tmp_path / f"{SIMULATED[1]}_tiny.json").write_text("[1, 2")
    status, _, error = run(SIMULATED[1], *QUICK)
    assert status == 2 and "not written by a recipe" in error


# --- what cannot be done ----------------------------------------------------------------------------------------------


def test_a_scale_that_is_not_there_is_refused_with_those_that_are(run, capsys):
    with pytest.raises(SystemExit) as ended:
        run(SIMULATED[0], "--scale", "huge")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert all(scale in error for scale in ("huge", "full", "shape", "tiny"))


@pytest.mark.parametrize("name", SIMULATED)
def test_too_little_memory_is_found_out_before_anything_is_built(name, run, kit, monkeypatch, tmp_path):
    monkeypatch.setattr(kit.memory, "free_bytes", lambda device: 15_500_000_000)
    monkeypatch.setattr(kit.models, "random_model", lambda *_: pytest.fail("built"))
    status, _, error = run(name, "--scale", "shape", "--prompts", "1")
    assert status == 2 and "too little memory" in error and "15.5 GB are free" in error and "--phases" in error
    assert not list(tmp_path.iterdir())


def test_the_shapes_are_those_of_the_models(recipes, kit):
    sizes = {name: [kit.memory.size_of(config) for config in recipes[name].RECIPE.configs["shape"]()] for name in SIMULATED}
    assert [round(size.parameters / 1e6) for size in sizes["llama2_7b__115m"]] == [6738, 117]
    assert [round(size.parameters / 1e6) for size in sizes["codegen_7b__350m"]] == [7064, 357]


def test_llama_without_a_drafter_says_what_is_missing(run):
    status, _, error = run("llama2_7b__115m", "--scale", "full")
    assert status == 2 and "--draft is missing" in error and "115M" in error and "intermediate_size 2816" in error


def test_a_draft_folder_without_a_model_is_named(run, tmp_path):
    status, _, error = run("llama2_7b__115m", "--scale", "full", "--draft", str(tmp_path / "nothing"))
    assert status == 2 and "nothing" in error and "config.json" in error


@pytest.mark.parametrize("name, hint", [("llama2_7b__115m", "accept its licence at https://huggingface.co/meta-llama"), ("codegen_7b__350m", "--target FOLDER")])
def test_weights_that_cannot_be_had_say_what_to_do(name, hint, run, kit, monkeypatch, tmp_path):
    import transformers

    def refuse(*_, **__):
        raise OSError("You are trying to access a gated repo.\nMore of that.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    monkeypatch.setattr(kit.models, "_check_draft", lambda *_: None)
    status, _, error = run(name, "--scale", "full")
    assert status == 2 and hint in error and "gated repo" in error and "More of that" not in error


@pytest.mark.parametrize("arguments, words", [
    (("--acceptance", "1.5"), "rate in 0..1"),
    (("--k", "0"), "--k 0: must be 1 or more"),
    (("--draft", "x"), "--draft has no meaning at --scale tiny"),
    (("--layers", "1"), "--layers has no meaning at --scale tiny"),
    (("--device", "nowhere"), "--device nowhere"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused(arguments, words, run):
    status, _, error = run(SIMULATED[1], *QUICK, *arguments)
    assert status == 2 and words in error


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_the_acceptance_for_a_goal_is_what_theory_gives_back(kit):
    from hf_specdec.theory import speedup

    costs = {"baseline": {"one": 2.0}, "MXFP6": {"one": 1.0, "wide": 1.1, "draft": 0.05}}
    found = kit.summary.acceptance_for_goal({"settings": {"k": 7}, "costs": costs, "runs": []}, 4.0)
    assert 2 * speedup(found["alpha"], 7, 0.05, lambda width: 1.1) == pytest.approx(4)
    beyond = kit.summary.acceptance_for_goal({"settings": {"k": 7}, "costs": costs, "runs": []}, 12.0)
    assert beyond["alpha"] is None and "cannot reach 12x" in kit.summary.goal_text(beyond)


def test_the_cost_of_looking_up_is_that_of_the_rounds_whose_seconds_are_known(kit):
    run = {"run": "MXFP6 + speculation", "draft_seconds": 1.0, "rounds": [[8, 8, 9], [2, 1, 2]]}  # seconds of the second round
    data = {"costs": {"baseline": {"one": 1.0}, "MXFP6": {"one": 0.5, "wide": 1.0}}, "runs": [run]}
    assert kit.summary.relative_costs(data, run["run"])[0] == 1.0


def test_the_prediction_at_a_mean_k_lies_between_its_neighbours_and_never_looks_beyond_k(kit):
    from hf_specdec.theory import speedup

    at = [speedup(0.8, n, 0.05, lambda width: 1 + 0.4 * (width - 1) / 7) for n in (6, 7)]
    assert kit.summary.interpolated(0.8, 6.25, 0.05, 1.4, 7) == pytest.approx(0.75 * at[0] + 0.25 * at[1])
    assert kit.summary.interpolated(0.8, 7.0, 0.05, 0.01, 7) > 0  # a wide pass that was timed on a quieter machine


def test_a_simulated_draft_runs_its_model_and_leaves_the_output_as_it_is(recipes, kit):
    import hf_specdec

    config, draft = recipes[SIMULATED[1]].RECIPE.configs["tiny"]()
    model, draft = (kit.models.random_model(one, torch.float32, torch.device("cpu")) for one in (config, draft))
    hf_specdec.enable(model)
    ids = torch.arange(9)[None]
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    plain = model.generate(ids, **settings).sequences
    for rate, expected in ((1.0, 1.0), (0.0, 0.0)):
        simulated = SimulatedDraft(draft, plain[0, 9:].tolist(), rate, seed=0)
        out = model.generate(ids, speculative=True, assistant_model=simulated, num_assistant_tokens=5, **settings)
        assert torch.equal(out.sequences, plain) and out.speculation.acceptance_rate == expected
        assert out.speculation.draft_calls >= out.speculation.proposed
    with pytest.raises(ValueError, match="greedy"):
        model.generate(ids, speculative=True, assistant_model=simulated, **{**settings, "do_sample": True})


def test_a_simulated_draft_does_not_read_again_what_was_accepted(recipes, kit):
    import hf_specdec

    class Watched(SimulatedDraft):
        def _scores(self, context, tokens, k, step):
            if step == 0:
                fed.append(len(context.rows[0]) - self.cached.lengths[0])
            return super()._scores(context, tokens, k, step)

    fed = []
    config, draft = recipes[SIMULATED[1]].RECIPE.configs["tiny"]()
    model, draft = (kit.models.random_model(one, torch.float32, torch.device("cpu")) for one in (config, draft))
    hf_specdec.enable(model)
    ids = torch.arange(9)[None]
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **settings)
    model.generate(ids, speculative=True, assistant_model=Watched(draft, plain[0, 9:].tolist(), 1.0, seed=0), num_assistant_tokens=5, **settings)
    assert len(fed) > 2 and set(fed[1:]) == {2}  # the last drafted token, and the target's own


# --- quality ----------------------------------------------------------------------------------------------------------


def test_outputs_are_compared_with_those_of_the_baseline(run, tmp_path):
    _, out, _ = run(SIMULATED[0], *QUICK)
    quality = result(tmp_path, SIMULATED[0])["quality"]
    assert list(quality) == RUNS and quality["speculation"]["exact_match"] == quality["baseline"]["exact_match"] == 1
    assert quality["speculation"]["rougeL"] in (1, None) and "against the baseline's outputs: MXFP6" in " ".join(out.split())


@pytest.mark.parametrize("name, arguments, words", [
    ("codegen_7b__350m", ("--scale", "tiny", "--humaneval", "x"), "--humaneval has no meaning at --scale tiny"),
    ("llama2_7b__115m", ("--scale", "full", "--humaneval", "x"), "real weights of a code model"),
    ("codegen_7b__350m", ("--scale", "full", "--execute-code"), "--humaneval FILE"),
    ("codegen_7b__350m", ("--scale", "full", "--humaneval", "nowhere.jsonl"), "--humaneval nowhere.jsonl"),
])  # fmt: skip
def test_pass_at_1_is_refused_where_there_is_nothing_to_run(name, arguments, words, run):
    status, _, error = run(name, *arguments)
    assert status == 2 and words in error


def test_pass_at_1_of_the_four_runs(kit, monkeypatch):
    import recipe_kit.quality as quality
    from hf_specdec.bench.quality import Problem, run_problem

    task = Problem("t", "def one():\n", "def check(f):\n    assert f() == 1\n", "one")
    texts = {1: "    return 1\n", 2: "    return 2\n"}
    tokenizer = type("Texts", (), {"decode": lambda self, ids, **_: texts[ids[0]]})()
    runs = [{"repetition": 0, "prompt": "t", "run": arm, "tokens": [2 if arm == "MXFP6" else 1]} for arm in RUNS]
    data = {"runs": runs, "settings": {"prompts": ["t"]}, "quality": {}}
    try:
        run_problem(task, texts[1])
        limits = {}
    except RuntimeError:
        limits = {"isolation": "audit"}
    assert quality.pass_rates(data, {"t": task}, tokenizer, **limits) == {arm: float(arm != "MXFP6") for arm in RUNS}
    monkeypatch.setattr(quality, "pass_at_1", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no namespace")))
    with pytest.raises(kit.RecipeError, match="--execute-code: no namespace"):
        quality.pass_rates(data, {"t": task}, tokenizer)
