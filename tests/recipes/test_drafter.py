"""The Llama 2 recipe trains the drafter that it takes."""

import os
import subprocess
import sys

import pytest

from ..helpers import tiny_llama
from ..training.conftest import chat_tokenizer
from .conftest import FOLDER

SCRIPT = FOLDER / "llama2_7b__115m.py"


def train(*arguments) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, str(SCRIPT), "train", *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=300)


def test_the_drafter_it_trains_is_one_it_takes(run, tmp_path):
    pytest.importorskip("accelerate")
    target, draft = tmp_path / "target", tmp_path / "draft"
    tiny_llama(3).save_pretrained(target)
    chat_tokenizer().save_pretrained(target)
    done = train("--target", target, "--out", draft, "--scale", "tiny", "--tokens", 300, "--new-tokens", 8, "--steps", 2, "--batch-tokens", 128)
    assert done.returncode == 0, done.stderr
    status, out, error = run(SCRIPT.stem, "--scale", "full", "--target", str(target), "--draft", str(draft), "--new-tokens", "8", "--prompts", "1", "--repetitions", "1",
                             "--dtype", "float32", "--no-plot")
    assert status == 0 and "1/1" in out, error


@pytest.fixture
def refused(recipes, capsys, monkeypatch):
    """refused(*arguments) -> standard error of a `train` that does nothing."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(recipes[SCRIPT.stem].subprocess, "call", lambda command: pytest.fail("work"))

    def call(*arguments) -> str:
        capsys.readouterr()
        assert recipes[SCRIPT.stem].train(list(map(str, arguments))) == 2
        return capsys.readouterr().err

    return call


def test_a_target_that_cannot_be_read_is_one_line(refused):
    error = refused("--target", "no/such/target")
    assert "no/such/target: the config cannot be read" in error and len(error.splitlines()) == 1


def test_a_folder_that_cannot_be_made_or_has_another_shape_is_refused_before_any_work(refused, tmp_path):
    tiny_llama(3).save_pretrained(tmp_path / "target")
    (tmp_path / "file").write_text("")
    tiny_llama(3).config.save_pretrained(tmp_path / "draft" / "shape")
    for folder, words in (("file", "file is a file; name a folder"), ("draft", "draft holds a drafter of another shape")):
        error = refused("--target", tmp_path / "target", "--out", tmp_path / folder, "--scale", "tiny")
        assert words in error and len(error.splitlines()) == 1


def test_the_tiny_scale_trains_for_little_and_for_the_embedded_model_unless_told_otherwise(recipes, monkeypatch, tmp_path):
    recipe, calls = recipes[SCRIPT.stem], []
    monkeypatch.setattr(recipe, "read", lambda *_: tiny_llama(3).config)
    monkeypatch.setattr(recipe.subprocess, "call", lambda command: calls.append(command[4:]) or 0)
    assert recipe.train(["--scale", "tiny", "--out", str(tmp_path / "tiny"), "--steps", "3"]) == 0
    assert recipe.train(["--out", str(tmp_path / "full")]) == 0
    assert calls[0][0] == "smollm2" and calls[0][-4:] == ["--batch-tokens", "256", "--steps", "3"]
    assert calls[1][0] == recipe.RECIPE.target and calls[1][-2:] == ["--out", str(tmp_path / "full")]
