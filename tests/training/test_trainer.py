"""The run: it learns, it can be stopped at any step and ends where it would have, and says what it reached."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from functools import partial
from io import StringIO

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.commands.train import _going_on
from hf_specdec.training import trainer as trainer_module
from hf_specdec.training import LOSSES, FeatureRunConfig, FeatureTrainer, RunConfig, Trainer, drafter, feature_trainer, heads, load_drafter, train
from hf_specdec.training.batches import Corpus, frequent_tokens, split
from hf_specdec.training.pipeline import table
from hf_specdec.training.shared import own_parameters
from hf_specdec.training.heads import HeadsRunConfig, HeadsTrainer
from hf_specdec.training.look_ahead import LookAheadRunConfig, LookAheadTrainer
from hf_specdec.training.shards import shard_files
from ..helpers import tiny_llama

CONFIG = RunConfig(layers=(1,), head=None, steps=40, batch_tokens=256, lr=3e-3, warmup=3, precision="float32", format="bf16")


def weights(trainer):
    return [p.detach().clone() for p in own_parameters(trainer.draft)]


def test_training_raises_held_out_acceptance(target, data, tmp_path):
    trainer = Trainer(target, data, tmp_path, RunConfig(**{**vars(CONFIG), "steps": 90, "lr": 1e-2}), "tiny")
    before = trainer.measure()
    trainer.run(every=30)
    after = trainer.measure()
    assert after["greedy_acceptance"] > before["greedy_acceptance"] + 0.05, (before, after)
    assert after["sampling_acceptance"] > before["sampling_acceptance"] + 0.05, (before, after)
    assert [entry["step"] for entry in trainer.progress.history] == [30, 60, 90]


def test_the_targets_own_parts_are_not_trained(target, data, tmp_path):
    before = {name: p.clone() for name, p in target.state_dict().items()}
    Trainer(target, data, tmp_path, CONFIG).run(every=40)
    assert all(torch.equal(before[name], p) for name, p in target.state_dict().items())


def test_a_stopped_run_ends_where_an_unbroken_one_does(target, data, tmp_path):
    whole = Trainer(target, data, tmp_path / "whole", CONFIG)
    whole.run(every=15)

    class Stop(Exception):
        pass

    def stop(progress, loss):
        if progress.step == 22:
            raise Stop

    with pytest.raises(Stop):
        Trainer(target, data, tmp_path / "parts", CONFIG).run(stop, every=15)
    rest = Trainer(target, data, tmp_path / "parts", CONFIG)
    assert rest.progress.step == 15  # the last checkpoint
    rest.run(every=15)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(rest)))


def test_ctrl_c_keeps_the_step_it_was_at(target, data, tmp_path):
    def stop(progress, loss):
        if progress.step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(target, data, tmp_path, CONFIG).run(stop, every=15)
    assert Trainer(target, data, tmp_path, CONFIG).progress.step == 7


def test_ctrl_c_in_the_midst_of_a_step_waits_for_its_end(target, data, tmp_path, monkeypatch):
    whole = Trainer(target, data, tmp_path / "whole", CONFIG)
    whole.run()
    step, handler = torch.optim.AdamW.step, signal.getsignal(signal.SIGINT)

    def interrupted(optimizer, *given, **options):
        signal.raise_signal(signal.SIGINT)
        return step(optimizer, *given, **options)

    run = Trainer(target, data, tmp_path / "parts", CONFIG)
    run.run(until=6)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        run.run()
    assert run.progress.step == 7 and signal.getsignal(signal.SIGINT) is handler
    rest = Trainer(target, data, tmp_path / "parts", CONFIG)
    rest.run()
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(rest)))


@pytest.mark.parametrize("steps", [7, 30])
def test_ctrl_c_in_the_last_measurement_leaves_it_to_the_next_call(target, tokenizer, data, tmp_path, monkeypatch, steps):
    config, measure = replace(CONFIG, steps=steps), Trainer.measure

    def stop(trainer, *_):
        if trainer.progress.step == steps:
            raise KeyboardInterrupt
        return measure(trainer)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "measure", stop)
        train(target, tokenizer, data, tmp_path, config, every=20)
    (result,) = train(target, tokenizer, data, tmp_path, config, every=20)
    assert result["step"] == steps and result["greedy_acceptance"] > 0
    (again,) = train(target, tokenizer, data, tmp_path, config, every=20)
    assert again["history"] == result["history"]


def test_the_folder_of_another_run_is_refused_and_left_alone(target, data, tmp_path):
    Trainer(target, data, tmp_path, CONFIG).keep()
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(ValueError, match="lr=0.003"):
        Trainer(target, data, tmp_path, RunConfig(**{**vars(CONFIG), "lr": 1e-4}))
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_what_learnt_of_the_target_before_learns_afterwards(tokenizer, data, tmp_path):
    target = tiny_llama(3)
    train(target, tokenizer, data, tmp_path, RunConfig(**{**vars(CONFIG), "steps": 1, "head": None}), target_name="tiny")
    assert all(p.requires_grad for p in target.parameters())


def test_one_drafter_per_loss_with_a_card_and_a_table(target, tokenizer, data, tmp_path):
    config = RunConfig(**{**vars(CONFIG), "steps": 6, "head": 40, "format": "mxint8"})
    results = train(target, tokenizer, data, tmp_path, config, ["forward_kl", "tvd++"], "tiny", every=3)
    assert {result["loss"] for result in results} == {"forward_kl", "tvd++"}
    assert results[0]["greedy_acceptance"] >= results[1]["greedy_acceptance"]
    for result in results:
        draft = load_drafter(result["out"], target)
        assert len(draft.get_output_embeddings().ids) == 40
        card = open(f"{result['out']}/README.md").read()
        assert f"{result['greedy_acceptance']:.3f}" in card and "tiny" in card
        notes = json.load(open(f"{result['out']}/drafter.json"))["notes"]
        assert notes["run"]["loss"] == result["loss"] and 0.5 < notes["head_coverage"] <= 1


def test_the_second_half_can_be_on_the_drafts_own_text(target, tokenizer, data, tmp_path):
    config = RunConfig(**{**vars(CONFIG), "steps": 8})
    train(target, tokenizer, data, tmp_path, config, target_name="tiny", on_policy=150)
    assert len(shard_files(tmp_path / "on_policy")) >= 1


def test_the_drafts_own_text_comes_in_after_any_number_of_epochs_and_a_stop_changes_nothing(target, tokenizer, data, tmp_path):
    config = replace(CONFIG, steps=120, batch_tokens=512)
    epoch = len(Corpus(split(data)[0], 61, 512, config.seed).order(0))
    assert epoch * 4 < config.steps // 2  # so that half the steps are several epochs
    train(target, tokenizer, data, tmp_path / "whole", config, on_policy=150, every=1000)

    def stop(trainer, *_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "use", stop)
        train(target, tokenizer, data, tmp_path / "parts", config, on_policy=150, every=1000)
    train(target, tokenizer, data, tmp_path / "parts", config, on_policy=150, every=1000)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_batches_hold_every_text_once_an_epoch(target, data):
    parts, held = split(data)
    assert not {part.path for part in parts} & {part.path for part in held}
    corpus = Corpus(parts, 61, 256, seed=1)
    for epoch in (0, 1):
        assert sorted(sum(corpus.order(epoch), [])) == list(range(len(corpus.texts)))
    assert corpus.order(0) != corpus.order(1) and corpus.order(1) == Corpus(parts, 61, 256, seed=1).order(1)


def test_of_a_long_text_the_last_tokens_are_kept(data):
    parts, _ = split(data)
    whole, cut = (Corpus(parts, 61, 256, seed=1, longest=longest) for longest in (512, 10))
    assert [b for _, _, b in whole.texts] == [b for _, _, b in cut.texts]
    assert all(b - a <= 10 for _, a, b in cut.texts) and cut.tokens < whole.tokens


def test_laws_that_no_place_predicts_are_left_out(data):
    parts, _ = split(data)
    whole, late = (Corpus(parts, 61, 256, seed=1, longest=24, first=first) for first in (0, 3))
    places = []
    for corpus in (whole, late):
        batch = corpus.batch(list(range(len(corpus.texts))))
        places.append([(place // batch.tokens.shape[1], place % batch.tokens.shape[1]) for place in batch.where.tolist()])
    assert min(column for _, column in places[0]) == 0 and places[1] == [place for place in places[0] if place[1] >= 3]
    short = Corpus(parts, 61, 256, seed=1, longest=3, first=3)  # a text without others keeps them
    assert sorted(set((short.batch(list(range(len(short.texts)))).where // 3).tolist())) == list(range(len(short.texts)))


@pytest.mark.parametrize(("kind", "config", "first"), [
    (Trainer, RunConfig, 0), (FeatureTrainer, FeatureRunConfig, 1), (HeadsTrainer, partial(HeadsRunConfig, heads=3), 3),
    (LookAheadTrainer, partial(LookAheadRunConfig, heads=2), 2),
])  # fmt: skip
def test_a_draft_learns_no_law_that_comes_before_its_first_place(target, data, tmp_path, kind, config, first):
    trainer = kind(target, data, tmp_path, config(steps=1, head=None), "tiny")
    assert trainer.corpus.first == trainer.held.first == first


def test_the_head_keeps_what_the_target_likes_most(data):
    parts, _ = split(data)
    ids, coverage = frequent_tokens(parts, 61, 30)
    _, more = frequent_tokens(parts, 61, 61)
    assert len(ids) == 30 and torch.equal(ids, ids.sort().values) and 0.3 < coverage < more == pytest.approx(1)


@pytest.mark.parametrize("change", [{"loss": "guess"}, {"precision": "int4"}, {"steps": 0}, {"batch_tokens": 0}, {"head": 0}, {"unroll": 0},
                                    {"lr": float("nan")}, {"lr": -1.0}, {"lr": 0.0}, {"lr": float("inf")}])
def test_bad_settings_are_named(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        (FeatureRunConfig if "unroll" in change else RunConfig)(**change)


def test_a_16_bit_target_and_a_folder_without_shards_are_refused(target, data, tmp_path):
    import copy

    with pytest.raises(ValueError, match="float32"):
        Trainer(copy.deepcopy(target).bfloat16(), data, tmp_path, CONFIG)
    with pytest.raises(ValueError, match="no training shards"):
        Trainer(target, tmp_path, tmp_path, CONFIG)


def test_the_command_trains_goes_on_and_refuses(saved, target, tmp_path):
    arguments = ["train", str(saved), "--out", str(tmp_path / "out"), "--tokens", "400", "--steps", "4", "--layers", "1",
                 "--head", "40", "--batch-tokens", "128", "--new-tokens", "12", "--format", "bf16", "--loss"]
    run = CliRunner().invoke(app, [*arguments, "tvd"])
    assert run.exit_code == 0, run.output
    assert load_drafter(tmp_path / "out", target) is not None
    lines = run.stderr.splitlines()  # no terminal: lines in the place of bars
    (made,) = [found[1] for line in lines if (found := re.fullmatch(r"Tokens of training text 400 of 400, took \d+ s \(([\d,]+) with prompts, in whole shards of 48 texts\)", line))]
    assert f"| training text | {made} tokens with their prompts, held-out ones included; " in (tmp_path / "out" / "README.md").read_text()
    assert [line for line in lines if re.fullmatch(r"Tokens of training text \d+ of 400, about \d+ s left", line)]  # inside of a shard
    (last,) = [line for line in lines if line.startswith("Training, tvd 4 of 4, took ")]
    assert re.search(r"\(loss \d+\.\d{3}, held out \d\.\d{3}\)$", last)
    bad = CliRunner().invoke(app, [*arguments, "guess"])
    assert bad.exit_code == 2 and "guess" in bad.output and all(name in bad.output for name in LOSSES)
    other = CliRunner().invoke(app, [*arguments, "tvd", "--lr", "0.5"])
    assert other.exit_code == 2 and "holds a run" in other.output


def test_the_command_trains_a_feature_drafter_that_the_other_commands_take(saved, target, tmp_path):
    asked = ["--features", "--tokens", "400", "--steps", "4", "--head", "40", "--batch-tokens", "128", "--new-tokens", "12", "--format", "bf16"]
    run = CliRunner().invoke(app, ["train", str(saved), "--out", str(tmp_path / "out"), *asked])
    assert run.exit_code == 0, run.output
    assert re.search(r"The target's hidden states, by shard (\d+) of \1, took \d+ s\n", run.stderr)
    assert load_drafter(tmp_path / "out", target).name == "feature" and "hidden states after layers" in (tmp_path / "out" / "README.md").read_text()
    used = CliRunner().invoke(app, ["generate", str(saved), "--draft", str(tmp_path / "out"), "--prompt", "HELLO", "--max-new-tokens", "8"])
    assert used.exit_code == 0, used.output
    bad = CliRunner().invoke(app, ["train", str(saved), "--features", "--on-policy", "10"])
    assert bad.exit_code == 2 and "--on-policy" in bad.output
    on = CliRunner().invoke(app, ["train", str(saved), "--out", str(tmp_path / "on"), "--data", str(tmp_path / "out" / "data"), *asked, "--lr", "1e-9",
                                  "--begin", str(tmp_path / "out"), "--single", "2"])
    assert on.exit_code == 0, on.output
    one, two = (load_drafter(tmp_path / name, target).model.state_dict() for name in ("out", "on"))  # at that rate of learning, where it began
    assert {name: float((weight - two[name]).abs().max()) for name, weight in one.items() if not torch.allclose(weight, two[name], atol=1e-6)} == {}


@pytest.mark.parametrize("arguments", [("--layers", "0,9"), ("--layers=-9",), ("--features", "--layers", "7")], ids=" ".join)
def test_layers_that_the_target_lacks_are_refused_before_any_text_is_written(saved, target, data, tmp_path, arguments, monkeypatch):
    monkeypatch.setattr(feature_trainer, "make_features", lambda *_: pytest.fail("the target was asked"))
    bad = CliRunner().invoke(app, ["train", str(saved), "--out", str(tmp_path / "out"), *arguments])
    assert bad.exit_code == 2 and "the target has layers 0..1, or -2..-1 from its end" in bad.output and not (tmp_path / "out").exists()
    kind, config = (FeatureTrainer, FeatureRunConfig) if "--features" in arguments else (Trainer, RunConfig)
    with pytest.raises(ValueError, match="layers=9: the target has"):
        kind(target, data, tmp_path, config(layers=(0, 9)))


@pytest.mark.parametrize(("arguments", "words"), [
    (("--begin", "nowhere"), "--begin nowhere is no drafter"), (("--single", "3"), "--single 3: a feature drafter"),
    (("--features", "--begin", "nowhere"), "--begin nowhere is no drafter"), (("--features", "--single", "9", "--steps", "8"), "--single 9"),
    (("--heads", "2", "--begin", "smollm2_drafter"), "--begin smollm2_drafter: only a draft with layers of its own"), (("--lr", "nan"), "--lr nan must be"),
])
def test_what_does_not_go_together_is_refused_before_anything_is_loaded(arguments, words):
    bad = CliRunner().invoke(app, ["train", "no/such/target", *arguments])
    assert bad.exit_code == 2 and words in bad.output
    assert _going_on(True, [], None, 2, 4) == {"begin": "", "single": 2} and _going_on(False, ["--heads"], None, 0, 4) == {"begin": ""}


def test_an_independent_run_goes_on_from_another_drafter(target, data, tmp_path):
    other = drafter.build(target, [0])
    for p in own_parameters(other):
        p.data += 0.1 * torch.randn_like(p)
    drafter.save(other, tmp_path / "first", "tiny", "bf16")
    draft = Trainer(target, data, tmp_path / "next", replace(CONFIG, layers=(-1,), begin=str(tmp_path / "first")), "tiny").draft
    for new, old in zip(own_parameters(draft), own_parameters(other), strict=True):
        torch.testing.assert_close(new, old, atol=0.02, rtol=0.02)


def test_a_checkpoint_from_before_there_was_an_option_is_gone_on_with(target, data, tmp_path, monkeypatch):
    first = Trainer(target, data, tmp_path, CONFIG)
    first.run(every=5, until=5)
    whole = trainer_module.asdict
    monkeypatch.setattr(trainer_module, "asdict", lambda value: {name: own for name, own in whole(value).items() if name != "begin"})
    first.keep()
    monkeypatch.undo()
    assert Trainer(target, data, tmp_path, CONFIG).progress.step == 5
    drafter.save(first.draft, tmp_path / "other", "tiny", "bf16")
    with pytest.raises(ValueError, match="holds a run with begin=''"):
        Trainer(target, data, tmp_path, replace(CONFIG, begin=str(tmp_path / "other")))


@pytest.mark.parametrize("kind", ["two layers", "reads states", "heads"])
def test_a_drafter_that_a_run_cannot_go_on_from_is_refused(target, saved, data, tmp_path, kind):
    made = drafter.build(target, [0, 1] if kind == "two layers" else [0], None, (1, 2) if kind == "reads states" else ())
    if kind == "heads":
        heads.save(heads.build(target, 2), target.get_input_embeddings().weight, tmp_path / "first", "tiny", "bf16")
    else:
        drafter.save(made, tmp_path / "first", "tiny", "bf16")
    with pytest.raises(ValueError, match="begin: a drafter with 1 layers that reads no hidden states is needed; this one"):
        Trainer(target, data, tmp_path / "next", replace(CONFIG, layers=(-1,), begin=str(tmp_path / "first")), "tiny")
    with pytest.raises(ValueError, match="only a draft with layers of its own"):
        LookAheadRunConfig(begin="smollm2_drafter")
    with pytest.raises(ValueError, match="begin='nowhere' is no drafter"):
        Trainer(target, data, tmp_path / "next", replace(CONFIG, begin="nowhere"), "tiny")
    bad = CliRunner().invoke(app, ["train", str(saved), "--out", str(tmp_path / "next"), "--layers", "0", "--begin", str(tmp_path / "first")])
    assert bad.exit_code == 2 and "--begin: a drafter with 1 layers" in bad.output and not (tmp_path / "next").exists()  # before any text is written


def test_a_run_of_another_target_is_not_gone_on_with(target, data, tmp_path, monkeypatch):
    trainer = Trainer(target, data, tmp_path, CONFIG)
    trainer.step()
    trainer.keep()
    Trainer(target, data, tmp_path, CONFIG)
    monkeypatch.setattr("hf_specdec.training.trainer.check_target", lambda *_: None)  # as if the shards did not say whose they are
    with pytest.raises(ValueError, match="^out: .* holds a run of another target"):
        Trainer(tiny_llama(4), data, tmp_path, CONFIG)


@pytest.mark.parametrize("every", [1, 40])
def test_a_run_that_diverges_ends_and_keeps_nothing_of_it(target, data, tmp_path, every):
    trainer = Trainer(target, data, tmp_path, RunConfig(**{**vars(CONFIG), "lr": 1e30, "warmup": 0}))
    with pytest.raises(ValueError, match=r"^lr=1e\+30: the run has diverged"):
        trainer.run(every=every)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", [40, 80])
def test_the_folder_in_the_table_of_results_is_whole_however_narrow_the_terminal(width):
    console, folder = Console(record=True, width=width, file=StringIO()), "/a/long/path/" * 8
    console.print(table([{"loss": "forward_kl", "step": 5, "greedy_acceptance": 0.5, "sampling_acceptance": 0.6, "out": folder}]))
    lines = [line.split("│")[-2].strip() for line in console.export_text().splitlines() if line.startswith("│")]
    assert "".join(lines) == folder
