"""What is found out about a model before it decodes."""

import pytest
import torch

from hf_specdec.drafts import PromptLookupDraft
from tests.helpers import prompts, speculate, tiny_llama


@pytest.fixture
def two_processes(monkeypatch):
    """As torch would say it; nobody else is there."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *group: 2)


def zero(model):
    next(model.parameters()).ds_id = 0


@pytest.mark.parametrize("shard", [lambda model: setattr(model, "_is_fsdp_managed_module", True), zero], ids=["FSDP", "ZeRO-3"])
def test_a_model_that_processes_share_is_refused_before_they_wait_for_each_other(shard, two_processes):
    model = tiny_llama()
    shard(model)
    with pytest.raises(ValueError, match="^target: LlamaForCausalLM is sharded over processes"):
        speculate(model, prompts(5), PromptLookupDraft())


def test_a_whole_model_in_each_of_two_processes_is_not(two_processes):
    assert len(speculate(tiny_llama(), prompts(5), PromptLookupDraft(), max_new_tokens=4).sequences[0]) == 9


def test_a_sharded_model_that_is_alone_is_not():
    model = tiny_llama()
    zero(model)
    assert len(speculate(model, prompts(5), PromptLookupDraft(), max_new_tokens=4).sequences[0]) == 9
