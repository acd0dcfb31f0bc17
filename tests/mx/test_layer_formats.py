"""Formats by layer: which layers get them, what is saved and read back, and that products of different formats made at once are right."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
import warnings

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from hf_specdec import enable, mx
from hf_specdec.cached_model import CachedModel
from hf_specdec.mx import MXLinear, calibrate
from hf_specdec.mx import passes as kernel_passes
from hf_specdec.mx.formats import DENSE
from hf_specdec.mx.gptq import Inputs, compensated
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.ops import mx_tiles, mx_tiles2, mx_tiles3

from ..helpers import torch_threads
from .models import inputs_of, logits, mx_layers, same, tiny
from .test_calibrate import TEXT
from .test_passes import Block, needs_the_compiler, traced

load = AutoModelForCausalLM.from_pretrained
MIXED = {"down_proj": "mxint8", "v_proj": "mxfp8_e4m3", "*.layers.0.*": "mxfp6_e2m3", "layers.0.self_attn.k_proj": "bf16"}
needs_kernels = pytest.mark.skipif(cpu.library() is None, reason="the kernels are not available")


def formats(model) -> dict[str, str]:
    """Of the layers of the first block by their last names, and of the second one's."""
    return {name.removeprefix("model.layers."): layer.format.name for name, layer in mx_layers(model).items()}


# --- which layers -------------------------------------------------------------------------------------------------------------


def test_the_last_pattern_that_fits_counts():
    found = formats(mx.compress(tiny(), "mxfp4_e2m1", layer_formats=MIXED))
    block = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    first = dict.fromkeys(block, "mxfp6_e2m3") | {"self_attn.k_proj": "bf16"}
    second = dict.fromkeys(block, "mxfp4_e2m1") | {"mlp.down_proj": "mxint8", "self_attn.v_proj": "mxfp8_e4m3"}
    assert found == {f"{i}.{name}": format for i, own in enumerate((first, second)) for name, format in own.items()}
    turned = formats(mx.compress(tiny(), "mxfp4_e2m1", layer_formats=dict(reversed(MIXED.items()))))
    assert turned["0.mlp.down_proj"] == "mxint8" and turned["0.self_attn.k_proj"] == "mxfp6_e2m3"


@pytest.mark.parametrize("pattern, meant", [
    ("mlp", ".mlp."), ("layers.1", ".1."), ("model.layers.1.mlp.up_proj", ".1.mlp.up_proj"), ("*_proj", ""), ("*.1.*.?_proj", ".1.self_attn."), ("layers", "")])
def test_patterns_are_those_of_skip(pattern, meant):
    layers = mx_layers(mx.compress(tiny(), "mxfp4_e2m1", layer_formats={pattern: "mxint8"}))
    assert {name for name, layer in layers.items() if layer.format.name == "mxint8"} == {name for name in layers if meant in name}
    skipped = mx_layers(mx.compress(tiny(), "mxfp4_e2m1", skip=["lm_head", pattern])) if meant else {}
    assert layers.keys() - skipped.keys() == {name for name in layers if meant in name}


def test_skip_and_the_heads_own_argument_come_first():
    everything = {"model": "mxint8", "*": "mxint8"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mx.compress(tiny(), "mxfp4_e2m1", skip=["down_proj"], layer_formats=everything)
        assert len(mx_layers(model)) == 12 and set(formats(model).values()) == {"mxint8"} and type(model.lm_head) is torch.nn.Linear
        assert formats(mx.compress(tiny(), "mxfp4_e2m1", layer_formats=everything, lm_head="mxfp6_e2m3"))["lm_head"] == "mxfp6_e2m3"
    for name in ("lm_head", "lm_*"):
        model = tiny()
        with pytest.raises(ValueError, match=r"layer_formats: 'lm_.*' is the output head.*pass lm_head='mxint8'"):
            mx.compress(model, layer_formats={"up_proj": "mxint8", name: "mxint8"})
        assert not mx_layers(model)


def test_names_that_no_module_has_are_named():
    with pytest.warns(UserWarning, match="layer_formats: the model has no module 'dwon_proj'; nothing gets its format"):
        mx.compress(tiny(), layer_formats={"dwon_proj": "mxint8", "up_proj": "mxint8"})


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"up_proj": "mxfp5"}, ValueError, r"layer_formats\['up_proj'\]='mxfp5' is not an MX format. Take one of"),
    ({"up_proj": None}, ValueError, r"layer_formats\['up_proj'\]=None"),
    ("up_proj=mxint8", TypeError, "layer_formats must be a dict of module names and formats"),
    (["up_proj"], TypeError, "layer_formats must be a dict"),
    ({3: "mxint8"}, TypeError, "layer_formats must be a dict"),
    (3, TypeError, "layer_formats must be a dict"),
])
def test_wrong_ones_are_refused_before_anything_is_changed(given, error, words):
    model = tiny()
    for work in (lambda: mx.compress(model, layer_formats=given), lambda: mx.MXConfig(layer_formats=given)):
        with pytest.raises(error, match=words):
            work()
    assert not mx_layers(model)


