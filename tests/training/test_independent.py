"""A draft that is a model of its own, of any config: trained on the target's text, stored and loaded like any model."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, T5Config
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.training.independent import IndependentRunConfig, IndependentTrainer
from hf_specdec.training.shards import Shard, shard_files
from hf_specdec.training.trainer import Trainer
from tests.helpers import enabled, generated, plain, speculate

SHORT = {"steps": 3, "batch_tokens": 128, "warmup": 1}


def config_of(target, folder, kind=GPT2Config, **more):
    more = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 640} | more if kind is GPT2Config else more
    kind(**{"vocab_size": target.config.vocab_size} | more).save_pretrained(folder)
    return str(folder)


def run(target, data, out, **options):
    trainer = IndependentTrainer(target, data, out, IndependentRunConfig(**SHORT | options))
    trainer.run(every=2)
    trainer.finish()
    return trainer


def test_it_learns_and_is_a_model_like_any_other(target, data, tmp_path):
    trainer = run(target, data, tmp_path / "out", model=config_of(target, tmp_path / "shape"), steps=40, lr=1e-2)
    first, last = trainer.progress.history[0], trainer.progress.history[-1]
    assert last["sampling_acceptance"] > first["sampling_acceptance"]
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert draft.config.model_type == "gpt2" and draft.dtype == torch.bfloat16 and draft.config.eos_token_id == target.config.eos_token_id
    rows = [[1, 2, 3, 4]]
    out = speculate(enabled(target), rows, draft, k=3, max_new_tokens=12)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=12)


def test_the_target_may_be_in_16_bit_and_the_weights_depend_on_the_seed(target, data, tmp_path):
    shape = config_of(target, tmp_path / "shape")
    half = type(target)(target.config).to(torch.bfloat16)
    half.load_state_dict(target.state_dict())
    one, other = (run(half, data, tmp_path / str(seed), model=shape, seed=seed).draft.state_dict() for seed in (1, 2))
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_an_existing_model_is_taught_further_and_a_stopped_run_goes_on(target, data, tmp_path):
    start = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=target.config.vocab_size, n_embd=16, n_layer=1, n_head=2, n_positions=640))
    start.save_pretrained(tmp_path / "start")
    unbroken = run(target, data, tmp_path / "a", model=str(tmp_path / "start"), fresh=False, steps=4)
    run(target, data, tmp_path / "b", model=str(tmp_path / "start"), fresh=False, steps=2)
    again = run(target, data, tmp_path / "b", model=str(tmp_path / "start"), fresh=False, steps=4)
    assert again.progress.step == 4
    before = start.state_dict()
    for name, value in unbroken.draft.state_dict().items():
        assert value.shape == before[name].shape and (value - before[name]).abs().max() < 0.05


@pytest.mark.parametrize(("kind", "more", "words"), [
    (GPT2Config, {"vocab_size": 7}, "a vocabulary of 7 tokens"),
    (GPT2Config, {"n_positions": 4}, "4 positions"),
    (T5Config, {}, "no causal language model"),
])  # fmt: skip
def test_configs_that_cannot_be_its_are_refused(target, data, tmp_path, kind, more, words):
    with pytest.raises(ValueError, match=words):
        run(target, data, tmp_path / "out", model=config_of(target, tmp_path / "shape", kind, **more))
    assert not (tmp_path / "out").exists()


def test_positions_have_to_do_for_the_texts_that_are_held_out_too(target, data, tmp_path):
    longest = {path: int(Shard.load(path).starts.diff().max()) for path in shard_files(data)}
    *_, before, last = sorted(longest, key=longest.get)
    (tmp_path / "data").mkdir()
    for name, path in (("0", before), ("1", last)):  # the last shard is held out
        shutil.copy(path, tmp_path / "data" / f"{name}.safetensors")
    with pytest.raises(ValueError, match=f"texts up to {longest[last]}"):
        run(target, tmp_path / "data", tmp_path / "out", model=config_of(target, tmp_path / "shape", n_positions=longest[before]))


@pytest.mark.parametrize(("options", "words"), [
    ({}, "model=''"), ({"model": "x", "layers": (0,)}, "layers="), ({"model": "x", "head": 5}, "head=5"), ({"model": "x", "format": "mxint8"}, "format="),
    ({"model": "x", "begin": "y"}, "begin="),
])  # fmt: skip
def test_options_of_drafts_made_of_the_targets_parts_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        IndependentRunConfig(**options)


def test_the_command_trains_it_says_so_in_the_card_and_checks_the_config_first(saved, target, data, tmp_path, monkeypatch):
    LlamaConfig(vocab_size=target.config.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path / "shape")
    shape, out = str(tmp_path / "shape" / "config.json"), tmp_path / "out"
    common = ["train", str(saved), "--data", str(data), "--tokens", "1", "--steps", "2", "--batch-tokens", "128", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "measure", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        stopped = CliRunner().invoke(app, [*common, "--config", shape])
    assert stopped.exit_code == 130 and "The same command goes on where this one ended." in stopped.output
    result = CliRunner().invoke(app, [*common, "--config", shape])
    assert result.exit_code == 0, result.output
    card = (out / "README.md").read_text()
    assert "a llama of" in card and "shares nothing" in card and "AutoModelForCausalLM.from_pretrained" in card
    assert (out / "tokenizer_config.json").is_file()
    for wrong, words in ((["--config", shape, "--features"], "leave out --features"), (["--config", shape, "--distill", "x"], "leave out --distill"),
                         (["--config", str(tmp_path / "nothing.json")], "there is no file")):
        result = CliRunner().invoke(app, [*common, *wrong])
        assert result.exit_code == 2 and words in " ".join(result.output.split()), result.output
