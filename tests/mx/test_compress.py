"""`mx.compress` on loaded models: which layers, what it costs, and what it refuses."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.utils import prune  # noqa: F401
from transformers import AutoModelForCausalLM

from hf_specdec import mx
from hf_specdec.mx.formats import DENSE
from hf_specdec.mx.linear import MXLinear
from hf_specdec.mx.report import CompressionReport, LayerReport

from ..helpers import assert_unchanged, snapshot
from .models import allocated, logits, mx_layers, same, tiny

FORMATS = [*mx.FORMATS, *DENSE]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def report_of(model) -> dict[str, LayerReport]:
    return {layer.name: layer for layer in model.mx_report.layers}


# --- which layers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "qwen2", "qwen3_moe"])
def test_every_linear_layer_but_the_head_is_swapped_and_holds_what_quantize_gives(kind):
    model = tiny(kind)
    original, head = copy.deepcopy(model), model.get_output_embeddings()
    assert mx.compress(model) is model
    for name, module in original.named_modules():
        if type(module) is nn.Linear and model.get_submodule(name) is not head:
            layer, packed = model.get_submodule(name), mx.quantize(module.weight)
            assert type(layer) is MXLinear and torch.equal(layer.packed().codes, packed.codes)
            assert torch.equal(layer.packed().scales, packed.scales)
            assert (layer.bias is None) == (module.bias is None) and (module.bias is None or torch.equal(layer.bias, module.bias))
    assert model.get_output_embeddings() is head
    assert torch.allclose(logits(model), logits(mx.dequantize(copy.deepcopy(model))), rtol=1e-3, atol=1e-3)


def test_what_cannot_be_compressed_stays_dense_and_says_why():
    report = report_of(mx.compress(tiny(intermediate_size=80)))
    assert report["model.layers.0.mlp.down_proj"].format is None
    assert report["model.layers.0.mlp.down_proj"].note == "80 inputs are no multiple of 32"
    assert report["model.layers.0.mlp.up_proj"].format == "mxfp6_e2m3" and "lm_head=FORMAT" in report["lm_head"].note
    moe = report_of(mx.compress(tiny("qwen3_moe", moe_intermediate_size=40)))["model.layers.0.mlp.experts.down_proj"]
    assert moe.format is None and moe.note == "40 inputs are no multiple of 32" and moe.bytes_before == moe.bytes_after == 4 * 4 * 64 * 40
    gpt2 = report_of(mx.compress(tiny("gpt2"), lm_head="mxint8"))
    assert gpt2["transformer.h.0.attn.c_attn"].note == "Conv1D is no nn.Linear" and gpt2["lm_head"].format == "mxint8"


def test_a_linear_of_another_kind_stays_as_it_is():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(64, 64), Own(64, 64))
    mx.compress(model)
    assert type(model[0]) is MXLinear and type(model[1]) is Own and "of its own kind" in model.mx_report.layers[1].note


def test_layers_whose_weight_is_computed():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(3, 64)
    nn.utils.parametrizations.weight_norm(model[1])
    nn.utils.parametrizations.spectral_norm(model[2])
    nn.utils.prune.l1_unstructured(model[3], "weight", 0.5)
    model.eval()
    expected = model(x)
    mx.compress(model, "mxint8")
    report = report_of(model)
    assert [name for name in ("0", "1", "2", "3") if report[name].format] == ["0", "3"] and report["1"].shape == (64, 64)
    assert torch.allclose(model(x), expected, atol=0.05)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_numbers_stays_as_it_is():
    model = mx.compress(nn.ModuleList([nn.Linear(64, 0), nn.Linear(0, 64), nn.Linear(64, 64)]))
    assert [layer.note for layer in model.mx_report.layers] == ["it has no numbers"] * 2 + [""]


def test_hooks_go_along_there_and_back():
    model, seen = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), []
    model[0].register_forward_hook(lambda module, *_: seen.append(type(module)))
    last = model[0].register_forward_pre_hook(lambda module, args, kwargs: seen.append("before"), with_kwargs=True)
    mx.compress(model)(torch.zeros(1, 64))
    mx.dequantize(model)(torch.zeros(1, 64))
    assert seen == ["before", MXLinear, "before", nn.Linear]
    last.remove()
    model(torch.zeros(1, 64))
    assert seen[4:] == [nn.Linear]


@pytest.mark.parametrize("skip", [["down_proj"], ["model.layers.1"], ["*.mlp.*"], ["model.layers.0.self_attn.q_proj"], iter(["up_proj", "o_proj"])])
def test_skip_takes_names_last_parts_and_patterns(skip):
    skip = list(skip) if isinstance(skip, list) else skip
    model = mx.compress(tiny(), skip=skip)
    left = {layer.name for layer in model.mx_report.layers if layer.note == "skipped on request"}
    named = model.config.quantization_config.skip
    expected = {
        ("down_proj",): {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)},
        ("model.layers.1",): {name for name in report_of(model) if name.startswith("model.layers.1.")},
        ("*.mlp.*",): {name for name in report_of(model) if ".mlp." in name},
        ("model.layers.0.self_attn.q_proj",): {"model.layers.0.self_attn.q_proj"},
        ("up_proj", "o_proj"): {name for name in report_of(model) if name.endswith(("up_proj", "o_proj"))},
    }[tuple(named)]
    assert left == expected and not left & set(mx_layers(model))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [None, "mxfp8_e4m3"])
def test_the_head_is_compressed_on_request_and_untied_by_that(tied, head):
    model = mx.compress(tiny(tie_word_embeddings=tied), lm_head=head)
    weight = model.get_input_embeddings().weight
    assert weight.dtype == torch.float32 and model.config.tie_word_embeddings is (tied and head is None)
    assert (model.lm_head.weight is weight) is (tied and head is None) and isinstance(model.lm_head, MXLinear) is (head is not None)
    entry = report_of(model)["lm_head"]
    assert entry.format == head and (entry.bytes_before == 0 and "untied" in entry.note) is (tied and head is not None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_formats_and_dtypes_there_and_back(format, dtype):
    model = tiny("gpt_neox", dtype=dtype)
    original = copy.deepcopy(model)
    mx.compress(model, format)
    out = logits(model)
    assert out.dtype == dtype and out.isfinite().all() and model.dtype == dtype
    mx.dequantize(model)
    assert not mx_layers(model) and not hasattr(model, "mx_report") and not hasattr(model.config, "quantization_config")
    for name, module in original.named_modules():
        if isinstance(module, nn.Linear) and name not in ("lm_head", "embed_out"):
            dense = model.get_submodule(name)
            assert type(dense) is nn.Linear and dense.weight.dtype == dtype and dense.weight.requires_grad
            assert torch.equal(dense.weight, mx.quantize(module.weight, format).dequantize(dtype))
    if (format, dtype) in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        assert same(model, original)


@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "mse"])
def test_the_scale_rule_reaches_the_layers(rule):
    model, original = mx.compress(tiny(), "mxfp4_e2m1", scale_rule=rule), tiny()
    name = "model.layers.1.mlp.up_proj"
    packed = mx.quantize(original.get_submodule(name).weight, "mxfp4_e2m1", rule)
    assert torch.equal(model.get_submodule(name).packed().scales, packed.scales)


def test_dequantize_takes_a_dtype_and_refuses_what_is_none():
    model = mx.compress(tiny())
    for wrong in ("float33", "int8", torch.int32):
        with pytest.raises(ValueError, match="dtype="):
            mx.dequantize(model, wrong)
    assert mx_layers(model)
    for name, dtype in {"bfloat16": torch.bfloat16, "float64": torch.float64}.items():
        dense = mx.dequantize(copy.deepcopy(model), name)
        assert {tensor.dtype for tensor in dense.state_dict().values()} == {dtype} and logits(dense).dtype == dtype
    assert same(copy.deepcopy(model).dequantize(), mx.dequantize(copy.deepcopy(model)))
    with pytest.raises(ValueError, match="no MX layers to dequantise: it is dense.*import hf_specdec.mx"):
        mx.dequantize(mx.dequantize(model))
    with pytest.raises(TypeError, match="^model: expected a model, got NoneType"):
        mx.dequantize(None)
    assert same(mx.compress(model), mx.compress(tiny()))  # compressing what was compressed changes nothing


# --- the report and the memory ------------------------------------------------------------------------------------------------


def test_the_report_has_bytes_and_errors_in_the_models_order():
    original = tiny()
    model = mx.compress(copy.deepcopy(original))
    report = model.mx_report
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert [layer.name for layer in report.layers] == names and len(report.compressed) == len(names) - 1
    for layer in report.compressed:
        weight = original.get_submodule(layer.name).weight.detach().double()
        error = mx.quantize(weight.float()).dequantize().double() - weight
        assert layer.sqnr_db == pytest.approx(float(10 * torch.log10(weight.square().sum() / error.square().sum())), abs=1e-4)
        assert layer.max_error == pytest.approx(float(error.abs().max()), rel=1e-6)
        assert layer.bytes_before == weight.numel() * 4 and layer.bytes_after == weight.numel() * 25 // 32
    assert "14 layers compressed, 1 left dense" in str(report) and json.loads(report.to_json())["bytes_after"] == report.bytes_after
    assert [row[0] for row in report.rows(every_layer=True)] == names and f"{report.compressed[0].sqnr_db:.1f}" in report.rows(True)[0]
    exact = mx.compress(copy.deepcopy(original), "fp32").mx_report
    assert "Infinity" not in exact.to_json() and json.loads(exact.to_json())["layers"][0]["sqnr_db"] is None
    unmeasured = mx.compress(copy.deepcopy(original), measure=False)
    assert all(layer.sqnr_db is None for layer in unmeasured.mx_report.layers) and same(unmeasured, model)


def test_layers_that_are_alike_are_grouped_with_the_ranges_of_their_numbers():
    def layer(number, shape=(4, 32), note=""):
        return LayerReport(f"h.{number}.up", shape, None if note else "mxint8", 512, 132, None if note else 30.0 + number, 0.1, note)

    report = CompressionReport([layer(i) for i in (0, 1, 2, 4, 5)] + [layer(3, note="skipped on request"), layer(7, (8, 32))])
    assert "(74.2% smaller)" in str(report) and "(32.0% larger)" in str(CompressionReport([LayerReport("head", (4, 32), "mxint8", 100, 132)]))
    groups = report.groups()
    assert [group.name for group in groups] == ["h.0-2,4-5.up", "h.3.up", "h.7.up"] and groups[0].count == 5
    assert groups[0].sqnr_db == (30.0, 35.0) and groups[0].bytes_before == 5 * 512 and groups[1].sqnr_db is None
    assert sum(group.bytes_after for group in groups) == report.bytes_after


def test_the_report_is_a_table_in_notebooks():
    shown = mx.compress(tiny(intermediate_size=80), skip=["o_proj"]).mx_report._repr_html_()
    assert shown.startswith("<table><tr><th>layer</th>") and shown.count("<tr>") == 1 + 8
    assert "<td>model.layers.0-1.mlp.up_proj (2)</td><td>80 x 64</td><td>mxfp6_e2m3</td>" in shown and "dense: 80 inputs are no multiple of 32" in shown
    assert "14 layers" not in shown and "10 layers compressed, 5 left dense" in shown


def test_layer_by_layer_no_second_copy_of_the_model_is_held():
    models = []
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=12, num_attention_heads=4)
    largest = 256 * 512 * 4

    peak, dense = allocated(lambda: models.append(tiny(**sizes)))
    assert peak < dense + 4 * largest
    peak, compressed = allocated(lambda: models.append(mx.compress(tiny(**sizes))))
    saved = models[1].mx_report.bytes_before - models[1].mx_report.bytes_after
    assert saved > 30 * largest and abs(dense - saved - compressed) < 0.02 * dense
    assert peak < dense + 4 * largest
    peak, _ = allocated(lambda: models.append(mx.dequantize(mx.compress(tiny(**sizes)))))
    assert peak < dense + 4 * largest


# --- bad input: one clear error, nothing changed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"format": "mxfp5"}, ValueError, "format='mxfp5'.*Take one of: mxfp8_e4m3"),
        ({"format": None}, ValueError, "format=None"),
        ({"format": "mxfp4"}, ValueError, r"format='mxfp4' is not an MX format \(did you mean 'mxfp4_e2m1'\?\)"),
        ({"lm_head": "int8"}, ValueError, r"^lm_head='int8' is not an MX format \(did you mean 'mxint8'\?\)"),
        ({"lm_head": "int4"}, ValueError, "^lm_head='int4' is not an MX format"),
        ({"lm_head": True}, ValueError, "^lm_head=True is not an MX format.*mxint8"),
        ({"scale_rule": "round"}, ValueError, "scale_rule='round'.*Take one of: floor"),
        ({"skip": "down_proj"}, TypeError, "skip must be a sequence.*'down_proj'"),
        ({"skip": [3]}, TypeError, "skip must be a sequence"),
        ({"skip": None}, TypeError, "skip must be a sequence"),
        ({"measure": "no"}, ValueError, "measure='no' must be True or False"),
        ({"measure": None}, ValueError, "measure=None must be True or False"),
        ({"skip": ["model"]}, ValueError, "no layer that can be compressed: .*skipped on request"),
    ],
)
def test_wrong_arguments(arguments, error, words):
    model = tiny()
    before = snapshot(model)
    with pytest.raises(error, match=words):
        mx.compress(model, **arguments)
    assert_unchanged(model, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("format", ["mxfp6_e2m3", *DENSE])
def test_weights_that_are_not_finite_are_named_and_can_be_left_out(value, format):
    model = tiny()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds a NaN or an infinity.*skip="):
        mx.compress(model, format)
    assert not mx_layers(model) and not hasattr(model, "mx_report")
    assert len(mx_layers(mx.compress(model, format, skip=["model.layers.1.mlp.up_proj"]))) == 13


def test_models_that_are_quantised_already():
    model = mx.compress(tiny())
    before = snapshot(model)
    with pytest.raises(ValueError, match="MX layers already"):
        mx.compress(model)
    assert_unchanged(model, before)
    for config in ({"quant_method": "gptq", "bits": 4}, type("Config", (), {"quant_method": "gptq"})()):
        other = tiny()
        other.config.quantization_config = config
        with pytest.raises(ValueError, match="quantised by gptq"):
            mx.compress(other)
        assert not mx_layers(other)


def test_a_model_read_from_a_gguf_file_is_dense_unless_it_keeps_the_blocks(tmp_path):
    model = tiny()
    model.config.quantization_config = {"quant_method": "gguf"}
    mx.compress(model).save_pretrained(tmp_path)
    assert len(mx_layers(model)) == 14 and same(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    packed = tiny()
    packed.config.quantization_config = {"quant_method": "gguf"}
    packed.model.layers[0].mlp.up_proj = type("GgufLinear", (nn.Module,), {})()
    with pytest.raises(ValueError, match="quantised by gguf"):
        mx.compress(packed)


def test_models_without_a_layer_to_compress_or_without_weights():
    model = tiny("gpt2")
    before = snapshot(model)
    with pytest.raises(ValueError, match="no layer that can be compressed: its layers are Conv1D, which is not supported [^,]*$"):
        mx.compress(model)
    assert_unchanged(model, before)
    with pytest.raises(ValueError, match="no nn.Linear layers"):
        mx.compress(nn.Sequential(nn.LayerNorm(8)))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="meta device"):
        mx.compress(empty)