def test_the_report_says_the_format_of_each_layer():
    report = mx.compress(tiny(), "mxfp4_e2m1", layer_formats={"layers.1.mlp": "mxint8"}).mx_report
    cells = {row[0]: row[2] for row in report.rows()}
    assert cells["model.layers.0.mlp.up_proj"] == "mxfp4_e2m1" and cells["model.layers.1.mlp.up_proj"] == "mxint8"
    assert cells["model.layers.0-1.self_attn.q_proj (2)"] == "mxfp4_e2m1"


# --- saved and read -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "qwen2", "qwen3_moe"])
def test_saved_and_read_bit_for_bit_and_on_the_fly(kind, tmp_path):
    own = {"mlp": "mxfp6_e3m2", "self_attn": "mxfp8_e5m2", "attention": "bf16", "layers.0": "mxint8"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each of these models has other names
        tiny(kind).save_pretrained(tmp_path / "dense")
        model = mx.compress(load(tmp_path / "dense"), "mxfp4_e2m1", layer_formats=own)
        fly = load(tmp_path / "dense", quantization_config=mx.MXConfig("mxfp4_e2m1", layer_formats=own))
    assert same(model, fly) and model.mx_report == fly.mx_report and len(set(formats(model).values())) > 1
    for number, each in enumerate((model, fly)):
        each.save_pretrained(tmp_path / str(number))
        again = load(tmp_path / str(number))
        assert same(again, model) and formats(again) == formats(model)
        again.save_pretrained(tmp_path / f"{number} again")
        for name in ("config.json", "model.safetensors"):
            assert (tmp_path / f"{number} again" / name).read_bytes() == (tmp_path / "0" / name).read_bytes()
    assert same(copy.deepcopy(model), model)
    dense = mx.load(AutoModelForCausalLM, tmp_path / "0", dequantize=True)
    assert same(dense, mx.dequantize(model)) and not mx_layers(dense)


def test_the_order_survives_a_config_whose_keys_are_sorted(tmp_path):
    """`z` before `a`: sorted, the wrong one would be the last."""
    own = {"up_proj": "mxint8", "*.mlp.*": "mxfp4_e2m1", "gate_proj": "mxfp8_e4m3"}
    for given in (own, dict(reversed(own.items()))):
        model = mx.compress(tiny(), layer_formats=given)
        model.save_pretrained(tmp_path)
        again = load(tmp_path)
        assert same(again, model) and list(again.config.quantization_config.layer_formats.items()) == list(given.items())
    repeated = mx.MXConfig(layer_formats=[("a", "mxint8"), ("b", "bf16"), ("a", "fp32")])
    assert list(repeated.layer_formats.items()) == [("b", "bf16"), ("a", "fp32")]


def test_the_base_model_reads_them_and_a_headed_one_reads_the_base_models(tmp_path):
    whole = mx.compress(tiny(), "mxfp4_e2m1", layer_formats={"*_proj": "mxfp6_e2m3", "model.layers.0.mlp.up_proj": "mxint8"})
    base = mx.compress(tiny().model, "mxfp4_e2m1", layer_formats={"*_proj": "mxfp6_e2m3", "layers.0.mlp.up_proj": "mxint8"})
    whole.save_pretrained(tmp_path / "whole")
    base.save_pretrained(tmp_path / "base")
    one, two = AutoModel.from_pretrained(tmp_path / "whole"), load(tmp_path / "base")
    assert formats(two) == formats(whole) and list(formats(one).values()) == list(formats(base).values())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), base.state_dict().values(), strict=True))


