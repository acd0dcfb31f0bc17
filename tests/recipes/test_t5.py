"""The recipe of the T5 tables: the paper's figures beside ours, what is simulated, what is refused and what fits instead."""

import json

import pytest

NAME = "t5_xxl__t5_small"
QUICK = ("--scale", "tiny", "--prompts", "1", "--new-tokens", "12", "--no-plot")


def result(tmp_path, task: str = "en-de", scale: str = "tiny") -> dict:
    return json.loads((tmp_path / f"{NAME}_{task}_{scale}.json").read_text())


@pytest.fixture
def kit(recipes):
    import recipe_kit.memory
    import recipe_kit.models

    return recipe_kit


def test_the_toy_runs_at_both_temperatures_with_the_papers_figures_beside_its_own(run, tmp_path):
    status, out, _ = run(NAME, "--scale", "tiny", "--drafts", "T5-small", "T5-large", "bigram", "unigram", "--new-tokens", "16")
    data = result(tmp_path)
    rows = {(row["draft"], row["temperature"]): row for row in data["summary"]}
    paper = {key: (row["paper_alpha"], row["paper_k"], row["paper_speed_up"], row["paper_c"]) for key, row in rows.items()}
    assert status == 0 and "SIMULATED" not in out and "says nothing of T5" in out and "paper's speed-up" in out and "theory" in out
    assert paper == {
        ("T5-small", 0): (0.75, 7, 3.4, 0.02), ("T5-large", 0): (0.82, 7, 1.7, 0.11), ("bigram", 0): (0.20, None, None, None),
        ("unigram", 0): (0.08, None, None, None), ("T5-small", 1): (0.62, 7, 2.6, 0.02), ("T5-large", 1): (0.71, 3, 1.4, 0.11),
        ("bigram", 1): (0.19, None, None, None), ("unigram", 1): (0.07, None, None, None)}  # fmt: skip
    assert all(row["k"] == (row["paper_k"] or 1) and row["lossless"] and row["predicted"] > 0 and row["c"] > 0 for row in rows.values())
    assert all(row["equal_to_plain"] == row["outputs"] == 2 for row in data["summary"] if row["temperature"] == 0)
    assert rows["T5-small", 0]["alpha"] == rows["bigram", 0]["alpha"] == 1 and rows["unigram", 0]["alpha"] < 0.5
    assert 0.3 < rows["T5-small", 1]["alpha"] < 1
    assert (tmp_path / f"{NAME}_en-de_tiny.png").read_bytes()[:4] == b"\x89PNG"


def test_the_tables_are_the_papers_as_far_as_its_theory_goes(recipes):
    """gamma, alpha and c of the rows are those of Table 4, which tests/test_theory.py checks against Theorem 3.8."""
    from tests.test_theory import TABLE_4

    ours = {(task, draft, T): (gamma, alpha, c) for task, rows in recipes[NAME].TABLES.items() for (draft, T), (alpha, *rest) in rows.items()
            if rest for gamma, _, c in [rest]}  # fmt: skip
    theirs = {({"EnDe": "en-de", "CNNDM": "cnn-dm"}[task], draft, T): (gamma, alpha, c) for task, draft, T, gamma, alpha, c, _ in TABLE_4}
    assert ours == theirs


def test_each_task_has_its_file_and_all_k_runs_3_to_7(run, tmp_path):
    assert run(NAME, *QUICK, "--task", "cnn-dm", "--drafts", "T5-small", "--all-k")[0] == 0
    assert [(row["temperature"], row["k"]) for row in result(tmp_path, "cnn-dm")["summary"]] == [(T, k) for T in (0, 1) for k in range(3, 8)]
    status, out, _ = run(NAME, *QUICK, "--drafts", "T5-small", "bigram", "--k", "4")
    assert status == 0 and "LOSSY" not in out
    assert {row["k"] for row in result(tmp_path)["summary"]} == {4} and result(tmp_path, "cnn-dm")["settings"]["task"] == "cnn-dm"


