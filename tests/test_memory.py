"""Logits that do not fit into the memory that is free are refused before any work; where they are few, nobody looks."""

from __future__ import annotations

import pytest
import torch

from hf_specdec import memory
from hf_specdec.drafts import MixtureDraft, ModelTreeDraft, PromptLookupDraft, RecyclingDraft
from hf_specdec.tree_shapes import DynamicTree
from tests.helpers import VOCAB, enabled, generated, perturbed, plain, prompts, speculate, tiny_llama

ROWS = prompts(5, 7, 3)
CPU = torch.device("cpu")


def free(monkeypatch, size: int | None, large: int = 0) -> list[torch.device]:
    """As if so much memory were free; the devices that were asked."""
    asked = []
    monkeypatch.setattr(memory, "LARGE", large)
    monkeypatch.setattr(memory, "free_bytes", lambda device: asked.append(device) or size)
    return asked


def test_what_is_free_is_told():
    assert 2**20 < memory.free_bytes(CPU) < 2**50


def test_a_kernel_that_does_not_count_what_is_available_tells_nothing(monkeypatch):
    monkeypatch.setattr(memory.Path, "read_text", lambda self: "MemTotal: 8000 kB\nMemFree: 1000 kB\n")
    assert memory.free_bytes(CPU) is None


@pytest.mark.gpu
def test_what_torch_keeps_for_reuse_on_a_gpu_is_free():
    device = torch.device("cuda", 0)
    before = memory.free_bytes(device)
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert before - memory.free_bytes(device) >= 2**28
    del block
    assert abs(memory.free_bytes(device) - before) < 2**26


@pytest.mark.parametrize(("k", "options", "rows", "draft", "words"), [
    (7, {}, 3, None, "3 rows with 7 drafted tokens .*smaller num_assistant_tokens"), ("auto", {}, 3, None, "3 rows with 16 drafted tokens .*smaller max_auto_tokens"),
    (4, {"num_beams": 2}, 6, None, "6 rows with 4 drafted tokens"), (4, {"do_sample": True}, 3, RecyclingDraft, "3 rows with 4 drafted"),
    (3, {}, 3, lambda: ModelTreeDraft(perturbed(tiny_llama()), (4, 2, 1)), "3 rows with 20 drafted tokens .*smaller tree"),
    (2, {}, 3, lambda: MixtureDraft([ModelTreeDraft(tiny_llama(), DynamicTree(40)), "prompt_lookup"]), "3 rows with 40 drafted tokens"),
], ids=["fixed", "auto", "beams", "sampled", "tree", "inside a mixture"])
def test_logits_that_do_not_fit_are_refused_before_any_work(k, options, rows, draft, words, monkeypatch):
    model, forwards = enabled(tiny_llama()), []
    free(monkeypatch, 100)
    model.register_forward_pre_hook(lambda module, inputs: forwards.append(1))
    with pytest.raises(ValueError, match=f"^a pass over {words}") as caught:
        speculate(model, ROWS, draft and draft(), k, **options)
    assert f"logits of {VOCAB} tokens" in str(caught.value) and "free on cpu. Generate fewer rows at a time" in str(caught.value) and not forwards


def test_the_bytes_are_those_of_the_models_type_and_of_float32_where_tokens_are_drawn(monkeypatch):
    model = enabled(tiny_llama()).to(torch.bfloat16)
    size = 3 * 5 * VOCAB * 2
    for do_sample, enough in ((False, size), (True, 2 * size)):
        asked = free(monkeypatch, enough)
        speculate(model, ROWS, None, 4, do_sample=do_sample, max_new_tokens=2)
        assert asked == [CPU]
        free(monkeypatch, enough - 1)
        with pytest.raises(ValueError, match=r"smaller num_assistant_tokens \(3 would fit\)"):
            speculate(model, ROWS, None, 4, do_sample=do_sample, max_new_tokens=2)


def test_nobody_looks_where_logits_are_few_and_what_is_not_told_refuses_nothing(monkeypatch):
    model = enabled(tiny_llama())
    expected = plain(model, ROWS)
    asked = free(monkeypatch, 0, large=3 * 5 * VOCAB * 4)
    assert generated(speculate(model, ROWS, PromptLookupDraft(), 4), ROWS) == expected and not asked
    asked = free(monkeypatch, None)
    assert generated(speculate(model, ROWS, PromptLookupDraft(), 4), ROWS) == expected and asked


def test_a_batch_that_no_machine_holds_is_refused_by_the_numbers_of_this_one():
    with pytest.raises(ValueError, match=r"^a pass over 100000 rows with 64 .* takes 3680.6 GiB for the logits of 152000 tokens alone"):
        memory.check_logits(100_000, 64, 152_000, 4, CPU, "num_assistant_tokens")