def test_version_two_is_written_for_them_alone_and_files_without_stay_as_they_were(tmp_path):
    plain = {"quant_method": "mx", "format": "mxfp6_e2m3", "scale_rule": "even", "skip": [], "lm_head": None, "version": 1}
    for given in (None, {}, []):
        config = mx.MXConfig(layer_formats=given)
        assert json.loads(config.to_json_string(use_diff=False)) == plain and list(config.to_dict()) == list(mx.MXConfig().to_dict())
    saved = mx.MXConfig(layer_formats={"b": "mxint8", "a": "bf16"}).to_dict()
    assert saved == plain | {"version": 2, "layer_formats": [["b", "mxint8"], ["a", "bf16"]]}
    assert mx.MXConfig.from_dict(saved).to_dict() == saved
    mx.compress(tiny()).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == plain


def test_a_newer_version_is_refused_as_that_whatever_else_it_has():
    with pytest.raises(ValueError, match="version 4; this package reads up to 3. Upgrade hf-specdec"):
        mx.MXConfig(version=4, something_new=1)


# --- with calibration and rounded activations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [4.0, 0.0])
def test_calibrated_layers_are_rounded_to_their_own_formats(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "MEMORY", memory)
    original = tiny()
    model = mx.compress(copy.deepcopy(original), "mxfp4_e2m1", layer_formats=MIXED, calibration=TEXT)
    notes = {layer.name: layer.note for layer in model.mx_report.compressed}
    assert notes.pop("model.layers.0.self_attn.k_proj") == "" and set(notes.values()) == {"calibrated"}
    x = inputs_of(original, "model.layers.0.self_attn.v_proj", TEXT)
    expected = compensated(original.model.layers[0].self_attn.v_proj.weight, model.model.layers[0].self_attn.v_proj.format, "even", Inputs.of(x.T @ x))
    assert (model.model.layers[0].self_attn.v_proj.packed().codes == expected.codes).float().mean() > 0.99
    model.save_pretrained(tmp_path)
    assert same(load(tmp_path), model)


def test_layers_whose_format_does_not_go_with_rounded_activations_have_theirs_as_they_are(tmp_path):
    own = {"k_proj": "mxfp8_e4m3", "up_proj": "bf16"}
    original = tiny()
    model = mx.compress(copy.deepcopy(original), "mxfp4_e2m1", activations="mxint8", layer_formats=own, calibration=TEXT)
    for name, layer in mx_layers(model).items():
        assert layer.activations == (None if layer.format.name in own.values() else "mxint8")
    for name, rounds in (("q_proj", True), ("k_proj", False), ("v_proj", True)):  # all of one input
        layer, x = model.model.layers[0].self_attn.get_submodule(name), inputs_of(original, f"model.layers.0.self_attn.{name}", TEXT)
        x = mx.linear.round_to_integers(x) if rounds else x
        expected = compensated(original.model.layers[0].self_attn.get_submodule(name).weight, layer.format, "even", Inputs.of(x.T @ x))
        assert (layer.packed().codes == expected.codes).float().mean() > 0.99
    model.save_pretrained(tmp_path / "mx")
    again = load(tmp_path / "mx")
    original.save_pretrained(tmp_path / "dense")
    fly = load(tmp_path / "dense", quantization_config=mx.MXConfig("mxfp4_e2m1", activations="mxint8", layer_formats=own))
    for other in (again, fly):
        assert [layer.activations for layer in mx_layers(other).values()] == [layer.activations for layer in mx_layers(model).values()]
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(ValueError, match="activations='mxint8' goes with"):
        mx.compress(tiny(), "mxfp8_e4m3", activations="mxint8", layer_formats={"*": "mxint8"})


# --- products of one input ----------------------------------------------------------------------------------------------------------


def mixed(names, integers=False, bias=False):
    """A module that calls layers of these formats on one tensor."""
    block = Block(len(names))
    torch.manual_seed(1)
    for i, name in enumerate(names):
        layer = MXLinear.from_linear(torch.nn.Linear(64, 64 + 16 * i, bias=bias), name)
        layer.activations = "mxint8" if integers and layer.format.fits_int8 else None
        block.own[i] = layer.prepare()
    return block


