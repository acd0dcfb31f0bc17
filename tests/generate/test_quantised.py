"""Targets that other libraries have quantised, on a CPU; each is skipped where its library is not installed."""

from __future__ import annotations

import importlib.util
import json
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_specdec
from hf_specdec import mx
from hf_specdec.drafts import EarlyExitDraft, FeatureDraft, ModelDraft
from hf_specdec.training import build_drafter
from tests.helpers import padded, prompts, repetitive, tiny_llama


def load(folder, dtype=torch.float32, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu", **more).eval()


def bitsandbytes(**options):
    return lambda folder: load(folder, quantization_config=transformers.BitsAndBytesConfig(**options))


def torchao(name: str):
    from torchao import quantization

    return transformers.TorchAoConfig(getattr(quantization, name)())


def hqq(folder):
    """By the library itself: from_pretrained of transformers 5 has no HQQ yet."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model = load(folder)
    for name in [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"]:
        layer = HQQLinear(model.get_submodule(name), BaseQuantizeConfig(nbits=4, group_size=64), compute_dtype=torch.float32, device="cpu")
        model.set_submodule(name, layer)
    return model


def sinq(folder):
    return load(folder, quantization_config=transformers.SinqConfig(nbits=4, group_size=32, tiling_mode="1D", modules_to_not_convert=["lm_head"]))


def four_bits(weight: torch.Tensor, method: str) -> dict[str, torch.Tensor]:
    """What a layer of GPTQ (AutoRound's, too) or AWQ stores for `weight` [n, m]: codes 0..15 in groups of 32 inputs, a scale for each group, and 8 as zero."""
    groups = weight.unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1) / 7).half()
    codes = ((groups / scales[..., None]).round() + 8).clamp(0, 15).flatten(1).T.to(torch.int64)
    zeros = torch.full_like(scales.T, 8, dtype=torch.int64)
    if method == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return {"qweight": words(codes, 1, order), "qzeros": words(zeros, 1, order), "scales": scales.T}
    places = (torch.arange(weight.shape[1]) // 32).int()
    return {"qweight": words(codes, 0), "qzeros": words(zeros - 1, 1), "scales": scales.T} | ({"g_idx": places} if method == "gptq" else {})


def words(codes: torch.Tensor, dim: int, order=range(8)) -> torch.Tensor:
    """Eight codes of four bits in each int32."""
    parts = codes.unflatten(dim, (-1, 8))
    found = sum(parts.select(dim + 1, place) << 4 * turn for turn, place in enumerate(order))
    return torch.where(found >= 2**31, found - 2**32, found).int()


def eight_bits(weight: torch.Tensor, **steps: float) -> dict[str, torch.Tensor]:
    """What a layer of compressed-tensors or of Gemma's quantised checkpoints stores. The steps of inputs and outputs are to fit a text, not a weight."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale} | {name: torch.tensor(step) for name, step in steps.items()}


def compressed_tensors(folder):
    """With inputs in int8, of one step for all texts: its 127 steps end below 1."""
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {"targets": ["Linear"], "weights": eight | {"strategy": "channel"}, "input_activations": eight | {"strategy": "tensor", "dynamic": False}}
    return stored(folder, partial(eight_bits, input_scale=[0.002]), quant_method="compressed-tensors", format="int-quantized", quantization_status="compressed",
                  ignore=["lm_head"], config_groups={"group_0": group})


def ternary(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from transformers.integrations.bitnet import pack_weights

    scale = weight.abs().mean()
    return {"weight": pack_weights((weight / scale).round().clamp(-1, 1)), "weight_scale": 1 / scale.reshape(1)}


def stored(folder, layer, embedding=None, **config):
    """A checkpoint that a library has quantised: `layer` says what is stored for the weight of a Linear layer, `embedding` for the embedding's."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        make = layer if name.endswith("_proj.weight") else embedding if "embed_tokens" in name else None
        tensors |= {name: tensor} if make is None else {name.removesuffix("weight") + key: part.contiguous() for key, part in make(tensor).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"quantization_config": config | {"modules_to_not_convert": ["lm_head"]}}))
    return load(folder)


def gptqmodel(method: str, **more):
    return lambda folder: stored(folder, partial(four_bits, method=method), quant_method=method, bits=4, group_size=32, sym=True, desc_act=False, **more)


