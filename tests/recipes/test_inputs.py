"""What a recipe reads is told apart by content, what it cannot do is refused in one line before any work, and no file but its own is lost."""

import json
import os
from argparse import Namespace

import pytest
import torch

CODEGEN, T5, LOOKUP = "codegen_7b__350m", "t5_xxl__t5_small", "smollm2__prompt_lookup"
QUICK = ("--scale", "tiny", "--prompts", "1", "--no-plot", "--new-tokens", "4")
LINES = [f"the {animal} number {number} ran over the hill" for number in range(40) for animal in ("cat", "dog")]


@pytest.fixture
def kit(recipes):
    import recipe_kit.corpus
    import recipe_kit.inputs
    import recipe_kit.memory
    import recipe_kit.models
    import recipe_kit.running

    return recipe_kit


def refused(result, *words: str) -> bool:
    """One line on the error stream, with all of these in it."""
    status, _, error = result
    return status == 2 and len(error.strip().splitlines()) == 1 and all(word in error for word in words)


@pytest.fixture
def pair(recipes, kit, tmp_path):
    """Folders of a tiny CodeGen pair with a tokenizer, and a file of one task."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"[UNK]": 0, "def": 1, "f():": 2, "g():": 3}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, config in zip(("target", "draft"), recipes[CODEGEN].RECIPE.configs["tiny"]()):
        kit.models.random_model(config, torch.float32, torch.device("cpu")).save_pretrained(tmp_path / name)
        PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]").save_pretrained(tmp_path / name)
    (tmp_path / "tasks.jsonl").write_text(task("f"))
    return tmp_path


def task(name: str) -> str:
    return json.dumps({"task_id": "t", "prompt": f"def {name}():\n", "test": "def check(f):\n    assert f\n", "entry_point": name})


# --- changed under the same path --------------------------------------------------------------------------------------


def test_tasks_or_weights_that_changed_under_their_path_are_another_job(run, pair):
    arguments = (CODEGEN, "--scale", "full", "--target", str(pair / "target"), "--draft", str(pair / "draft"), "--humaneval", str(pair / "tasks.jsonl"),
                 "--new-tokens", "3", "--repetitions", "1", "--dtype", "float32", "--no-plot")  # fmt: skip
    assert run(*arguments)[0] == 0
    assert run(*arguments)[0] == 0
    (pair / "tasks.jsonl").write_text(task("g"))
    assert refused(run(*arguments), "humaneval_sha256", "--restart")
    (pair / "tasks.jsonl").write_text(task("f"))
    os.utime(pair / "draft" / "model.safetensors", (1, 1))
    assert refused(run(*arguments), "draft_sha256", "--restart")
    assert refused(run(*arguments, "--new-tokens", "2047", "--restart"), "2048 positions", "at most 2046")


def test_what_is_behind_a_path_is_told_by_content_and_of_large_files_by_size_and_time(kit, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12")
    (tmp_path / "notes.md").write_text("a")
    of = lambda: kit.inputs.contents(target=str(tmp_path), draft="some/hub-id", text=None)  # noqa: E731
    first = of()
    assert list(first) == ["target_sha256"]
    (tmp_path / "notes.md").write_text("b")
    assert of() == first
    (tmp_path / "config.json").write_text("{ }")
    second = of()
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert len({*first.values(), *second.values(), *of().values()}) == 3


def test_the_text_of_the_t5_and_gpt_recipes_is_told_by_content(recipes, kit, tmp_path):
    path = tmp_path / "text.txt"
    t5 = Namespace(scale="full", task="en-de", drafts=[], all_k=False, target="a", draft=None, text=path, table_text=None)
    gpt = Namespace(text=[path], dataset=f"{path}:train", column="text", documents=9)
    found = []
    for text in ("one", "two"):
        path.write_text(text)
        found.append((recipes[T5].settings(t5)["text_sha256"], *recipes["gpt_97m__6m"]._source(gpt)["text_sha256"],
                      recipes["gpt_97m__6m"]._source(gpt)["dataset_sha256"]))  # fmt: skip
    assert not set(found[0]) & set(found[1])


# --- what is kept of the tokenizer and the tokens ---------------------------------------------------------------------


def test_a_tokenizer_of_other_text_or_a_damaged_one_is_refused(kit, tmp_path, monkeypatch):
    made = lambda source: kit.corpus.kept_tokenizer(lambda: iter(LINES), 80, tmp_path, source)  # noqa: E731
    (tmp_path / "tokenizer.partial").mkdir()  # left over
    vocabulary = made({"text": 1}).get_vocab()
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]
    monkeypatch.setattr(kit.corpus, "build_tokenizer", lambda *_: pytest.fail("again"))
    assert made({"text": 1}).get_vocab() == vocabulary
    with pytest.raises(kit.RecipeError, match="made of other text.*another --work"):
        made({"text": 2})
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"version"')
    with pytest.raises(kit.RecipeError, match="no whole tokenizer.*move it away"):
        made({"text": 1})
    (tmp_path / "tokenizer" / "source.json").unlink()
    with pytest.raises(kit.RecipeError, match="no whole tokenizer"):
        made({"text": 1})


def test_tokens_that_are_cut_short_are_refused(kit, tmp_path):
    tokenizer = kit.corpus.build_tokenizer(iter(LINES), 80)
    made = lambda: kit.corpus.build_corpus(lambda: iter(LINES), tokenizer, tmp_path, {})  # noqa: E731
    made()
    kept = tmp_path / "tokens.npz"
    for content in (kept.read_bytes()[:200], b"", b"text"):
        kept.write_bytes(content)
        with pytest.raises(kit.RecipeError, match="damaged.*another --work"):
            made()


# --- one line, before anything is built -------------------------------------------------------------------------------


@pytest.mark.parametrize("name, arguments, words", [
    (CODEGEN, ("--k", "65"), "--k 65: at most 64"),
    (T5, ("--k", "65"), "--k 65: at most 64"),
    (CODEGEN, ("--new-tokens", "2017"), "2048 positions, and its longest prompt takes 32: at most 2016"),
    (CODEGEN, ("--out", __file__), f"--out {__file__}: {__file__} is a file; name a folder"),
    (T5, ("--out", __file__ + "/deeper"), f"{__file__} is a file; name a folder"),
    (LOOKUP, ("--acceptance", "0.5"), "--acceptance has no meaning at --scale tiny"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_models_are_built(name, arguments, words, recipes, kit, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(kit.models, "random_model", lambda *_: pytest.fail("built"))
    monkeypatch.setattr(recipes[T5], "random_model", lambda *_: pytest.fail("built"))
    status = recipes[name].main(recipes[name].RECIPE, [*QUICK, "--out", str(tmp_path), *arguments])
    assert refused((status, "", capsys.readouterr().err), words) and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_named(run, kit, monkeypatch, tmp_path):
    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(kit.inputs.common.tempfile, "TemporaryFile", refuse)
    assert refused(run(CODEGEN, *QUICK), f"--out {tmp_path}", f"nothing can be written in {tmp_path} (Permission denied)")


@pytest.mark.parametrize("name", [CODEGEN, "gpt_97m__6m", "lenience", T5])
def test_a_folder_that_cannot_be_made_is_refused_before_any_work(name, recipes, kit, monkeypatch, capsys, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda *_: pytest.fail("built"))
    for folder in ("/proc/x", str(tmp_path / "link")):
        status = recipes[name].main(recipes[name].RECIPE, ["--scale", "tiny", "--no-plot", "--out", folder])
        assert refused((status, "", capsys.readouterr().err), f"--out {folder}")


def test_sources_that_are_not_utf_8_are_named(run, tmp_path):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    assert refused(run(T5, "--scale", "full", "--text", str(tmp_path / "bytes.txt")), "bytes.txt: not a UTF-8 text file")


@pytest.mark.parametrize("value", ["nonsense", "auto"])
def test_a_device_map_without_a_gpu_is_refused_with_its_values(value, run):
    result = run(CODEGEN, "--scale", "full", "--device", "cpu", "--device-map", value)
    assert refused(result, f"--device-map {value}: only on GPUs", "auto, balanced", "cuda:0")


def test_a_device_map_on_a_gpu_is_one_of_its_values(kit):
    gpu = torch.device("cuda")
    for value in ("auto", "cuda:1", None):
        kit.inputs.check_map(Namespace(device=gpu, device_map=value))
    with pytest.raises(kit.RecipeError, match="nonsense: its values are auto"):
        kit.inputs.check_map(Namespace(device=gpu, device_map="nonsense"))


# --- files that are not a recipe's ------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [(), ("--restart",)])
def test_a_file_that_no_recipe_wrote_stays_also_with_restart(restart, run, kit, monkeypatch, tmp_path):
    monkeypatch.setattr(kit.running, "make_pair", lambda *_: pytest.fail("built"))
    path = tmp_path / f"{CODEGEN}_tiny.json"
    parts = '"environment": {}, "costs": {}, "forks": []'
    for content in (b"\xff\xfe", b"[]", b'{"mine": 1}', f'{{"settings": [], {parts}, "runs": []}}'.encode(), f'{{"settings": {{}}, {parts}, "runs": [1]}}'.encode()):
        path.write_bytes(content)
        assert refused(run(CODEGEN, *QUICK, *restart), "not written by a recipe") and path.read_bytes() == content
    path.unlink()
    path.mkdir()
    assert refused(run(CODEGEN, *QUICK, *restart), "is a folder", "another --out")


# --- SmolLM2's shape --------------------------------------------------------------------------------------------------


def test_the_shape_of_smollm2_has_its_size_and_its_tied_embedding(recipes, kit):
    config = kit.smollm2.config()
    assert kit.memory.size_of(config).parameters == 134_515_008
    config.num_hidden_layers, config.vocab_size = 1, 64
    model = kit.models.random_model(config, torch.float32, torch.device("cpu"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.no_grad():
        assert model(torch.arange(9)[None]).logits[0].argmax(-1).tolist() == list(range(9))


@pytest.mark.parametrize("name", ["smollm2__drafter", LOOKUP])
def test_the_shape_scale_of_smollm2_simulates_at_the_stated_rate_and_says_so(name, run, kit, monkeypatch, tmp_path):
    config = kit.smollm2.config()
    config.hidden_size, config.intermediate_size, config.vocab_size = 64, 96, 512
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    monkeypatch.setattr(kit.smollm2, "config", lambda: config)
    monkeypatch.setattr(kit.smollm2, "HEAD", 128)
    status, out, error = run(name, "--scale", "shape", "--prompts", "1", "--new-tokens", "24", "--acceptance", "1", "--layers", "2",
                             "--dtype", "float32", "--no-plot")  # fmt: skip
    data = json.loads((tmp_path / f"{name}_shape.json").read_text())
    assert status == 0, error
    assert "acceptance SIMULATED at 1" in out and "100% SIMULATED" in out and data["acceptance"] == {"kind": "SIMULATED", "rate": 1.0}
    assert all(row["identical"] == 1 and row["acceptance_rate"] == 1 for row in data["summary"][2:])
    assert ("in the place of lookup" if name == LOOKUP else "the draft model runs") in " ".join(out.split())


def test_a_draft_of_another_vocabulary_is_refused_before_weights_are_read(run, recipes, kit, pair, monkeypatch):
    config = recipes[CODEGEN].codegen(32, 1, 4, 4, 400)  # of the target's 512
    kit.models.random_model(config, torch.float32, torch.device("cpu")).save_pretrained(pair / "draft")
    full = ("--scale", "full", "--target", str(pair / "target"), "--draft", str(pair / "draft"), "--no-plot")
    words = (f"--draft {pair / 'draft'}: a vocabulary of 400 against the target's 512",)
    status, _, error = run("lenience", *full, "--new-tokens", "4")
    assert status == 2 and words[0] in error.splitlines()[-1]
    monkeypatch.setattr(kit.models, "_loaded", lambda *_: pytest.fail("read"))
    assert refused(run(CODEGEN, *full), *words)


def test_a_target_without_room_for_the_prompts_is_refused_by_the_lenience_recipe(run, pair):
    full = ("lenience", "--scale", "full", "--target", str(pair / "target"), "--draft", str(pair / "draft"), "--no-plot")
    status, _, error = run(*full, "--new-tokens", "2048")
    assert status == 2 and "--new-tokens 2048: the target has 2048 positions" in error.splitlines()[-1]


def test_a_picture_that_no_recipe_has_drawn_is_kept(run, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"{CODEGEN}_tiny.png"
    picture.write_bytes(b"mine")
    assert refused(run(CODEGEN, *(part for part in QUICK if part != "--no-plot")), str(picture), "move it away") and picture.read_bytes() == b"mine"
    picture.unlink()
    for _ in range(2):  # its own is known again, also without the runs
        assert run(CODEGEN, *(part for part in QUICK if part != "--no-plot"))[0] == 0 and picture.read_bytes()[1:4] == b"PNG"
        (tmp_path / f"{CODEGEN}_tiny.json").unlink()
