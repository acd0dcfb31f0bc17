"""The recipes about acceptance: what they train, what they say is lossy or simulated, what they refuse."""

import json
import signal

import numpy as np
import pytest
import torch

STUDIES = ["gpt_97m__6m", "lenience"]
LINES = [f"the {animal} number {number} ran over the hill and saw a {animal}" for number in range(150) for animal in ("cat", "dog")]


def result(tmp_path, name: str, scale: str = "tiny") -> dict:
    return json.loads((tmp_path / f"{name}_{scale}.json").read_text())


@pytest.fixture
def kit(recipes):
    import recipe_kit.corpus
    import recipe_kit.memory
    import recipe_kit.pretraining
    import recipe_kit.study
    import recipe_kit.study_cli

    return recipe_kit


@pytest.fixture
def quick(recipes, monkeypatch):
    """Toys that are hardly trained."""
    import dataclasses

    for name in STUDIES:
        monkeypatch.setattr(recipes[name], "TINY", dataclasses.replace(recipes[name].TINY, steps=4, batch=4))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(LINES))
    return path


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.share(0)
def test_the_gpt_pair_learns_and_its_drafts_have_a_real_acceptance_beside_the_papers(run, tmp_path):
    status, out, _ = run("gpt_97m__6m", "--scale", "tiny", "--prompts", "3")
    data = result(tmp_path, "gpt_97m__6m")
    rows = {(row["draft"], row["temperature"]): row for row in data["summary"]}
    assert status == 0 and "SIMULATED" not in out and "paper's alpha" in out and "Table 3" in out
    assert {key: row["paper_alpha"] for key, row in rows.items()} == {
        ("6M draft", 0): 0.88, ("6M draft", 1): 0.89, ("bigram", 0): 0.05, ("bigram", 1): 0.05, ("unigram", 0): 0.03, ("unigram", 1): 0.03}
    assert all(row["equal_to_plain"] == row["outputs"] == 3 for row in data["summary"] if row["temperature"] == 0)
    assert all(row["lossless"] and row["speed_up"] > 0 and row["predicted"] > 0 for row in data["summary"])
    assert rows["6M draft", 1]["alpha"] > 0.4 and rows["bigram", 0]["alpha"] > 0.2 > rows["unigram", 0]["alpha"]
    assert (tmp_path / "gpt_97m__6m_tiny.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.share(0)
def test_lenience_raises_acceptance_and_its_rows_are_called_lossy(run, tmp_path):
    status, out, _ = run("lenience", "--scale", "tiny", "--no-plot")
    data = result(tmp_path, "lenience")
    assert status == 0 and out.count("LOSSY") >= 12 and "Table 5" in out
    for draft in ("MXFP4 copy", "n-gram"):
        for temperature, paper in ((1, [0.62, 0.71, 0.76, 0.84]), (0, [0.75, 0.75, 0.80, 0.87])):
            rows = [row for row in data["summary"] if (row["draft"], row["temperature"]) == (draft, temperature)]
            assert [row["lenience"] for row in rows] == [1, 0.5, 0.3, 0.1] and [row["paper_alpha"] for row in rows] == paper
            assert [row["lossless"] for row in rows] == [True, False, False, False]
            assert rows[0]["alpha"] <= rows[3]["alpha"] and (draft != "n-gram" or rows[0]["alpha"] < rows[3]["alpha"])
    greedy = [row for row in data["summary"] if row["temperature"] == 0 and row["lossless"]]
    assert all(row["equal_to_plain"] == row["outputs"] == 2 for row in greedy)


def test_k_is_that_of_the_6m_draft_and_the_tables_say_that_theirs_is_1(run, quick, tmp_path, capsys):
    status, out, _ = run("gpt_97m__6m", "--scale", "tiny", "--prompts", "1", "--new-tokens", "6", "--k", "3", "--no-plot")
    data = result(tmp_path, "gpt_97m__6m")
    assert status == 0 and {(row["draft"], row["k"]) for row in data["summary"]} == {("6M draft", 3), ("bigram", 1), ("unigram", 1)}
    assert "K is --k for the 6M draft and 1 for the tables" in " ".join(out.split()) and "up to 6 new tokens, 1 prompt, repetitions: 1" in out
    with pytest.raises(SystemExit):
        run("gpt_97m__6m", "--help")
    assert "the tables draft 1, whatever is given" in " ".join(capsys.readouterr().out.split())


def test_the_full_gpt_shape_has_the_papers_size_and_says_that_its_acceptance_is_simulated(run, recipes, kit, monkeypatch, tmp_path):
    recipe = recipes["gpt_97m__6m"]
    sizes = [kit.memory.size_of(config).parameters for config in recipe.configs("full", 8000)]
    assert [round(size / 1e6) for size in sizes] == [98, 6]
    monkeypatch.setattr(recipe, "configs", lambda scale, vocabulary: tuple(recipe.gpt(w, n, 4, vocabulary) for w, n in ((64, 2), (32, 1))))
    status, out, _ = run("gpt_97m__6m", "--scale", "shape", "--prompts", "2", "--new-tokens", "40")
    data = result(tmp_path, "gpt_97m__6m", "shape")
    assert status == 0 and out.count("SIMULATED") >= 6 and data["acceptance"] == {"kind": "SIMULATED"} and "SIMULATED" in data["label"]
    assert "6M draft 0.88, bigram 0.05, unigram 0.03" in " ".join(out.split())
    rows = {row["draft"]: row for row in data["summary"]}
    assert all(row["equal_to_plain"] == 2 and row["acceptance_is"] == "SIMULATED" for row in rows.values())
    assert rows["6M draft"]["alpha"] > 0.7 and rows["unigram"]["alpha"] < 0.2
    _, out, _ = run("gpt_97m__6m", "--scale", "shape", "--prompts", "2", "--new-tokens", "40")
    assert "rates SIMULATED: 6M draft 0.88" in out  # also where nothing is left to run


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_that_was_stopped_goes_on_and_one_that_is_done_builds_nothing(name, run, recipes, kit, quick, tmp_path, monkeypatch):
    from recipe_kit import store

    add = store.Store.add

    def stop_after_two(self, entry):
        add(self, entry)
        if len(self.data["runs"]) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(store.Store, "add", stop_after_two)
    arguments = (name, "--scale", "tiny", "--prompts", "1", "--new-tokens", "6", "--no-plot")
    status, _, error = run(*arguments)
    assert status == 130 and "goes on from there" in error
    kept = result(tmp_path, name)["runs"]
    monkeypatch.setattr(store.Store, "add", add)
    assert run(*arguments)[0] == 0 and result(tmp_path, name)["runs"][:2] == kept
    monkeypatch.setattr(kit.study.StudyRunner, "_generate", lambda *_: pytest.fail("ran"))
    status, out, _ = run(*arguments)
    assert status == 0 and "theory" in out
    status, _, error = run(*arguments, "--k", "3")
    assert status == 2 and "k = 5" in error and "--restart" in error


# --- training ---------------------------------------------------------------------------------------------------------


def small(kit, recipes, **plan):
    config = recipes["gpt_97m__6m"].gpt(32, 1, 4, 64)
    train = np.random.default_rng(0).integers(0, 64, 2000)
    return config, train, kit.pretraining.Plan(**{"steps": 8, "batch": 2, "length": 12, "save_every": 2, **plan})


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def test_a_training_that_was_stopped_ends_with_the_weights_of_one_that_was_not(kit, recipes, tmp_path, monkeypatch):
    config, train, plan = small(kit, recipes)
    whole = kit.pretraining.pretrain("x", config, train, plan, torch.device("cpu"))
    step = kit.pretraining._step

    def stop_at_five(*arguments):
        if arguments[4] == 5:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(kit.pretraining, "_step", stop_at_five)
    with pytest.raises(KeyboardInterrupt):
        kit.pretraining.pretrain("x", config, train, plan, torch.device("cpu"), tmp_path)
    monkeypatch.setattr(kit.pretraining, "_step", lambda *arguments: step(*arguments) if arguments[4] >= 5 else pytest.fail("again"))
    resumed = kit.pretraining.pretrain("x", config, train, plan, torch.device("cpu"), tmp_path)
    assert torch.equal(weights(whole), weights(resumed))
    monkeypatch.setattr(kit.pretraining, "_step", lambda *_: pytest.fail("trained"))
    assert torch.equal(weights(whole), weights(kit.pretraining.pretrain("x", config, train, plan, torch.device("cpu"), tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["training.safetensors"]


def test_ctrl_c_in_the_midst_of_a_step_waits_for_its_end(kit, recipes, tmp_path, monkeypatch):
    config, train, plan = small(kit, recipes)
    whole = kit.pretraining.pretrain("x", config, train, plan, torch.device("cpu"))
    steps, step, handler = [], torch.optim.AdamW.step, signal.getsignal(signal.SIGINT)

    def interrupted(optimizer, *arguments):
        step(optimizer, *arguments)
        steps.append(None)
        if len(steps) == 5:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        kit.pretraining.pretrain("x", config, train, plan, torch.device("cpu"), tmp_path)
    assert len(steps) == 5 and signal.getsignal(signal.SIGINT) is handler
    assert torch.equal(weights(whole), weights(kit.pretraining.pretrain("x", config, train, plan, torch.device("cpu"), tmp_path)))


def test_a_checkpoint_of_another_config_plan_or_text_is_refused(kit, recipes, tmp_path):
    config, train, plan = small(kit, recipes, steps=2)
    cpu, pretrain = torch.device("cpu"), kit.pretraining.pretrain
    pretrain("x", config, train, plan, cpu, tmp_path)
    before = (tmp_path / "training.safetensors").read_bytes()
    other = recipes["gpt_97m__6m"].gpt(64, 1, 4, 64)
    cases = [((other, train, plan), "n_embd = 32, here it is 64"), ((config, train, small(kit, recipes, steps=3)[2]), "steps = 2, here it is 3"),
             ((config, train[:-1], plan), "tokens = 2000, here 1999")]
    for arguments, words in cases:
        with pytest.raises(kit.RecipeError, match=words):
            pretrain("x", *arguments, cpu, tmp_path)
    assert (tmp_path / "training.safetensors").read_bytes() == before
    (tmp_path / "training.safetensors").write_bytes(before[:100])
    with pytest.raises(kit.RecipeError, match="damaged"):
        pretrain("x", config, train, plan, cpu, tmp_path)


def test_full_trains_both_models_on_the_users_text_and_takes_up_its_work_again(run, recipes, text, tmp_path, monkeypatch):
    recipe = recipes["gpt_97m__6m"]
    monkeypatch.setattr(recipe, "configs", lambda scale, vocabulary: tuple(recipe.gpt(w, 1, 4, vocabulary) for w in (64, 32)))
    arguments = ("gpt_97m__6m", "--scale", "full", "--text", str(text), "--work", str(tmp_path / "work"), "--steps", "3", "--batch", "2",
                 "--prompts", "1", "--new-tokens", "5", "--no-plot")  # fmt: skip
    status, out, error = run(*arguments)
    assert status == 0, error
    assert "training target 3 of 3, took" in error and "training draft 3 of 3, took" in error
    work = tmp_path / "work"
    assert {path.name for path in work.iterdir()} == {"tokenizer", "tokens.npz", "target", "draft"}
    status, _, error = run(*arguments, "--restart")
    assert status == 0 and "training" not in error
    status, _, error = run(*arguments, "--steps", "4", "--restart")
    assert status == 2 and "of another training" in error
    status, _, error = run(*arguments, "--documents", "200", "--restart")
    assert status == 2 and "made of other text" in error


# --- what cannot be done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, words", [
    (("--scale", "full"), "--text FILE ... or --dataset NAME"),
    (("--scale", "full", "--text", "nowhere.txt"), "nowhere.txt: there is no such file"),
    (("--scale", "full", "--text", "x", "--dataset", "y"), "give one of them"),
    (("--scale", "full", "--text", "x", "--target", "y"), "--target and --draft go together"),
    (("--scale", "full", "--text", "x"), "--text x: there is no such file"),
    (("--scale", "full", "--text", __file__, "--work", __file__), f"{__file__} is a file; name a folder"),
    (("--scale", "full", "--text", __file__, "--target", "no/such", "--draft", "no/such"), "--target no/such: cannot be read"),
    (("--scale", "tiny", "--text", "x"), "--text has no meaning at --scale tiny"),
    (("--scale", "tiny", "--acceptance", "0.5"), "for --scale shape"),
    (("--scale", "shape", "--acceptance", "1.5"), "a rate in 0..1"),
    (("--scale", "tiny", "--new-tokens", "999"), "256 positions"),
    (("--scale", "tiny", "--k", "0"), "--k 0: must be 1 or more"),
    (("--scale", "tiny", "--k", "65"), "--k 65: at most 64"),
    (("--scale", "huge"), "--scale huge: choose one of full, shape, tiny"),
])  # fmt: skip
def test_the_gpt_recipe_refuses_what_makes_no_sense(arguments, words, run, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, _, error = run("gpt_97m__6m", "--work", str(tmp_path / "work"), *arguments)
    assert status == 2 and words in error and len(error.strip().splitlines()) == 1


def test_models_of_other_shapes_are_refused_before_their_weights_are_read(run, recipes, text, tmp_path):
    for name, width in (("target", 64), ("draft", 32)):
        recipes["gpt_97m__6m"].gpt(width, 1, 4, 64).save_pretrained(tmp_path / name)
    # the tokenizer comes first: without one the folder is no model to begin with
    status, _, error = run("gpt_97m__6m", "--scale", "full", "--text", str(text), "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"))
    assert status == 2 and "--target" in error


def test_a_data_set_without_the_column_names_those_it_has(run, tmp_path):
    pytest.importorskip("datasets")
    path = tmp_path / "some.jsonl"
    path.write_text('{"words": "a b c"}\n')
    status, _, error = run("gpt_97m__6m", "--scale", "full", "--dataset", str(path), "--work", str(tmp_path / "work"))
    assert status == 2 and "no text in a column 'text'" in error and "['words']" in error and "--column" in error


def test_too_little_memory_is_found_out_before_anything_is_built(run, kit, recipes, monkeypatch, tmp_path):
    monkeypatch.setattr(kit.memory, "free_bytes", lambda device: 500_000_000)
    monkeypatch.setattr(recipes["gpt_97m__6m"], "random_model", lambda *_: pytest.fail("built"))
    status, _, error = run("gpt_97m__6m", "--scale", "shape")
    assert status == 2 and "too little memory" in error and "are free" in error


def test_lenience_without_its_target_says_what_to_accept_and_where(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, _, error = run("lenience", "--scale", "full", "--target", "nobody/nothing")
    assert status == 2 and "nobody/nothing cannot be read" in error and "licence accepted" in error and "--target FOLDER" in error
    assert run("lenience", "--scale", "tiny", "--target", "x")[0] == 2


def test_lenience_has_no_shape_and_says_why(run):
    status, _, error = run("lenience", "--scale", "shape")
    assert status == 2 and "random weights have no acceptance" in error and "choose one of full, tiny" in error
    assert len(error.strip().splitlines()) == 1


def test_the_help_says_how_many_tokens_each_scale_has(recipes, capsys):
    with pytest.raises(SystemExit):
        recipes["lenience"].main(recipes["lenience"].RECIPE, ["--help"])
    assert "(default full 64, tiny 32)" in " ".join(capsys.readouterr().out.split())


def test_text_that_is_not_text_or_too_little_is_refused(kit, tmp_path):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(kit.RecipeError, match="not a UTF-8 text file"):
        list(kit.corpus.documents([tmp_path / "bytes.txt"], None, "text", None))
    tokenizer = kit.corpus.build_tokenizer(iter(LINES), 80)
    with pytest.raises(kit.RecipeError, match="3 documents"):
        kit.corpus.build_corpus(lambda: iter(LINES[:3]), tokenizer)
    corpus = kit.corpus.build_corpus(lambda: iter(LINES), tokenizer)
    with pytest.raises(kit.RecipeError, match="give more text"):
        corpus.prompts(["one"], 10_000)
    assert len(corpus.train) > 20 * len(corpus.held_out) > 0