def auto_round(folder):
    return stored(folder, partial(four_bits, method="auto-round"), quant_method="auto-round", bits=4, group_size=32, sym=True, data_type="int",
                  packing_format="auto_round:auto_gptq")


def gemma(folder):
    def table(weight):
        made = eight_bits(weight)
        return {"embedding_quantized": made["weight"], "embedding_scale": made["weight_scale"]}

    layer = partial(eight_bits, input_activation_scale=0.05, output_activation_scale=2.0)
    return stored(folder, layer, table, quant_method="gemma", num_bits=8, quantize_embeddings=True)


WAYS = {
    "bitsandbytes, 4 bit": ("bitsandbytes", bitsandbytes(load_in_4bit=True)),
    "bitsandbytes, 8 bit": ("bitsandbytes", bitsandbytes(load_in_8bit=True)),
    "torchao, int8": ("torchao", lambda folder: load(folder, quantization_config=torchao("Int8WeightOnlyConfig"))),
    "torchao, int8 activations": ("torchao", lambda folder: load(folder, quantization_config=torchao("Int8DynamicActivationInt8WeightConfig"))),
    "quanto, int8": ("optimum.quanto", lambda folder: load(folder, quantization_config=transformers.QuantoConfig(weights="int8"))),
    "quanto, int4": ("optimum.quanto", lambda folder: load(folder, quantization_config=transformers.QuantoConfig(weights="int4"))),
    "compressed-tensors, int8 activations": ("compressed_tensors", compressed_tensors),
    "GPTQ": ("gptqmodel optimum.gptq", gptqmodel("gptq", backend="torch", checkpoint_format="gptq")),
    "AWQ": ("gptqmodel", gptqmodel("awq", backend="torch_awq", version="gemm", zero_point=True)),
    "AutoRound": ("auto_round", auto_round),
    "HQQ": ("hqq", hqq),
    "SINQ": ("sinq", sinq),
    "Gemma's": ("accelerate transformers.integrations.gemma_quant", gemma),
    "BitNet": ("accelerate transformers.integrations.bitnet", lambda folder: stored(folder, ternary, quant_method="bitnet")),
    "BitNet, rounded in each pass": ("accelerate transformers.integrations.bitnet", lambda folder: stored(folder, None, quant_method="bitnet", linear_class="autobitlinear", quantization_mode="online")),
}
DRAFTS = {
    "prompt_lookup": lambda target: None,
    "model": lambda target: ModelDraft(tiny_llama(seed=1)),
    "itself": ModelDraft,
    "early_exit": lambda target: EarlyExitDraft(target, 1),
    "drafter": lambda target: ModelDraft(build_drafter(target, [0], torch.arange(40))),
    "features": lambda target: FeatureDraft(build_drafter(target, [1], None, (0, 1)), target),
}


def are_there(libraries: str) -> bool:
    try:
        return all(importlib.util.find_spec(library) is not None for library in libraries.split())
    except ModuleNotFoundError:
        return False


def ways(*names: str):
    return [pytest.param(WAYS[name][1], marks=pytest.mark.skipif(not are_there(WAYS[name][0]), reason=f"no {WAYS[name][0]}"), id=name) for name in names]


@pytest.fixture(params=ways(*WAYS))
def target(request, tmp_path):
    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    with torch.compiler.set_stance("force_eager"):  # transformers compiles BitNet's layers, a minute for as many shapes
        yield hf_specdec.enable(request.param(tmp_path))


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_texts_are_those_of_plain_generate(name, target):
    for rows in (repetitive(12), prompts(7, 12)):
        call = padded(rows) | {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
        wanted = target.generate(**call)
        assert torch.equal(target.generate(**call, assistant_model=DRAFTS[name](target), speculative=True), wanted)
        assert torch.equal(target.generate(**call), wanted)  # and making a draft has left it as it was


def test_a_drafter_begins_with_the_weights_that_the_target_multiplies_by(target):
    original = tiny_llama(hidden_size=64, intermediate_size=128).state_dict()
    made = {name: part for name, part in build_drafter(target, [0]).named_parameters() if name.endswith("_proj.weight")}
    assert len(made) == 7
    for name, part in made.items():
        assert (part - original[name]).norm() < 0.6 * original[name].norm()  # BitNet's three numbers are that far away


def test_mx_weights_are_refused(target):
    with pytest.raises(ValueError, match="model is quantised by|its layers are HQQLinear"):
        mx.compress(target)
