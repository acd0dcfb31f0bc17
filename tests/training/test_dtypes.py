"""Drafts of targets in 16 bit, of quantised ones and of ones with adapters: what learns does so in float32, and ends in the target's dtype."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_specdec
from hf_specdec.training import load_drafter, train
from hf_specdec.training.eagle3 import Eagle3RunConfig
from hf_specdec.training.feature_trainer import FeatureRunConfig
from hf_specdec.training.heads import HeadsRunConfig
from hf_specdec.training.joint import JointRunConfig
from hf_specdec.training.look_ahead import LookAheadRunConfig
from hf_specdec.training.parallel import ParallelRunConfig
from hf_specdec.training.pipeline import KINDS
from hf_specdec.training.trainer import RunConfig, Trainer

from ..helpers import prompts, tiny_llama
from .test_weights import adapted, quantised

FEW = dict(steps=4, batch_tokens=128, lr=3e-3, warmup=1)
KINDS_OF_RUNS = {
    "layers": RunConfig(layers=(0, 1), head=40, **FEW),
    "layers, on-policy": RunConfig(layers=(1,), head=None, on_policy=60, **FEW),
    "features": FeatureRunConfig(layers=(1,), head=40, format="bf16", **FEW),
    "EAGLE-3": Eagle3RunConfig(layers=(1,), reads=(0, 1, 2), head=40, format="bf16", **FEW),
    "heads": HeadsRunConfig(heads=2, head=40, **FEW),
    "parallel": ParallelRunConfig(heads=2, head=40, window=4, **FEW),
    "look-ahead": LookAheadRunConfig(heads=2, **FEW),
}


WAYS = {"bfloat16": lambda target: target.to(torch.bfloat16), "int8": quantised, "LoRA": adapted}


def values(target) -> list[torch.Tensor]:
    return [part.clone() for part in (*target.parameters(), *target.buffers())]


@pytest.mark.parametrize("name", KINDS_OF_RUNS)
@pytest.mark.parametrize("way", WAYS)
def test_a_draft_learns_in_float32_and_is_one_for_the_target(name, way, tokenizer, anyones_data, tmp_path):
    config, own = KINDS_OF_RUNS[name], WAYS[way](tiny_llama(3, num_hidden_layers=3))
    before = values(own)
    seen = []
    step = Trainer.step

    def watched(self):
        seen.extend(p.dtype for p in self.own)
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", watched)
        (made,) = train(own, tokenizer, anyones_data, tmp_path / "out", config)
    assert made["step"] == 4 and set(seen) == {torch.float32}
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, values(own), strict=True))
    draft = load_drafter(tmp_path / "out", own)
    call = {"input_ids": torch.tensor(prompts(9)), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = own.generate(**call)
    assert torch.equal(hf_specdec.enable(own).generate(**call, assistant_model=draft, speculative=True), wanted)


def test_the_copy_that_medusa_2_changes_is_in_float32(target, tokenizer, anyones_data, tmp_path):
    own = copy.deepcopy(target).to(torch.bfloat16)
    train(own, tokenizer, anyones_data, tmp_path / "out", JointRunConfig(heads=2, **FEW))
    assert own.dtype == torch.bfloat16
    changed = type(own).from_pretrained(tmp_path / "out" / "target", dtype="auto")
    assert changed.dtype == torch.float32


@pytest.mark.parametrize("config", [RunConfig(layers=(0,), **FEW), FeatureRunConfig(**FEW), RunConfig(layers=(0,), precision="float32", **FEW)], ids=["layers", "features", "float32"])
def test_a_dtype_that_does_not_go_with_the_run_is_refused_before_any_work(config, target, anyones_data, tmp_path):
    dtype, wanted = (torch.float16, "bfloat16 or float32") if config.half else (torch.bfloat16, "float32")
    with pytest.raises(ValueError, match=f"target: weights in {dtype}; load it in {wanted} to train a draft"):
        KINDS[type(config)](copy.deepcopy(target).to(dtype), anyones_data, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()