def test_a_shape_says_that_its_acceptance_is_simulated_and_whose_shape_it_is(run, recipes, monkeypatch, tmp_path):
    small = {"small": (32, 1, 2, 48), "base": (40, 1, 2, 48), "large": (48, 2, 2, 48), "xl": (64, 2, 4, 96), "xxl": (64, 3, 4, 96)}
    monkeypatch.setattr(recipes[NAME], "SHAPES", small)
    monkeypatch.setattr(recipes[NAME], "SOURCE_TOKENS", {"en-de": 8, "cnn-dm": 8})
    status, out, _ = run(NAME, "--scale", "shape", "--target-config", "xl", "--new-tokens", "40", "--dtype", "float32", "--no-plot")
    data = result(tmp_path, scale="shape")
    assert status == 0 and out.count("SIMULATED") >= 5 and "T5 v1.1 xl, NOT the paper's" in " ".join(out.split())
    rows = {row["draft"]: row for row in data["summary"]}
    assert {row["temperature"] for row in rows.values()} == {0} and all(row["equal_to_plain"] == 2 for row in rows.values())
    assert rows["T5-small"]["alpha"] > 0.5 and rows["unigram"]["alpha"] < 0.3


def test_the_shapes_are_those_of_t5(recipes, kit):
    sizes = {name: kit.memory.size_of(recipes[NAME].t5(*shape)).parameters for name, shape in recipes[NAME].SHAPES.items()}
    assert {name: round(size / 1e6) for name, size in sizes.items()} == {"small": 77, "base": 248, "large": 783, "xl": 2850, "xxl": 11135}


@pytest.mark.parametrize("free, words", [(21e9, ("22.9 GB are needed", "--target-config xl, the largest that fits")), (3e9, ("--target-config large",)), (1e8, ())])
def test_too_little_memory_names_the_largest_target_that_fits(free, words, run, recipes, kit, monkeypatch, tmp_path):
    monkeypatch.setattr(kit.memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(recipes[NAME], "free_bytes", lambda device: free)
    monkeypatch.setattr(recipes[NAME], "random_model", lambda *_: pytest.fail("built"))
    status, _, error = run(NAME, "--scale", "shape")
    assert status == 2 and "too little memory" in error and all(word in error for word in words) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments, words", [
    (("--scale", "tiny", "--target", "x"), "--target has no meaning at --scale tiny"),
    (("--scale", "full", "--target-config", "xl"), "name the model with --target"),
    (("--scale", "tiny", "--acceptance", "0.5"), "for --scale shape"),
    (("--scale", "shape", "--acceptance", "2"), "a rate in 0..1"),
    (("--scale", "full", "--text", "nowhere.txt"), "nowhere.txt: there is no such file"),
    (("--scale", "full", "--drafts", "bigram"), "give one with --table-text"),
    (("--scale", "tiny", "--k", "3", "--all-k"), "give one of them"),
    (("--scale", "full",), "google-t5/t5-11b cannot be read"),
    (("--scale", "full", "--target", "nobody/nothing", "--draft", "nobody/either"), "FOLDER. --scale shape needs no weights"),
])  # fmt: skip
def test_what_makes_no_sense_or_cannot_be_had_is_refused_in_one_line(arguments, words, run, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no connection.\nMore of that.")

    import transformers

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, _, error = run(NAME, *arguments)
    assert status == 2 and words in error and len(error.strip().splitlines()) == 1


def test_full_reads_a_pair_from_folders_and_counts_its_tables(run, recipes, kit, tmp_path):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "</s>", *"translate English to German : a b c d e f".split()])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, shape in (("target", (64, 2, 2, 48)), ("draft", (32, 1, 2, 48))):
        kit.models.random_model(recipes[NAME].t5(*shape, 96), torch.float32, torch.device("cpu")).save_pretrained(tmp_path / name)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(tmp_path / name)
    (tmp_path / "sources.txt").write_text("a b c\n\nd e f\n")
    (tmp_path / "german.txt").write_text("a b c d\nb c d e\n")
    status, out, error = run(NAME, "--scale", "full", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--text", str(tmp_path / "sources.txt"),
                             "--table-text", str(tmp_path / "german.txt"), "--new-tokens", "8", "--k", "3", "--dtype", "float32", "--no-plot")  # fmt: skip
    assert status == 0, error
    data = result(tmp_path, scale="full")
    assert len(data["settings"]["prompts"]) == 2 and {row["draft"] for row in data["summary"]} == {"T5-small", "bigram", "unigram"}
    assert "not the paper's" in out and all(row["equal_to_plain"] == 2 for row in data["summary"] if row["temperature"] == 0)