PAIRS = [*itertools.permutations(["mxfp4_e2m1", "mxfp6_e2m3", "mxfp6_e3m2", "mxint8", "mxfp8_e5m2", "bf16", "fp32"], 2)]
TRIPLES = [("mxfp4_e2m1", "mxfp6_e2m3", "mxint8"), ("mxint8", "mxfp8_e4m3", "mxfp4_e2m1"), ("bf16", "mxfp4_e2m1", "fp32"), ("mxfp6_e2m3", "mxfp6_e3m2", "mxfp6_e2m3")]


@pytest.mark.share(2)
@needs_kernels
@pytest.mark.parametrize("path", cpu.PATHS)
@pytest.mark.parametrize("integers", [False, True])
def test_products_of_different_formats_made_at_once_have_the_bits_of_those_alone(integers, path):
    if path not in mx.kernel_info()["available"]:
        pytest.skip("this processor lacks the instructions")
    mx.set_kernel_path(path)
    try:
        for names in (*PAIRS, *TRIPLES):
            own = list(mixed(names, integers, bias=True).own)
            MXLinear.gather(own)
            table, together = own[0]._place[0], {2: mx_tiles2, 3: mx_tiles3}[len(own)]
            for rows, dtype in itertools.product((1, 2, 9, 40), (torch.float32, torch.bfloat16, torch.float16)):
                x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
                found = together(x, table, *range(len(own)), *(layer.out_features for layer in own))
                with torch.no_grad():
                    alone = [layer(x) for layer in own]
                assert all(torch.equal(a, b) for a, b in zip(found, alone)), (names, rows, dtype)
    finally:
        mx.set_kernel_path(None)


@needs_kernels
@pytest.mark.parametrize("names", TRIPLES)
def test_a_graph_whose_products_are_merged_has_the_bits_of_the_layers_alone(names):
    block, x = mixed(names), torch.randn(2, 64)
    MXLinear.gather([*block.own, block.last])
    with torch.no_grad():
        alone = block(x)
    torch._dynamo.reset()
    targets, out = traced(block, x)
    assert targets.count(mx_tiles3) == 1 and targets.count(mx_tiles) == 1
    assert all(torch.equal(a, b) for a, b in zip(alone, out))


@needs_kernels
@needs_the_compiler
@pytest.mark.share(1)
@pytest.mark.parametrize("direct", [True, False])
def test_compiled_passes_of_mixed_models_agree_with_eager_ones(direct, monkeypatch):
    if direct and kernel_passes.c_interface() is None:
        pytest.skip("this torch's generated code cannot call the library")
    if not direct:
        monkeypatch.setattr(kernel_passes, "c_interface", lambda: None)
    own = {"k_proj": "mxint8", "v_proj": "mxfp6_e2m3", "up_proj": "bf16", "layers.1.mlp.down_proj": "mxfp8_e4m3"}
    model = mx.compress(tiny(), "mxfp4_e2m1", layer_formats=own, lm_head="mxint8", measure=False)
    model.set_attn_implementation("hf_specdec_rows")
    text = list(range(1, 20))
    with torch_threads(2), torch.no_grad():
        cached = CachedModel(enable(model), 64, compile=True)
        cached.score([text[:12]])
        cached.commit([1])
        eager = cached.score([text[:13]])  # the first pass of a function is compared with an eager one, which is what it returns
        found = cached.score([text[:13]])
    assert cached.compiled.usable and (found - eager).norm() < 1e-5 * eager.norm()


@pytest.mark.parametrize("dense", DENSE)
def test_dense_formats_among_others_keep_the_numbers(dense):
    original = tiny()
    model = mx.compress(copy.deepcopy(original), layer_formats={"layers.0": dense})
    weight = original.model.layers[0].mlp.up_proj.weight.detach()
    assert torch.equal(model.model.layers[0].mlp.up_proj.dequantize(), weight.bfloat16().float() if dense == "bf16" else weight)


FRESH = """
import sys, torch
from hf_specdec import mx
from transformers import AutoModelForCausalLM
torch.save(AutoModelForCausalLM.from_pretrained(sys.argv[1]).state_dict(), sys.argv[2])
"""


@pytest.mark.share(0)
def test_a_fresh_process_reads_the_same_bits(tmp_path):
    model = mx.compress(tiny(), "mxfp4_e2m1", layer_formats=MIXED)
    model.save_pretrained(tmp_path / "mx")
    subprocess.run([sys.executable, "-c", FRESH, str(tmp_path / "mx"), str(tmp_path / "state.pt")], check=True)
    state = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
