"""What a run does with what it finds: held-out text stays unseen, its own checkpoint is gone on with, files of others are left alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.training import RunConfig, Trainer, load_drafter, train
from hf_specdec.training.batches import Corpus, frequent_tokens, split
from hf_specdec.training.data import make_data
from hf_specdec.training.joint import CHANGED, JointRunConfig
from hf_specdec.training.pipeline import check_out
from hf_specdec.training.shards import Shard, shard_files

CONFIG = RunConfig(layers=(1,), head=None, steps=4, batch_tokens=128, precision="float32", format="bf16")


@pytest.fixture
def single(data, tmp_path):
    """A folder with one shard."""
    (tmp_path / "single").mkdir()
    shutil.copy(shard_files(data)[0], tmp_path / "single")
    return tmp_path / "single"


def test_texts_of_the_only_shard_are_held_out(target, tokenizer, single, tmp_path):
    (parts, held), shard = split(single), Shard.load(shard_files(single)[0])
    assert parts[0].texts == tuple(range(len(shard) - 1)) and held[0].texts == (len(shard) - 1,)
    trained, kept = Corpus(parts, 61, 128, 0), Corpus(held, 61, 128, 0)
    assert len(trained.texts) + len(kept.texts) == len(shard) and not {b for _, _, b in trained.texts} & {b for _, _, b in kept.texts}
    last = slice(int(shard.starts[-2]), int(shard.starts[-1]))
    shard.ids[last], shard.logprobs[last] = 7, 0.0  # what is held out has no say in the head
    shard.save(shard_files(single)[0])
    assert 7 not in frequent_tokens(parts, 61, 1)[0] and 7 in frequent_tokens(held, 61, 1)[0]
    (result,) = train(target, tokenizer, single, tmp_path / "out", CONFIG, on_policy=60)
    notes = json.loads((tmp_path / "out" / "drafter.json").read_text())["notes"]
    assert notes["held_out_tokens"] == kept.tokens and notes["trained_tokens"] == trained.tokens
    assert notes["run"]["on_policy"] == 60 and "at least 60 tokens" in (tmp_path / "out" / "README.md").read_text()


def test_a_single_text_is_refused_as_none_can_be_held_out(target, tokenizer, tmp_path):
    make_data(tmp_path / "data", target, tokenizer, 5, 1, 5, prompts=["HELLO"])
    with pytest.raises(ValueError, match="^data: .* holds a single text, and one has to be held out"):
        Trainer(target, tmp_path / "data", tmp_path, CONFIG)


def described(path) -> tuple[dict, dict]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


@pytest.mark.parametrize("harm", ["cut", "empty", "a model", "another draft", "no json"])
def test_a_checkpoint_that_is_none_is_named_with_the_remedy(target, data, tmp_path, harm):
    Trainer(target, data, tmp_path, CONFIG).keep()
    path = tmp_path / "checkpoint.safetensors"
    tensors, about = described(path)
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:1000])
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "a model":
        save_file(tensors, path, metadata={"format": "pt"})
    elif harm == "another draft":
        save_file(tensors | {"weight.0": torch.zeros(3)}, path, metadata=about)
    else:
        save_file(tensors, path, metadata=about | {"config": "{"})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="checkpoint.safetensors: damaged, or not the checkpoint of a run .*; move it away, or name another --out"):
        Trainer(target, data, tmp_path, CONFIG)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["README.md", "config.json", "model.safetensors", "results.json"])
def test_a_folder_of_others_is_left_alone(target, tokenizer, data, tmp_path, name):
    (tmp_path / name).write_text("mine")
    for losses in ([], ["tvd", "forward_kl"]) if name == "results.json" else ([],):
        with pytest.raises(ValueError, match=f"^out: .* holds {name}, which the run would overwrite"):
            train(target, tokenizer, data, tmp_path, CONFIG, losses)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_with_a_drafter_or_with_those_of_several_losses_is_the_runs_own(data, tmp_path):
    (tmp_path / "README.md").write_text("")
    (tmp_path / "drafter.json").write_text("{}")
    check_out(tmp_path, data, CONFIG, ["tvd"])
    (tmp_path / "several" / "tvdpp").mkdir(parents=True)
    (tmp_path / "several" / "results.json").write_text("[]")
    (tmp_path / "several" / "tvdpp" / "drafter.json").write_text("{}")
    check_out(tmp_path / "several", data, CONFIG, ["tvd", "forward_kl"])
    (tmp_path / "models" / CHANGED).mkdir(parents=True)
    check_out(tmp_path / "models", data, CONFIG, ["tvd"])
    with pytest.raises(ValueError, match=f"holds {CHANGED}, which the run would overwrite"):
        check_out(tmp_path / "models", data, JointRunConfig(), ["tvd"])


def test_a_run_goes_on_with_more_and_refuses_what_it_was_not(target, data, tmp_path):
    few, other = tmp_path / "few", tmp_path / "other"
    few.mkdir()
    for path in shard_files(data)[:2]:
        shutil.copy(path, few)
    Trainer(target, few, tmp_path, CONFIG).run()
    for path in shard_files(data)[2:]:
        shutil.copy(path, few)
    assert Trainer(target, few, tmp_path, replace(CONFIG, steps=8)).progress.step == 4  # more steps, more shards
    with pytest.raises(ValueError, match="^steps=2: the run in .* is at step 4 already; ask for more steps"):
        Trainer(target, few, tmp_path, replace(CONFIG, steps=2))
    with pytest.raises(ValueError, match="holds a run with on_policy=0, not 100"):
        Trainer(target, few, tmp_path, replace(CONFIG, on_policy=100))
    other.mkdir()
    shutil.copy(shard_files(data)[2], other / "000000.safetensors")
    with pytest.raises(ValueError, match="^data: .*other/000000.safetensors is not what the run in .* was trained on; name the data that it was"):
        Trainer(target, other, tmp_path, CONFIG)
    (other / "000000.safetensors").rename(other / "renamed.safetensors")
    shutil.copy(shard_files(data)[3], other / "also.safetensors")
    with pytest.raises(ValueError, match="^data: .*other/also.safetensors is not"):
        Trainer(target, other, tmp_path, CONFIG)


def test_a_checkpoint_of_an_earlier_version_is_gone_on_with(target, data, tmp_path):
    Trainer(target, data, tmp_path, CONFIG).run()
    path = tmp_path / "checkpoint.safetensors"
    tensors, about = described(path)
    config = json.loads(about["config"])
    del about["data"], config["on_policy"]
    save_file(tensors, path, metadata=about | {"config": json.dumps(config)})
    assert Trainer(target, data, tmp_path, replace(CONFIG, on_policy=100)).progress.step == 4


@pytest.mark.parametrize(("arguments", "words"), [
    (("--column", "nosuch"), "--column nosuch: it is a column of --prompts"), (("--prompts", "missing.jsonl"), "prompts: missing.jsonl is not a file"),
    (("--head", "0"), "holds README.md, which the run would overwrite"),
], ids=["column", "missing", "foreign"])
def test_the_command_refuses_before_anything_is_loaded(tmp_path, arguments, words):
    out = tmp_path / "out"
    if "--head" in arguments:
        out.mkdir()
        (out / "README.md").write_text("mine")
    bad = CliRunner().invoke(app, ["train", "no/such/target", "--out", str(out), *arguments])
    assert bad.exit_code == 2 and words in bad.output and "Loading" not in bad.output


def test_several_losses_go_on_in_their_folder(target, tokenizer, data, tmp_path):
    for steps in (2, 4):
        results = train(target, tokenizer, data, tmp_path, replace(CONFIG, steps=steps), ["tvd", "tvd++"])
    assert [result["step"] for result in results] == [4, 4] and load_drafter(tmp_path / "tvdpp", target) is not None


def test_a_folder_with_an_export_is_refused(data, tmp_path):
    (tmp_path / "vllm_speculative_config.json").write_text("{}")
    with pytest.raises(ValueError, match="^out: .* holds vllm_speculative_config.json, which `hf-specdec export` wrote for vLLM; name another --out"):
        check_out(tmp_path, data, CONFIG, ["tvd"])
