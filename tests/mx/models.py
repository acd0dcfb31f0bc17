"""Tiny models for the tests of compression, and what it means that two of them are the same."""

from __future__ import annotations

import torch

from ..helpers import VOCAB, build

SIZE = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128)
HEADS = dict(SIZE, num_key_value_heads=4)
MOE = dict(SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
GPT2 = dict(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=128)
SETTINGS = {"llama": SIZE, "gpt_neox": HEADS, "qwen3_moe": MOE, "gpt2": GPT2, "qwen2": SIZE}

IDS = torch.tensor([[1, 5, 9, 3, 7, 20, 31]])


def tiny(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **settings):
    """A model of that kind with random weights, and random biases where it has them."""
    model = build(kind, seed, **{**SETTINGS[kind], **settings})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            parameter.data = parameter.data.to(dtype)  # and no buffer: the rotary frequencies are float32 in every loaded model
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def same(model, other) -> bool:
    """Every tensor of both, bit for bit and of the same type, and what they make of a text."""
    one, two = model.state_dict(), other.state_dict()
    if one.keys() != two.keys():
        return False
    return all(torch.equal(one[k], two[k]) and one[k].dtype == two[k].dtype for k in one) and torch.equal(logits(model), logits(other))


def inputs_of(model, name: str, texts: list[torch.Tensor]) -> torch.Tensor:
    """[n, in_features]: what the module of that name is given for these token ids, each [L]."""
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for ids in texts:
            model(input_ids=ids[None], use_cache=False)
    handle.remove()
    return torch.cat(seen)


def mx_layers(model) -> dict:
    from hf_specdec.mx import MXLinear

    return {name: module for name, module in model.named_modules() if isinstance(module, MXLinear)}


def allocated(work) -> tuple[int, int]:
    """Bytes that torch's allocator held above what it held before, at most and at last, as it counts them itself."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, held
