"""Targets that other libraries have quantised, on a CPU; each is skipped where its library is not installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import transformers

import hf_specdec
from hf_specdec.drafts import EarlyExitDraft, ModelDraft
from hf_specdec.training import build_drafter
from tests.helpers import padded, prompts, repetitive, tiny_llama


def bitsandbytes(**options):
    return transformers.BitsAndBytesConfig(**options)


def torchao(name: str):
    from torchao import quantization

    return transformers.TorchAoConfig(getattr(quantization, name)())


WAYS = {
    "bitsandbytes, 4 bit": ("bitsandbytes", lambda: bitsandbytes(load_in_4bit=True)),
    "bitsandbytes, 8 bit": ("bitsandbytes", lambda: bitsandbytes(load_in_8bit=True)),
    "torchao, int8": ("torchao", lambda: torchao("Int8WeightOnlyConfig")),
    "torchao, int8 activations": ("torchao", lambda: torchao("Int8DynamicActivationInt8WeightConfig")),
    "quanto, int8": ("optimum.quanto", lambda: transformers.QuantoConfig(weights="int8")),
    "quanto, int4": ("optimum.quanto", lambda: transformers.QuantoConfig(weights="int4")),
}
DRAFTS = {
    "prompt_lookup": lambda target: None,
    "model": lambda target: ModelDraft(tiny_llama(seed=1)),
    "itself": ModelDraft,
    "early_exit": lambda target: EarlyExitDraft(target, 1),
    "drafter": lambda target: ModelDraft(build_drafter(target, [0], torch.arange(40))),
}


def is_there(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(params=[pytest.param(way, marks=pytest.mark.skipif(not is_there(library), reason=f"no {library}"), id=name) for name, (library, way) in WAYS.items()])
def target(request, tmp_path):
    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=request.param(), dtype=torch.float32, device_map="cpu").eval()
    return hf_specdec.enable(model)


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_texts_are_those_of_plain_generate(name, target):
    for rows in (repetitive(12), prompts(7, 12)):
        call = padded(rows) | {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        wanted = target.generate(**call)
        assert torch.equal(target.generate(**call, assistant_model=DRAFTS[name](target), speculative=True), wanted)
        assert torch.equal(target.generate(**call), wanted)  # and making a draft has left it as it was
