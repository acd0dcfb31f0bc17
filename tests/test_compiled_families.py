"""Every model that is tried at all, compiled both ways: torch traces the passes and leaves out its compiler."""

import warnings

import pytest
import torch

import hf_specdec
from hf_specdec import compiled, passes
from hf_specdec.drafts import PromptLookupDraft
from tests.architectures import FAMILIES
from tests.helpers import OLD_TORCH, generated, plain, prompts, speculate

NOT_TRACED = {"DBRX": ("model", "layers"), "CTRL": ("model",), "LongCat-Flash": ("model",), "Dory": ("layers",)}  # as docs/performance.md has it


@pytest.mark.skipif(OLD_TORCH, reason="this torch traces fewer models")
@pytest.mark.parametrize("compile", ["model", "layers"])
@pytest.mark.parametrize("line", FAMILIES, ids=lambda line: line.name)
def test_a_model_is_compiled_or_its_kind_is_known_not_to_be(line, compile, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "eager"})
    monkeypatch.setattr(compiled, "FLAT", 0)
    target, rows = line.model("eager"), prompts(20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = speculate(target, rows, PromptLookupDraft(), 4, speculative={"seed": 0, "compile": compile}, max_new_tokens=12)
    hf_specdec.disable(target)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=12)
    refusals = [str(warning.message) for warning in caught if "runs without compile=True" in str(warning.message)]
    given_up = [text for text in refusals if "torch.compile says" in text or "are off by" in text]
    assert bool(given_up) == (compile in NOT_TRACED.get(line.name, ())), refusals
