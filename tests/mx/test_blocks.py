"""Checkpoints whose experts were published in MXFP4: transformers' numbers, bit for bit, without its 16-bit copies."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from typer.testing import CliRunner

from hf_specdec import mx
from hf_specdec.bench.embedded import load_model
from hf_specdec.cli import app
from hf_specdec.mx.experts import ExpertMatrix

from ..helpers import VOCAB, build, generated, plain, prompts, speculate, word_tokenizer
from .models import SIZE, logits, same

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder as gpt-oss is published: experts in blocks, everything else in bfloat16."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    model = build("gpt_oss", 0, "eager", **SIZE, head_dim=16, num_local_experts=4, num_experts_per_tok=2).to(torch.bfloat16)
    model.save_pretrained(folder)
    weights = load_file(folder / WEIGHTS)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        rows = weights.pop(name).transpose(1, 2)
        count, n, k = rows.shape
        packed = mx.quantize(rows.reshape(count * n, k), "mxfp4_e2m1")
        weights[f"{name}_blocks"] = packed.codes.view(count, n, k // 32, 16)
        weights[f"{name}_scales"] = packed.scales.view(count, n, k // 32)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    word_tokenizer(range(VOCAB)).save_pretrained(folder)
    edit(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": dense})
    return folder


def edit(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def theirs(folder):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True))


def test_the_numbers_are_transformers_own(published):
    model, dense = mx.load(AutoModelForCausalLM, published, dtype=torch.float32), theirs(published).float()
    assert torch.allclose(logits(model), logits(dense), atol=1e-5)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts.mx_down_proj, ExpertMatrix) and experts.mx_down_proj.format.name == "mxfp4_e2m1"
    again = mx.dequantize(copy.deepcopy(model)).state_dict()
    assert again.keys() == dense.state_dict().keys() and all(torch.equal(again[name], value) for name, value in dense.state_dict().items())


def test_the_report_says_what_was_read(published):
    model = mx.load(AutoModelForCausalLM, published)
    layers = {layer.name: layer for layer in model.mx_report.layers}
    experts = layers["model.layers.1.mlp.experts.gate_up_proj"]
    assert (experts.shape, experts.format, experts.note) == ((4, 192, 64), "mxfp4_e2m1", "as it was published")
    assert layers["model.layers.0.self_attn.q_proj"].format == layers["lm_head"].format == "bf16"


def test_saved_it_is_an_mx_checkpoint(published, tmp_path):
    model = mx.load(AutoModelForCausalLM, published)
    model.save_pretrained(tmp_path)
    assert not any("blocks" in name for name in load_file(tmp_path / WEIGHTS))
    assert same(model, AutoModelForCausalLM.from_pretrained(tmp_path)) and same(model, mx.load(AutoModelForCausalLM, tmp_path))


def test_it_generates_and_is_what_the_command_line_loads(published):
    model = load_model(str(published), device="cpu")
    assert isinstance(model.model.layers[0].mlp.experts.mx_gate_up_proj, ExpertMatrix)
    ids = prompts(9)
    assert generated(speculate(model, ids), ids) == plain(model, ids)


def test_a_dense_model_is_left_to_transformers(published):
    with pytest.raises(ValueError, match="Mxfp4Config.dequantize=True"):
        mx.load(AutoModelForCausalLM, published, dequantize=True)


def test_the_config_takes_arguments_and_another_quantisation_is_refused(published):
    model = mx.load(AutoModelForCausalLM, published, sliding_window=4, dtype="auto")
    assert model.config.sliding_window == 4 and model.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="^quantization_config: the experts of .* were published in MXFP4"):
        mx.load(AutoModelForCausalLM, published, quantization_config=mx.MXConfig())


def test_the_command_line_does_not_compress_it_again(published, tmp_path):
    for arguments in (["compress", str(published), "--out", str(tmp_path / "out")], ["generate", str(published), "--prompt", "a", "--mx", "mxint8"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and "its experts were published in MXFP4" in " ".join(result.stderr.split())


def test_missing_blocks_are_named(published, tmp_path):
    for file in published.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / WEIGHTS)
    weights.pop("model.layers.0.mlp.experts.down_proj_scales")
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="layers.0.mlp.experts.mx_down_proj.weight_scale"):
        mx.load(AutoModelForCausalLM, tmp_path)


@pytest.mark.parametrize("change", [lambda part: part.to(torch.int8), lambda part: part.transpose(0, 1).contiguous(), lambda part: part.flatten(2)], ids=["int8", "turned", "flat"])
def test_blocks_of_another_kind_are_refused(published, tmp_path, change):
    for file in published.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights, name = load_file(tmp_path / WEIGHTS), "model.layers.1.mlp.experts.gate_up_proj_blocks"
    save_file(weights | {name: change(weights[name])}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="layers.1.mlp.experts.gate_up_proj_blocks is .* not as gpt-oss was published"):
        mx.load(AutoModelForCausalLM, tmp_path)
