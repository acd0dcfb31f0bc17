"""Training heads, storing and loading them."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.drafts.medusa import MedusaDraft
from hf_specdec.training import load_drafter
from hf_specdec.training.heads import HeadsRunConfig, HeadsStudent, HeadsTrainer, build, save

from ..conformance.builders import medusa_heads
from ..helpers import generated, plain, speculate, tiny_llama


def test_a_head_is_trained_on_the_state_as_far_back_as_it_looks_ahead(target):
    heads = medusa_heads(target, 3)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6]])
    states = torch.randn(2, 6, 32)
    logits = HeadsStudent(heads, False)(tokens, states, torch.tensor([5, 6 + 4]))
    for d, own in enumerate(logits):
        torch.testing.assert_close(own[0], heads(states[0, 5 - d - 1])[d])
        torch.testing.assert_close(own[1], heads(states[1, 4 - d - 1])[d])


def test_a_run_learns_goes_on_after_a_stop_and_gives_a_draft(target, data, tmp_path):
    learning = [p.requires_grad for p in target.parameters()]
    config = HeadsRunConfig(heads=2, head=None, steps=120, batch_tokens=256, lr=1e-2, warmup=3, precision="float32", format="bf16")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    trainer = HeadsTrainer(target, data, tmp_path, config, "tiny")
    start = trainer.measure()
    trainer.run(every=60, until=60)
    trainer = HeadsTrainer(target, data, tmp_path, config, "tiny")
    assert trainer.progress.step == 60
    trainer.run(every=60)
    end = trainer.measure()
    assert end["sampling_acceptance"] > start["sampling_acceptance"] + 0.04, (start, end)  # two tokens ahead, of a random target
    assert end["greedy_acceptance"] > start["greedy_acceptance"]
    assert len(end["greedy_by_step"]) == 2 and end["rank_rates"][0][0] == pytest.approx(end["greedy_acceptance"], abs=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert [(p.requires_grad, None) for p in target.parameters()] == [(own, p.grad) for own, p in zip(learning, target.parameters())]
    trainer.finish()
    draft = load_drafter(tmp_path, target)
    assert isinstance(draft, MedusaDraft) and draft.heads.rates == end["rank_rates"]
    rows = [[5, 6, 7, 8], [9, 10]]
    out = speculate(target, rows, MedusaDraft(draft.heads, target, 6), 4)
    assert generated(out, rows) == plain(target, rows)


def test_steps_of_one_head_alone_are_none_of_theirs(target, data, tmp_path):
    """`single` is of drafters that go on from their own output."""
    settings = dict(heads=2, head=None, steps=2, batch_tokens=256, precision="float32", format="bf16")
    one, both = (HeadsTrainer(target, data, tmp_path / str(single), HeadsRunConfig(single=single, **settings), "tiny") for single in (1, 0))
    assert one.step() == both.step()


@pytest.mark.parametrize(("format", "ids"), [("bf16", None), ("mxint8", torch.arange(40))], ids=["bf16, whole", "mxint8, pruned"])
def test_what_is_stored_is_what_is_loaded(target, tmp_path, format, ids):
    heads = build(target, 3, 2, ids)
    torch.manual_seed(0)
    for parameter in heads.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    save(heads, target.get_input_embeddings().weight, tmp_path, "tiny", format)
    again = load_drafter(tmp_path, target).heads
    states = torch.randn(4, 32)
    assert (again.ids is None) == (ids is None)
    torch.testing.assert_close(again(states), heads(states), atol=0.3, rtol=0.1)
    assert float((again(states) - heads(states)).detach().abs().mean()) < 0.05


def test_heads_of_another_target_and_of_another_kind_are_refused(target, tmp_path):
    save(build(target, 2), target.get_input_embeddings().weight, tmp_path, "tiny")
    with pytest.raises(ValueError, match="this target has another one"):
        load_drafter(tmp_path, tiny_llama(4))
    about = json.loads((tmp_path / "drafter.json").read_text())
    (tmp_path / "drafter.json").write_text(json.dumps(about | {"heads": 3}))
    with pytest.raises(ValueError, match="does not fit drafter.json"):
        load_drafter(tmp_path, target)
    (tmp_path / "drafter.json").write_text(json.dumps(about | {"kind": "oracle"}))
    with pytest.raises(ValueError, match="'oracle' is not known"):
        load_drafter(tmp_path, target)


@pytest.mark.parametrize(("name", "value"), [("heads", 0), ("heads", True), ("blocks", 17), ("blocks", -1)])
def test_numbers_of_heads_and_blocks_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        HeadsRunConfig(**{name: value})


def test_the_command_trains_heads_that_the_other_commands_take(trained, saved, target, tmp_path):
    assert "2 heads of 1 residual block(s)" in trained("--heads", "2", "--head", "40", "--format", "bf16")
    assert load_drafter(tmp_path / "out", target).heads.depth == 2
    bad = CliRunner().invoke(app, ["train", str(saved), "--heads", "2", "--features"])
    assert bad.exit_code == 2 and "--heads: it takes none of the target's layers" in bad.output and bad.output.strip().endswith("leave out --features.")
