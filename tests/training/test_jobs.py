"""Whose a folder is: shards of other prompts, checkpoints of other data, files that no run has written; what is held out; several processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.cli import app
from hf_specdec.training import pipeline
from hf_specdec.training.batches import corpora
from hf_specdec.training.data import make_data, make_on_policy
from hf_specdec.training.shards import Shard, shard_files
from hf_specdec.training.trainer import RunConfig, Trainer

CONFIG = RunConfig(layers=(0,), head=None, steps=2, batch_tokens=128, warmup=1, format="bf16")


@pytest.fixture
def folder(target, tokenizer, tmp_path) -> Path:
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "a.txt").write_text("HELLO\nTHERE\n")
    (tmp_path / "b.txt").write_text("OTHERS\nENTIRELY\n")
    return tmp_path


def command(folder, *more) -> list[str]:
    return ["train", str(folder / "target"), "--out", str(folder / "out"), "--steps", "2", "--batch-tokens", "128", "--head", "0", "--format", "bf16",
            "--new-tokens", "8", *map(str, more)]


def invoked(folder, *more):
    result = CliRunner().invoke(app, command(folder, *more))
    return result.exit_code, " ".join(result.output.split())


def test_prompts_of_a_file_do_without_a_chat_template(target, tokenizer, tmp_path):
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    (path,) = make_data(tmp_path, target, bare, 10, new_tokens=4, prompts=["HELLO"])
    shard = Shard.load(path)
    assert shard.tokens[:5].tolist() == bare("HELLO").input_ids and len(shard) == 1
    with pytest.raises(ValueError, match="no chat template"):
        make_data(tmp_path / "none", target, bare, 10)


def test_shards_of_other_prompts_and_settings_are_refused(target, tokenizer, tmp_path):
    def make(tokens, prompts=("HELLO", "THERE"), **more):
        return make_data(tmp_path, target, tokenizer, tokens, **{"rows": 1, "new_tokens": 4, "prompts": prompts and list(prompts)} | more)

    assert len(make(1)) == 1
    before = make(1)[0].read_bytes()
    for wrong, words in (({"prompts": ("OTHER",)}, "other prompts"), ({"tokens": 999, "prompts": None}, "other prompts"), ({"tokens": 999, "new_tokens": 5}, "new_tokens=4, not 5"),
                         ({"tokens": 999, "seed": 3}, "seed=0, not 3")):
        with pytest.raises(ValueError, match=words):
            make(**{"tokens": 1} | wrong)
    assert [path.read_bytes() for path in shard_files(tmp_path)] == [before]
    assert len(make(1, prompts=None, new_tokens=9)) == 1, "enough is there: nothing is made"
    assert len(make(999)) == 2, "the rest of the same prompts"


def test_a_prompt_without_room_for_its_answer_is_named_before_any_is_answered(target, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="prompts: number 2 has"):
        make_data(tmp_path, target, tokenizer, 10, prompts=["HELLO", "A" * target.config.max_position_embeddings])
    assert not shard_files(tmp_path)


def test_a_run_goes_on_with_its_own_shards_or_more_and_with_no_others(target, data, tokenizer, tmp_path):
    own = shutil.copytree(data, tmp_path / "own")
    Trainer(target, own, tmp_path / "out", CONFIG).run()
    other = make_data(tmp_path / "other", target, tokenizer, 500, rows=4, new_tokens=8, seed=9)[0]
    with pytest.raises(ValueError, match="other shards than those in"):
        Trainer(target, other.parent, tmp_path / "out", CONFIG)
    shutil.copy(other, own / "999999.safetensors")
    assert Trainer(target, own, tmp_path / "out", CONFIG).progress.step == 2


@pytest.mark.parametrize("name", ["README.md", "config.json", "results.json", "model.safetensors"])
def test_files_that_no_run_wrote_are_left_alone(folder, name):
    (folder / "out").mkdir()
    (folder / "out" / name).write_text("mine")
    status, output = invoked(folder, "--prompts", folder / "a.txt")
    assert status == 2 and f"holds {name}" in output
    assert [path.name for path in (folder / "out").iterdir()] == [name] and (folder / "out" / name).read_text() == "mine"


def test_a_folder_of_several_losses_is_its_own(target, tokenizer, data, tmp_path):
    for _ in range(2):
        pipeline.train(target, tokenizer, data, tmp_path, CONFIG, ["tvd", "tvd++"])
    with pytest.raises(ValueError, match="steps=1: the run in .* is at step 2"):
        pipeline.train(target, tokenizer, data, tmp_path, RunConfig(**{**vars(CONFIG), "steps": 1}), ["tvd", "tvd++"])


def test_texts_of_a_single_shard_are_held_out_and_not_trained_on(target, tokenizer, tmp_path):
    (path,) = make_data(tmp_path, target, tokenizer, 10, rows=5, new_tokens=8)
    train, held = corpora(tmp_path, 61, 128, 0)
    places = [{(a, b) for _, a, b in corpus.texts} for corpus in (train, held)]
    assert [len(place) for place in places] == [4, 1] and not places[0] & places[1]
    (single,) = make_data(tmp_path / "one", target, tokenizer, 10, new_tokens=4, prompts=["HELLO"])
    with pytest.raises(ValueError, match="one text"):
        corpora(single.parent, 61, 128, 0)


def test_text_of_the_draft_is_the_same_after_a_stop(target, data, tmp_path):
    def made(name, *tokens):
        for count in tokens:
            files = make_on_policy(tmp_path / name, target, target, shard_files(data), count, [60], rows=2, new_tokens=6, seed=1)
        return [Shard.load(path).tokens.tolist() for path in files]

    whole, stopped = made("whole", 150), made("stopped", 1, 150)
    assert whole == stopped and len(whole) > 1 and whole[0] != whole[1]


def test_text_of_the_draft_is_one_of_the_runs_settings(target, tokenizer, data, tmp_path):
    pipeline.train(target, tokenizer, data, tmp_path, CONFIG, on_policy=60)
    assert "60 that the draft wrote" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "drafter.json").read_text())["notes"]["run"]["on_policy"] == 60
    with pytest.raises(ValueError, match="on_policy=60"):
        pipeline.train(target, tokenizer, data, tmp_path, CONFIG)


@pytest.mark.parametrize(("damage", "words"), [(lambda path: path.write_bytes(path.read_bytes()[:1000]), "damaged or cut short"),
                                              (lambda path: shutil.copy(path.parent / "weights", path), "no checkpoint of training")])  # fmt: skip
def test_a_checkpoint_that_is_none_is_refused(target, data, tmp_path, damage, words):
    from safetensors.torch import save_file

    trainer = Trainer(target, data, tmp_path, CONFIG)
    trainer.run()
    save_file({"weight": torch.zeros(2)}, tmp_path / "weights")
    damage(tmp_path / "checkpoint.safetensors")
    with pytest.raises(ValueError, match=words):
        Trainer(target, data, tmp_path, CONFIG)


@pytest.mark.parametrize(("arguments", "words"), [(("--prompts", "missing.jsonl"), "--prompts missing.jsonl: there is no such file"), (("--column", "x"), "--column x:")])
def test_what_the_command_cannot_read_is_named_first(arguments, words):
    result = CliRunner().invoke(app, ["train", "no/such/target", *arguments])
    assert result.exit_code == 2 and words in " ".join(result.output.split())


def test_two_processes_train_one_drafter(folder):
    launcher = Path(sys.executable).with_name("torchrun")
    if not launcher.is_file():
        pytest.skip("torchrun is not beside this Python")
    environment = {**os.environ, "PYTHONPATH": str(Path(hf_specdec.__file__).parents[1]), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = [str(launcher), "--nproc-per-node", "2", "--no-python", sys.executable, "-m", "hf_specdec", *command(folder, "--prompts", folder / "a.txt", "--tokens", "20")]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"README.md", "results.json", "model.safetensors", "checkpoint.safetensors"} <= {path.name for path in (folder / "out").iterdir()}
