"""The weights of Linear layers as numbers, whoever keeps them: MX, another library's quantisation, adapters."""

from __future__ import annotations

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_specdec
from hf_specdec import mx
from hf_specdec.training import build_drafter
from hf_specdec.training.drafter import load, save
from hf_specdec.training.weights import dense, numbers

from ..helpers import prompts
from ..mx.models import tiny


class Int8Linear(nn.Module):
    """How other libraries keep a layer: integers and a scale per row, under names of their own, and what `state_dict` does to it is not to be relied on."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scales", scale.detach())
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ (self.qweight * self.scales).T
        return y if self.bias is None else y + self.bias

    def state_dict(self, *args, **kwargs):
        raise AssertionError("4-bit layers of bitsandbytes on a CPU compute other numbers after this")

    def _save_to_state_dict(self, *args, **kwargs):
        self.state_dict()


def quantised(model):
    _, layers = hf_specdec.parts.decoder_layers(model)
    for parent in [module for layer in layers for module in layer.modules()]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
    return model


def adapted(model):
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)).eval()


WAYS = {"int8": quantised, "LoRA": adapted, "MX": mx.compress, "MX experts": lambda _: mx.compress(tiny("qwen3_moe"), skip=["0.mlp.experts.down_proj"])}
every_way = pytest.mark.parametrize("way", list(WAYS))


@every_way
def test_a_drafter_of_all_layers_computes_what_its_target_does(way):
    target = WAYS[way](tiny())
    for norm in (module for name, module in target.named_modules() if name.endswith("norm")):
        norm.weight.data.mul_(1.5)  # no weight that a model begins with
    ids, layers = torch.tensor(prompts(9)), list(range(target.config.num_hidden_layers))
    draft = build_drafter(target, layers, None)
    with torch.no_grad():
        assert torch.allclose(draft(ids).logits, target(ids).logits, atol=1e-4)


@every_way
@pytest.mark.parametrize("reads", [(), (1, 2)], ids=["layers", "features"])
def test_a_drafter_of_such_a_target_is_saved_and_read_and_drafts(way, reads, tmp_path):
    target = WAYS[way](tiny())
    save(build_drafter(target, [0], torch.arange(40), reads), tmp_path, "tiny")
    ids = torch.tensor(prompts(9))
    wanted = target.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    got = hf_specdec.enable(target).generate(input_ids=ids, max_new_tokens=12, do_sample=False, assistant_model=load(tmp_path, target), speculative=True)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_what_the_layer_multiplies_by(bias, dtype):
    plain = nn.Linear(32, 24, bias=bias).to(dtype).requires_grad_(False)
    packed = Int8Linear(plain)
    found, own = numbers(packed, dtype), numbers(plain, dtype)
    assert found.keys() == own.keys() == ({"weight", "bias"} if bias else {"weight"})
    assert found["weight"].shape == (24, 32) and found["weight"].dtype == dtype
    assert torch.allclose(found["weight"], packed.qweight * packed.scales, atol=1e-6 if dtype == torch.float32 else 4e-3)
    assert own["weight"].data_ptr() == plain.weight.data_ptr()
    if bias:
        assert torch.equal(found["bias"], plain.bias)


def test_parts_that_are_left_out_are_not_in_it():
    model = quantised(tiny())
    _, layers = hf_specdec.parts.decoder_layers(model)
    rest = dense(model, torch.float32, but=(layers, model.get_input_embeddings()))
    assert rest and not any(".layers." in name or "embed_tokens" in name for name in rest)
    assert any(name.endswith("norm.weight") for name in rest)


def test_a_model_that_is_decompressed_at_its_first_pass_is_so_before_a_drafter_begins_with_it():
    """As those of compressed-tensors are."""
    target = tiny()
    weights = {name: p.data for name, p in target.named_parameters() if ".layers." in name and p.dim() == 2}

    def decompress(*given):
        for name, weight in weights.items():
            target.get_parameter(name).data = weight

    for name in weights:
        target.get_parameter(name).data = torch.zeros(1)
    target.hf_quantizer = object()
    target.register_forward_pre_hook(decompress)
    draft = build_drafter(target, [0, 1], None)
    assert all(torch.equal(draft.get_parameter(name), weight) for name, weight in weights.items() if ".layers.0." in name)


def test_weights_that_are_offloaded_are_named():
    target = accelerate.cpu_offload(tiny(), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="target: the weights of self_attn.q_proj are offloaded; load it without that"):
        build_drafter(target, [0], None)


@pytest.mark.parametrize(("part", "name"), [("model", "embedding"), ("lm_head", "output head")])
def test_a_drafter_of_a_target_whose_shared_parts_are_offloaded_is_refused(part, name, tmp_path):
    target = tiny()
    save(build_drafter(target, [0], torch.arange(40)), tmp_path, "tiny")
    accelerate.cpu_offload(target.get_submodule(part), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=f"target: the weights of its {name} are offloaded; load it without that"):
        load(tmp_path, target)
