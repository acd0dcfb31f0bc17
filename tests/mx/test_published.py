"""Checkpoints with MX weights as other libraries write them: the bytes are theirs, and the numbers what they stand for."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specdec import mx
from hf_specdec.bench.embedded import load_model
from hf_specdec.cli import app
from hf_specdec.mx.experts import ExpertMatrix
from hf_specdec.mx.linear import MXMatrix
from hf_specdec.mx.publish import _packed, publish
from hf_specdec.mx.published import published

from ..helpers import VOCAB, build, generated, plain, prompts, speculate, word_tokenizer
from .models import SIZE, logits, mx_layers, same, tiny

WEIGHTS = "model.safetensors"
FLOAT8 = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}
HEAD, DENSE = "lm_head", "model.layers.1.mlp.down_proj"  # what stays in numbers
CT = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": [HEAD, DENSE], "transform_config": {}}
QUARK = {"quant_method": "quark", "algo_config": None, "exclude": [HEAD], "global_quant_config": {
    "weight": {"dtype": "fp6_e3m2", "scale_format": "e8m0", "group_size": 32}, "input_tensors": {"dtype": "fp6_e2m3", "scale_format": "e8m0"}}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": [HEAD]}
AUTOROUND = {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4, "group_size": 32, "act_bits": 4}
BLOCKS = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}
# name: config, format, name of codes, name of scales, type of scales
WRITTEN = {
    "compressed-tensors 4": (CT, "mxfp4_e2m1", "weight_packed", "weight_scale", torch.uint8),
    "compressed-tensors 6": (CT | {"format": "mxfp6-pack-quantized"}, "mxfp6_e2m3", "weight_packed", "weight_scale", torch.uint8),
    "compressed-tensors 8": (CT | {"format": "mxfp8-quantized"}, "mxfp8_e4m3", "weight", "weight_scale", torch.uint8),
    "modelopt 8": (MODELOPT, "mxfp8_e4m3", "weight", "weight_scale", torch.uint8),
    "modelopt 4": (MODELOPT | {"quant_algo": "mxfp4"}, "mxfp4_e2m1", "weight", "weight_scale", torch.uint8),
    "quark 6": (QUARK, "mxfp6_e3m2", "weight", "weight_scale", torch.uint8),
    "auto-round 4": (AUTOROUND, "mxfp4_e2m1", "weight_packed", "weight_scale", torch.uint8),
    "mxfp8": (BLOCKS | {"quant_method": "mxfp8"}, "mxfp8_e5m2", "weight", "weight_scale_inv", torch.uint8),
    "fp8": (BLOCKS, "mxfp8_e4m3", "weight", "weight_scale_inv", torch.float8_e8m0fnu),
}


def write(folder, model, kind: str, format_of=lambda name, own: own) -> dict[str, mx.packed.PackedMatrix]:
    """Save `model` as that writer does, with formats by layer; what it has packed, by name."""
    config, own, codes, scales, of_scales = WRITTEN[kind]
    model.save_pretrained(folder)
    tensors, packed = load_file(folder / WEIGHTS), {}
    for name in [name.removesuffix(".weight") for name in tensors if name.endswith("proj.weight") and not name.startswith((HEAD, DENSE))]:
        packed[name] = part = mx.quantize(tensors.pop(f"{name}.weight").float(), format_of(name, own))
        tensors[f"{name}.{codes}"] = part.codes.view(FLOAT8.get(part.format.name, torch.uint8))
        tensors[f"{name}.{scales}"] = part.scales.view(of_scales)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    edit(folder, quantization_config=config)
    word_tokenizer(range(VOCAB)).save_pretrained(folder)
    return packed


def edit(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")


def same_bytes(layer: MXMatrix, packed) -> bool:
    own = layer.packed()
    return own.format == packed.format and torch.equal(own.codes, packed.codes) and torch.equal(own.scales, packed.scales)


load = partial(mx.load, AutoModelForCausalLM)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    write(folder, tiny("qwen2", dtype=torch.bfloat16), "compressed-tensors 4")
    return folder


@pytest.fixture
def copied(four, tmp_path):
    return shutil.copytree(four, tmp_path / "copy")


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_bytes_are_the_checkpoints_and_the_numbers_what_they_stand_for(kind, tmp_path):
    dense = tiny("qwen2", dtype=torch.bfloat16)  # with biases
    packed = write(tmp_path, dense, kind)
    model = load(tmp_path)
    layers = mx_layers(model)
    assert all(same_bytes(layers[name], part) for name, part in packed.items()) and len(packed) == 13
    for name, part in packed.items():
        dense.get_submodule(name).weight.data = part.dequantize(torch.bfloat16)
    assert {layers[name].format.name for name in (HEAD, DENSE)} == {"bf16"}
    assert torch.allclose(logits(model).float(), logits(dense).float(), atol=0.05 * float(logits(dense).abs().max()))
    again = load(tmp_path, dequantize=True)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in dense.state_dict().items()) and not mx_layers(again)


def test_formats_may_differ_by_layer(tmp_path):
    packed = write(tmp_path, tiny(dtype=torch.bfloat16), "modelopt 8", lambda name, own: "mxfp4_e2m1" if "mlp" in name else own)
    model = load(tmp_path)
    layers = mx_layers(model)
    assert all(same_bytes(layers[name], part) for name, part in packed.items()) and {part.format.name for part in packed.values()} == {"mxfp8_e4m3", "mxfp4_e2m1"}
    model.save_pretrained(tmp_path / "again")
    assert same(model, load(tmp_path / "again"))


def test_rotations_that_are_in_the_weights_are_no_matter(tmp_path):
    packed = write(tmp_path, tiny(dtype=torch.bfloat16), "quark 6")
    edit(tmp_path, quantization_config=QUARK | {"algo_config": [{"name": "rotation", "r1": True, "r2": True, "r3": True, "r4": False}]})
    assert same_bytes(load(tmp_path).model.layers[0].mlp.up_proj, packed[NAME])


def test_the_report_says_what_was_read(four):
    layers = {layer.name: layer for layer in load(four).mx_report.layers}
    first = layers["model.layers.0.mlp.gate_proj"]
    assert (first.shape, first.format, first.note, first.bytes_after) == ((96, 64), "mxfp4_e2m1", "as it was published", 96 * 32 + 96 * 2)
    assert layers[DENSE].format == layers[HEAD].format == "bf16"


def test_saved_it_is_an_mx_checkpoint(four, tmp_path):
    model = load(four)
    model.save_pretrained(tmp_path)
    assert not any("packed" in name for name in load_file(tmp_path / WEIGHTS)) and same(model, load(tmp_path))
    stored = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert stored["quant_method"] == "mx" and not {"origin", "stored"} & stored.keys()


@pytest.mark.parametrize("dtype, tiles", [(torch.float32, "fp32"), (torch.float16, None)])
def test_what_is_in_numbers_goes_into_tiles_of_the_models_dtype_or_stays(four, dtype, tiles):
    model = load(four, dtype=dtype)
    assert model.dtype == dtype and getattr(model.lm_head, "format", None) == (tiles and mx.packed.get_format(tiles))
    assert mx_layers(model)["model.layers.0.mlp.up_proj"].format.name == "mxfp4_e2m1" and bool(logits(model).isfinite().all())


def test_a_packed_head_is_read_and_a_tied_one_goes_into_tiles(tmp_path):
    write(tmp_path / "own", tiny(dtype=torch.bfloat16), "compressed-tensors 8")
    tensors = load_file(tmp_path / "own" / WEIGHTS)
    part = mx.quantize(tensors[f"{HEAD}.weight"].float(), "mxfp8_e4m3")
    tensors |= {f"{HEAD}.weight": part.codes.view(torch.float8_e4m3fn), f"{HEAD}.weight_scale": part.scales}
    save_file(tensors, tmp_path / "own" / WEIGHTS, metadata={"format": "pt"})
    assert same_bytes(load(tmp_path / "own").lm_head, part)
    write(tmp_path / "tied", tiny(dtype=torch.bfloat16, tie_word_embeddings=True), "compressed-tensors 8")
    model = load(tmp_path / "tied")
    assert model.lm_head.format.name == "bf16" and torch.equal(model.lm_head.dequantize(torch.bfloat16), model.model.embed_tokens.weight)


@pytest.mark.parametrize("kind", ["compressed-tensors 4", "quark 6", "fp8"])
def test_experts_are_merged_as_bytes(kind, tmp_path):
    dense = tiny("qwen3_moe", dtype=torch.bfloat16)
    packed = write(tmp_path, dense, kind)
    model = load(tmp_path)
    for number in range(2):
        own = f"model.layers.{number}.mlp.experts"
        experts = model.get_submodule(own)
        assert isinstance(experts.mx_gate_up_proj, ExpertMatrix) and experts.mx_down_proj.format == packed[f"{own}.0.down_proj"].format
        halves = [torch.cat([packed[f"{own}.{i}.{name}_proj"].codes for name in ("gate", "up")]) for i in range(4)]
        assert torch.equal(experts.mx_gate_up_proj.packed().codes, torch.cat(halves))
        assert torch.equal(experts.mx_down_proj.packed().scales, torch.cat([packed[f"{own}.{i}.down_proj"].scales for i in range(4)]))
    again = load(tmp_path, dequantize=True)
    assert torch.allclose(logits(model).float(), logits(again).float(), atol=0.05 * float(logits(again).abs().max()))
    model.save_pretrained(tmp_path / "again")
    assert same(model, load(tmp_path / "again"))


def test_experts_in_numbers_beside_packed_layers_go_into_tiles(tmp_path):
    dense = tiny("qwen3_moe", dtype=torch.bfloat16)
    write(tmp_path, dense, "compressed-tensors 4")
    tensors, whole = load_file(tmp_path / WEIGHTS), tmp_path / "dense"
    dense.save_pretrained(whole)
    kept = {name: part for name, part in load_file(whole / WEIGHTS).items() if ".experts." in name}
    save_file({name: part for name, part in tensors.items() if ".experts." not in name} | kept, tmp_path / WEIGHTS, metadata={"format": "pt"})
    model = load(tmp_path)
    assert model.model.layers[0].mlp.experts.mx_down_proj.format.name == "bf16" and model.model.layers[0].self_attn.q_proj.format.name == "mxfp4_e2m1"


def test_layers_that_the_model_lacks_are_left(copied):
    tensors = load_file(copied / WEIGHTS)
    more = {name.replace("layers.1.", "layers.2."): part.clone() for name, part in tensors.items() if "layers.1." in name}
    save_file(tensors | more, copied / WEIGHTS, metadata={"format": "pt"})
    assert len(load(copied).model.layers) == 2


def test_it_generates_and_is_what_the_command_line_loads(four, tmp_path):
    model, ids = load_model(str(four), device="cpu"), prompts(9, 6)
    assert model.model.layers[0].mlp.up_proj.format.name == "mxfp4_e2m1" and generated(speculate(model, ids), ids) == plain(model, ids)
    done = CliRunner().invoke(app, ["compress", str(four), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and "is compressed already (mxfp4_e2m1)" in " ".join(done.stderr.split())


@pytest.mark.parametrize("config, says", [
    (CT, True), (CT | {"format": "pack-quantized"}, False), (CT | {"format": "nvfp4-pack-quantized"}, False), (MODELOPT, True), (MODELOPT | {"quant_algo": "NVFP4"}, False),
    (QUARK, True), ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8"}}}, False), (AUTOROUND, True), (AUTOROUND | {"data_type": "int"}, False),
    (BLOCKS, True), (BLOCKS | {"weight_block_size": [128, 128]}, False), (BLOCKS | {"weight_block_size": None}, False), ({"quant_method": "gptq", "bits": 4}, False)])
def test_a_config_says_whether_a_checkpoint_is_in_an_mx_format(config, says):
    model = tiny()
    model.config.quantization_config = dict(config)
    assert (published(model.config) is not None) == says


@pytest.mark.parametrize("change, words", [
    ({"transform_config": {"config_groups": {"u": {}}}}, "turn their inputs first .transform_config"),
    (QUARK | {"algo_config": [{"name": "rotation", "r1": True, "r4": True}]}, "turn their inputs first .r4 .* only AMD Quark"),
    ({"format": "mxfp6", "config_groups": {"a": {"weights": "e2m3"}, "b": {"weights": "e3m2"}}}, "into E2M3 and others into E3M2"),
])
def test_what_a_config_says_of_more_than_weights_is_refused(copied, change, words):
    edit(copied, quantization_config=CT | change)
    with pytest.raises(ValueError, match=words):
        load(copied)


NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("change, words", [
    (lambda t: t | {f"{NAME}.weight_zero_point": torch.zeros(96, 2)}, f"^{NAME} has weight_zero_point beside its weight"),
    (lambda t: t | {f"{NAME}.weight_global_scale": torch.ones(1)}, f"^{NAME} has weight_global_scale beside"),
    (lambda t: t | {f"{NAME}.weight_scale": t[f"{NAME}.weight_scale"].repeat(1, 2)}, f"^{NAME}: its weight of 64 inputs is U8 .96, 32. with scales U8 .96, 4. .* no MX format"),
    (lambda t: t | {f"{NAME}.weight_scale": t[f"{NAME}.weight_scale"].float()}, "with scales F32"),
    (lambda t: t | {f"{NAME}.weight_packed": t[f"{NAME}.weight_packed"].view(torch.int32)}, "is I32"),
    (lambda t: {name: part for name, part in t.items() if name != f"{NAME}.weight_scale"}, "with scales nothing"),
    (lambda t: t | {"model.embed_tokens.weight": t["model.embed_tokens.weight"].to(torch.float8_e4m3fn)}, "^model.embed_tokens: its weight is F8_E4M3 .* it is Embedding"),
    (lambda t: {name: part for name, part in t.items() if not name.startswith(f"{NAME}.weight")}, "up_proj.weight"),
    (lambda t: {name: part for name, part in t.items() if "proj" not in name or "bias" in name}, "no layer of it is in an MX format as compressed-tensors"),
], ids=["zero point", "global scale", "sixteen", "float scales", "words", "no scales", "embedding", "missing", "none"])  # fmt: skip
def test_what_is_no_such_layer_is_refused_by_name(copied, change, words):
    save_file(change(load_file(copied / WEIGHTS)), copied / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=words):
        load(copied)


def test_experts_that_are_not_alike_are_refused(tmp_path):
    write(tmp_path, tiny("qwen3_moe", dtype=torch.bfloat16), "compressed-tensors 4")
    tensors, name = load_file(tmp_path / WEIGHTS), "model.layers.0.mlp.experts.1.up_proj"
    save_file({key: part for key, part in tensors.items() if not key.startswith(name)}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts.gate_up_proj: the checkpoint has it in 7 parts that are not alike, or not all of it"):
        load(tmp_path)


@pytest.mark.parametrize("kind, settings", [
    ("llama", {"format": "mxfp8_e4m3"}), ("qwen2", {"format": "mxfp4_e2m1"}), ("llama", {"format": "mxfp6_e2m3", "lm_head": "mxfp8_e4m3"}),
    ("llama", {"format": "mxfp4_e2m1", "layer_formats": {"self_attn": "mxfp8_e4m3", "down_proj": "bf16"}}), ("qwen3_moe", {"format": "mxfp4_e2m1"})],
    ids=["8", "4 and biases", "6 and a head", "mixed", "experts"])  # fmt: skip
def test_what_is_published_is_read_again_bit_for_bit(kind, settings, tmp_path):
    model = mx.compress(tiny(kind, dtype=torch.bfloat16), **settings)
    publish(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and len(config["config_groups"]) == len({layer.format.name for layer in _packed(model).values()})
    back, own = _packed(load(tmp_path / "out")), _packed(model)
    assert back.keys() == own.keys() and all(same_bytes(back[name], layer.packed()) for name, layer in own.items())
    assert model.config.quantization_config.quant_method == "mx"  # the model itself stays what it was
    dense, numbers = load(tmp_path / "out", dequantize=True).state_dict(), mx.dequantize(model).state_dict()
    assert all(torch.equal(value, dense[name]) for name, value in numbers.items())


def test_what_is_in_tiles_is_published_as_its_family_has_it(tmp_path):
    model = build("gpt_oss", 0, "eager", **SIZE, head_dim=16, num_local_experts=4, num_experts_per_tok=2).to(torch.bfloat16)  # whose experts lie turned, in one tensor
    publish(mx.compress(model, "mxfp8_e4m3", layer_formats={"experts": "bf16"}), tmp_path / "out")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]["ignore"]
    assert {HEAD, "model.layers.0.mlp.router"} <= set(ignored) and not any("self_attn" in name for name in ignored)
    back, own = load(tmp_path / "out", dequantize=True).state_dict(), mx.dequantize(model).state_dict()
    assert back.keys() == own.keys() and all(torch.equal(back[name], value) for name, value in own.items())


def test_the_library_reads_what_is_published(tmp_path):
    pytest.importorskip("compressed_tensors")
    model = mx.compress(tiny(dtype=torch.bfloat16), "mxfp4_e2m1", layer_formats={"self_attn": "mxfp8_e4m3", "up_proj": "mxfp6_e2m3"})
    publish(model, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    logits(theirs)
    numbers = mx.dequantize(model).state_dict()
    assert all(torch.equal(theirs.state_dict()[name], value) for name, value in numbers.items())


@pytest.mark.parametrize("make, words", [
    (lambda: tiny(), "has no MX layers"),
    (lambda: mx.to_tiles(tiny()), "has no MX layers"),
    (lambda: mx.compress(tiny(), "mxint8"), "knows no mxint8; it knows mxfp4_e2m1, mxfp6_e2m3, mxfp8_e4m3"),
    (lambda: mx.compress(tiny(), "mxfp6_e3m2"), "knows no mxfp6_e3m2"),
    (lambda: mx.compress(tiny(dtype=torch.bfloat16), activations="mxint8"), "^activations: the inputs of .* are rounded to MXINT8"),
    (lambda: mx.compress(tiny(), "mxfp8_e4m3"), "^model is in torch.float32: compressed-tensors unpacks to bfloat16"),
], ids=["dense", "tiles", "integers", "E3M2", "activations", "float32"])  # fmt: skip
def test_what_cannot_be_published_is_refused_before_anything_is_written(make, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        publish(make(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_that_no_checkpoint_holds_one_by_one_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("hf_specdec.mx.publish.get_model_conversion_mapping", lambda model: [])
    with pytest.raises(ValueError, match="do not hold its experts one by one"):
        publish(mx.compress(tiny("qwen3_moe", dtype=torch.bfloat16), "mxfp4_e2m1"), tmp_path / "out")


def test_a_full_folder_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("x", encoding="utf-8")
    with pytest.raises(OSError):
        publish(mx.compress(tiny(dtype=torch.bfloat16), "mxfp8_e4m3"), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_the_command_line_publishes(tmp_path):
    tiny(dtype=torch.bfloat16).save_pretrained(tmp_path / "in")
    word_tokenizer(range(VOCAB)).save_pretrained(tmp_path / "in")
    run = partial(CliRunner().invoke, app)
    done = run(["compress", str(tmp_path / "in"), "--format", "mxfp4_e2m1", "--layout", "compressed-tensors", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and "what reads compressed-tensors" in done.stdout and (tmp_path / "out" / "tokenizer.json").is_file()
    assert mx_layers(load(tmp_path / "out"))[NAME].format.name == "mxfp4_e2m1"
    for options, words in ((["--layout", "gguf"], "--layout gguf: take mx or compressed-tensors"), (["--layout", "compressed-tensors"], "knows no mxint8"),
                           (["--layout", "compressed-tensors", "--format", "mxfp4_e2m1", "--dtype", "float32"], "unpacks to bfloat16"),
                           (["--layout", "compressed-tensors", "--activations", "mxint8"], "--activations mxint8: compressed-tensors has no such layers")):
        done = run(["compress", str(tmp_path / "in"), "--format", "mxint8", "--out", str(tmp_path / "no"), *options])
        assert done.exit_code == 2 and words in " ".join(done.stderr.split()) and not (tmp_path / "no").exists()


def test_another_quantisation_is_refused(four):
    with pytest.raises(ValueError, match="^quantization_config: the weights of .* are in MX formats of compressed-tensors"):
        load(four, quantization_config=mx.MXConfig())


def test_the_librarys_own_numbers(copied):
    pytest.importorskip("compressed_tensors")
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": CT["format"]}}
    edit(copied, quantization_config=CT | {"config_groups": groups, "quantization_status": "compressed"})
    theirs = AutoModelForCausalLM.from_pretrained(copied)
    logits(theirs)  # it unpacks at the first pass
    ours = load(copied, dequantize=True).state_dict()
    assert len(theirs.state_dict()) >= len(ours)
    assert all(torch.equal(value.to(ours[name].dtype), ours[name]) for name, value in theirs.state_dict().items() if name in ours)


def test_a_config_may_name_it_as_its_draft(four):
    target, ids = tiny("qwen2"), prompts(9)
    out = speculate(target, ids, speculative={"draft": "model", "draft_source": str(four)}, k=3)
    assert generated(out, ids) == plain(target, ids) and out.speculation.draft_calls > 0
