"""Training a parallel drafter, storing and loading it."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.drafts.parallel import ParallelDraft
from hf_specdec.training import load_drafter
from hf_specdec.training.export import export
from hf_specdec.training.heads import save
from hf_specdec.training.parallel import ParallelRunConfig, ParallelStudent, ParallelTrainer

from ..conformance.builders import block_drafter
from ..helpers import generated, plain, speculate


def test_training_computes_what_drafting_computes(target):
    heads = block_drafter(target, 3)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6]])
    states = torch.randn(2, 6, 64)
    logits = ParallelStudent(heads, False)(tokens, states, torch.tensor([5, 6 + 4]))
    for d, own in enumerate(logits):
        for n, (row, column) in enumerate([(0, 5), (1, 4)]):
            last = column - d - 1
            window = states[row, max(last - 2, 0) : last + 1]
            padded = torch.cat([torch.zeros(3 - len(window), 64), window])
            one = heads.predict(padded[None], tokens[row, last + 1][None], [len(window)])
            torch.testing.assert_close(own[n], one[0, d], atol=1e-4, rtol=1e-4)


def test_a_run_learns_goes_on_after_a_stop_and_gives_a_draft(target, data, tmp_path):
    config = ParallelRunConfig(heads=2, window=4, head=None, steps=80, batch_tokens=256, lr=1e-2, warmup=3, precision="float32", format="bf16")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    trainer = ParallelTrainer(target, data, tmp_path, config, "tiny")
    start = trainer.measure()
    trainer.run(every=40, until=40)
    trainer = ParallelTrainer(target, data, tmp_path, config, "tiny")
    assert trainer.progress.step == 40
    trainer.run(every=40)
    end = trainer.measure()
    assert end["sampling_acceptance"] > start["sampling_acceptance"] + 0.05, (start, end)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    trainer.finish()
    draft = load_drafter(tmp_path, target)
    assert isinstance(draft, ParallelDraft) and draft.heads.rates == end["rank_rates"]
    rows = [[5, 6, 7, 8], [9, 10]]
    out = speculate(target, rows, ParallelDraft(draft.heads, target, 6), 4)
    assert generated(out, rows) == plain(target, rows)


@pytest.mark.parametrize(("format", "ids"), [("bf16", None), ("mxint8", torch.arange(40))], ids=["bf16, whole", "mxint8, pruned"])
def test_what_is_stored_is_what_is_loaded(target, tmp_path, format, ids):
    heads = block_drafter(target, 3, ids)
    save(heads, target.get_input_embeddings().weight, tmp_path, "tiny", format)
    again = load_drafter(tmp_path, target).heads
    states, roots = torch.randn(4, 3, 64), torch.tensor([1, 2, 3, 4])
    ours, theirs = (one.predict(states, roots, [3, 3, 2, 1]) for one in (again, heads))
    assert (again.ids is None) == (ids is None) and again.about == heads.about
    assert float((ours - theirs).detach().abs().mean()) < 0.05 * float(theirs.detach().abs().mean())


def test_vllm_has_no_method_for_it(target, tmp_path):
    save(block_drafter(target), target.get_input_embeddings().weight, tmp_path / "made", "tiny")
    with pytest.raises(ValueError, match="parallel drafter"):
        export(str(tmp_path / "made"), target, tmp_path / "out", 2)


@pytest.mark.parametrize(("name", "value"), [("window", 0), ("window", True), ("heads", 17)])
def test_numbers_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        ParallelRunConfig(**{name: value})


def test_the_command_trains_one_that_the_other_commands_take(trained, saved, target, tmp_path):
    assert "A block of 3 masked places" in trained("--parallel", "3", "--head", "40", "--format", "bf16")
    assert load_drafter(tmp_path / "out", target).heads.depth == 3
    bad = CliRunner().invoke(app, ["train", str(saved), "--heads", "2", "--parallel", "2"])
    assert bad.exit_code == 2 and "--parallel" in bad.output
