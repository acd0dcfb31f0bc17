"""Medusa-2: heads and a changed target, and that everything says so."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec.drafts.medusa import MedusaDraft
from hf_specdec.training import load_drafter
from hf_specdec.training.joint import CHANGED, JointRunConfig, JointTrainer
from hf_specdec.training.pipeline import train

from ..helpers import generated, plain, speculate

CONFIG = dict(heads=2, head=None, steps=60, batch_tokens=256, lr=1e-2, warmup=3, precision="float32", format="bf16", share=1.0, slower=0.3)


@pytest.mark.parametrize("rank", [0, 4], ids=["all layers", "LoRA"])
def test_a_run_makes_another_model_with_heads_that_fit_it_alone(target, tokenizer, data, tmp_path, rank):
    if rank:
        pytest.importorskip("peft")
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    config = JointRunConfig(rank=rank, **CONFIG)
    start = JointTrainer(target, data, tmp_path / "none", config, "tiny").measure()
    half = JointTrainer(target, data, tmp_path, config, "tiny")
    half.run(every=20, until=20)
    (end,) = train(target, tokenizer, data, tmp_path, config, target_name="tiny", every=20)  # goes on
    assert [line["step"] for line in end["history"]] == [20, 40, 60] and end["history"][0] == half.progress.history[0]
    assert end["sampling_acceptance"] > start["sampling_acceptance"] + 0.03 and start["target_agreement"] == 1.0
    assert 0.5 < end["target_agreement"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items()) and not hasattr(target.config, "hf_specdec_changed")

    changed = AutoModelForCausalLM.from_pretrained(tmp_path / CHANGED)
    moved = {name for name, tensor in changed.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved and not moved & {"model.embed_tokens.weight", "lm_head.weight"}
    changed.generation_config.do_sample = False
    draft, rows = load_drafter(tmp_path, changed), [[5, 6, 7, 8], [9, 10]]
    assert isinstance(draft, MedusaDraft)
    assert generated(speculate(changed, rows, draft, 4), rows) == plain(changed, rows)

    with pytest.raises(ValueError, match="changed copy of tiny"):
        load_drafter(tmp_path, target)
    assert "changed by Medusa-2" in json.loads((tmp_path / CHANGED / "config.json").read_text())["hf_specdec_changed"]
    for card in (tmp_path / "README.md", tmp_path / CHANGED / "README.md"):
        assert "relative to the changed model only" in card.read_text()
    assert "the changed target's likeliest token" in (tmp_path / "README.md").read_text()


def test_lora_without_peft_says_what_to_install(target, data, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        JointTrainer(target, data, tmp_path, JointRunConfig(rank=4, **CONFIG))


@pytest.mark.parametrize(("name", "value"), [("rank", -1), ("rank", True), ("share", 0), ("slower", 2)])
def test_numbers_are_checked(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        JointRunConfig(**{name: value})
