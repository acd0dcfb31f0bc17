"""Training look-ahead embeddings, storing and loading them."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.drafts.pass_draft import PassDraft
from hf_specdec.training import load_drafter, train
from hf_specdec.training.look_ahead import LookAheadRunConfig, LookAheadStudent, LookAheadTrainer

from ..conformance.builders import look_ahead
from ..helpers import build, generated, plain, speculate


@pytest.mark.parametrize("sliding", [None, 3])
def test_training_computes_what_the_target_says_behind_its_text(target, sliding):
    if sliding:
        target = build("mistral", 0, vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, sliding_window=sliding)
    look, tokens = look_ahead(target, 2), torch.tensor([[5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6]])
    logits = LookAheadStudent(look, target, False)(tokens, torch.tensor([5, 6 + 4]))
    for j, own in enumerate(logits):
        for n, (row, column) in enumerate([(0, 5), (1, 4)]):
            text = target.get_input_embeddings()(tokens[row, : column - j])
            with torch.no_grad():
                other = target(inputs_embeds=torch.cat([text, look.embeddings[: j + 1]])[None]).logits[0, -1]
            torch.testing.assert_close(own[n], other, atol=1e-4, rtol=1e-4)


def test_a_run_learns_goes_on_after_a_stop_and_gives_a_draft(target, data, tmp_path):
    config = LookAheadRunConfig(heads=2, steps=60, batch_tokens=256, lr=3e-2, warmup=3, precision="float32")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    for p in target.parameters():
        p.requires_grad_(True)
    trainer = LookAheadTrainer(target, data, tmp_path, config, "tiny")
    start = trainer.measure()
    trainer.run(every=30, until=30)
    trainer = LookAheadTrainer(target, data, tmp_path, config, "tiny")
    assert trainer.progress.step == 30
    trainer.run(every=30)
    end = trainer.measure()
    assert end["sampling_acceptance"] > start["sampling_acceptance"] + 0.02, (start, end)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in target.parameters())
    trainer.finish()
    assert (tmp_path / "model.safetensors").stat().st_size < 1000
    draft = load_drafter(tmp_path, target)
    assert isinstance(draft, PassDraft) and draft.heads.rates == end["rank_rates"] and draft.heads.rates[0][0] == 1.0
    torch.testing.assert_close(draft.heads.embeddings.data, trainer.draft.embeddings.data, atol=0.02, rtol=0.01)
    rows = [[5, 6, 7, 8], [9, 10]]
    out = speculate(target, rows, PassDraft(draft.heads, target, 6), 4)
    assert generated(out, rows) == plain(target, rows)


@pytest.mark.parametrize(("name", "value"), [("heads", 0), ("heads", True), ("head", 8192)])
def test_numbers_are_checked(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        LookAheadRunConfig(**{name: value})


def test_a_target_that_makes_its_own_masks_is_refused(anyones_data, tmp_path):
    target = build("bloom", 0, "eager", vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(ValueError, match="target: BloomForCausalLM"):
        LookAheadTrainer(target, anyones_data, tmp_path, LookAheadRunConfig())


def test_the_command_trains_some_that_the_other_commands_take(trained, target, tmp_path):
    assert "2 look-ahead embeddings" in trained("--look-ahead", "2")
    assert load_drafter(tmp_path / "out", target).heads.depth == 3


def test_embeddings_write_no_text_of_their_own(target, tokenizer, data, tmp_path):
    with pytest.raises(ValueError, match="^on_policy: look-ahead embeddings"):
        train(target, tokenizer, data, tmp_path / "out", LookAheadRunConfig(steps=2, on_policy=10))
    assert not (tmp_path / "out").exists()
