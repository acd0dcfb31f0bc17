"""transformers' side: compressing on the fly, saving, loading, and what a wrong checkpoint says."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import hf_specdec
from hf_specdec import mx
from hf_specdec.mx.formats import DENSE

from ..helpers import generated, plain, prompts, speculate
from .models import allocated, logits, mx_layers, same, tiny

load = AutoModelForCausalLM.from_pretrained
KINDS = ["llama", "gpt_neox", "qwen2", "qwen3_moe"]
LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(tmp_path):
    """A compressed Llama's."""
    mx.compress(tiny()).save_pretrained(tmp_path / "mx")
    return tmp_path / "mx"


def edited(folder: Path, edit) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


def configured(folder: Path, **changes) -> Path:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"].update(changes)
    file.write_text(json.dumps(config))
    return folder


# --- on the fly ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_fly_is_compress_after_loading_bit_for_bit(kind, tmp_path):
    tiny(kind).save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=mx.MXConfig())
    after = mx.compress(load(tmp_path))
    assert same(model, after) and model.mx_report == after.mx_report
    assert mx_layers(model).keys() == mx_layers(after).keys() and model.config.quantization_config.to_dict() == after.config.quantization_config.to_dict()


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto", None])
@pytest.mark.parametrize("device_map", [None, "cpu", "auto"])
def test_on_the_fly_with_other_dtypes_and_device_maps(dtype, device_map, tmp_path):
    tiny("qwen2").save_pretrained(tmp_path)
    model = load(tmp_path, dtype=dtype, device_map=device_map, quantization_config=mx.MXConfig("mxint8", "mse"))
    assert same(model, mx.compress(load(tmp_path, dtype=dtype), "mxint8", scale_rule="mse"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [None, "mxfp4_e2m1"])
def test_on_the_fly_heads_and_skips(tied, head, tmp_path):
    tiny(tie_word_embeddings=tied).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=mx.MXConfig(lm_head=head, skip=["up_proj"]))
    after = mx.compress(load(tmp_path / "dense"), lm_head=head, skip=["up_proj"])
    assert same(model, after) and model.mx_report == after.mx_report
    assert model.config.tie_word_embeddings is (tied and head is None)
    model.save_pretrained(tmp_path / "mx")
    assert same(load(tmp_path / "mx"), model)
    mx.dequantize(copy.deepcopy(model)).save_pretrained(tmp_path / "back")
    assert same(load(tmp_path / "back"), mx.dequantize(model))


def test_on_the_fly_holds_a_few_dense_layers_at_most(tmp_path):
    models = []
    tiny(hidden_size=256, intermediate_size=512, num_hidden_layers=12, num_attention_heads=4).save_pretrained(tmp_path / "dense")
    peak, final = allocated(lambda: models.append(load(tmp_path / "dense", quantization_config=mx.MXConfig())))
    assert peak < final + 4 * 256 * 512 * 4
    models[0].save_pretrained(tmp_path / "mx")
    peak, final = allocated(lambda: models.append(load(tmp_path / "mx")))
    assert peak < final + 4 * 256 * 512 * 4 and same(*models)


@pytest.mark.parametrize("format", ["mxfp6_e2m3", *DENSE])
def test_on_the_fly_bad_weights_and_models(format, tmp_path):
    model = tiny()
    model.get_submodule(LAYER).weight.data[5, 7] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ValueError, match=rf"{LAYER}\.weight holds a NaN".replace(".", r"\.").replace(r"\\.", r"\.")):
        load(tmp_path / "nan", quantization_config=mx.MXConfig(format))
    assert len(mx_layers(load(tmp_path / "nan", quantization_config=mx.MXConfig(format, skip=[LAYER])))) == 13
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="no layer that can be compressed: its layers are Conv1D, which is not supported [^,]*$"):
        load(tmp_path / "gpt2", quantization_config=mx.MXConfig(format))
    assert list(mx_layers(load(tmp_path / "gpt2", quantization_config=mx.MXConfig(format, lm_head=format)))) == ["lm_head"]


# --- saving and loading -------------------------------------------------------------------------------------------------------


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("format", [*mx.FORMATS, *DENSE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saved_and_loaded_bit_for_bit(format, dtype, tmp_path):
    model = mx.compress(tiny("qwen2", dtype=dtype), format, lm_head=format)
    model.save_pretrained(tmp_path / "once")
    loaded = load(tmp_path / "once", dtype="auto")
    assert same(loaded, model) and loaded.dtype == dtype
    loaded.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "twice/model.safetensors").read_bytes() == (tmp_path / "once/model.safetensors").read_bytes()
    assert same(mx.load(AutoModelForCausalLM, tmp_path / "twice", dtype="auto"), model)


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_dense_on_request(kind, tmp_path):
    model = mx.compress(tiny(kind))
    model.save_pretrained(tmp_path / "mx")
    dense = mx.load(AutoModelForCausalLM, tmp_path / "mx", dequantize=True)
    assert not mx_layers(dense) and same(dense, mx.dequantize(model))
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    assert same(load(tmp_path / "dense"), dense)


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"device_map": "auto"}, {"attn_implementation": "eager"}])
def test_loading_takes_the_usual_arguments(options, folder):
    for model in (load(folder, **options), mx.load(AutoModelForCausalLM, folder, **options)):
        assert len(mx_layers(model)) == 14 and model.dtype == options.get("dtype", torch.float32)
        assert torch.equal(model.get_submodule(LAYER).packed().codes, mx.quantize(tiny().get_submodule(LAYER).weight).codes)
        assert logits(model).isfinite().all()


def test_the_base_model_of_a_checkpoint_loads_and_one_of_a_base_model_loads_with_a_head(folder, tmp_path):
    base = AutoModel.from_pretrained(folder)
    assert len(mx_layers(base)) == 14
    mx.dequantize(base)
    mx.compress(base).save_pretrained(tmp_path / "base")
    assert len(mx_layers(load(tmp_path / "base"))) == 14


def test_sharded_checkpoints(tmp_path):
    model = mx.compress(tiny())
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and same(load(tmp_path), model)


FRESH = """
import sys, torch
from hf_specdec import mx
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
dense = mx.load(AutoModelForCausalLM, sys.argv[1], dequantize=True)
torch.save([model.state_dict(), dense.state_dict()], sys.argv[2])
"""


def test_a_fresh_process_loads_the_same_bits(folder, tmp_path):
    file = tmp_path / "state.pt"
    subprocess.run([sys.executable, "-c", FRESH, str(folder), str(file)], check=True, cwd=Path(hf_specdec.__file__).parents[1])
    model = load(folder)
    for state, expected in zip(torch.load(file), (model.state_dict(), mx.dequantize(copy.deepcopy(model)).state_dict())):
        assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


def test_a_loaded_model_is_used_copied_and_speculates(folder):
    model = load(folder)
    rows = prompts(5, 9, seed=2)
    expected = plain(model, rows)
    assert generated(speculate(model, rows, tiny()), rows) == expected
    hf_specdec.disable(model)
    assert same(copy.deepcopy(model), mx.compress(tiny()))
    with pytest.raises(ValueError, match="MX layers already"):
        mx.compress(model)
    assert same(mx.compress(model.dequantize()), mx.compress(tiny()))


def test_a_checkpoint_keeps_its_own_config(folder):
    with pytest.warns(UserWarning, match="quantization_config"):
        model = load(folder, quantization_config=mx.MXConfig("mxfp4_e2m1"))
    assert same(model, mx.compress(tiny()))


# --- the config ---------------------------------------------------------------------------------------------------------------


def test_the_config_is_written_and_read():
    config = mx.MXConfig("mxint8", "mse", ["a", "b.*"], "mxfp8_e5m2", dequantize=True)
    saved = json.loads(config.to_json_string(use_diff=False))
    assert saved == {"quant_method": "mx", "format": "mxint8", "scale_rule": "mse", "skip": ["a", "b.*"], "lm_head": "mxfp8_e5m2", "version": 1}
    assert mx.MXConfig.from_dict(saved).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"format": "mxfp5"}, ValueError, "format='mxfp5'"),
        ({"scale_rule": "up"}, ValueError, "scale_rule='up'"),
        ({"lm_head": "x"}, ValueError, "^lm_head='x'"),
        ({"skip": "lm_head"}, TypeError, "skip must be a sequence"),
        ({"skip": 3}, TypeError, "skip must be a sequence"),
        ({"dequantize": 1}, ValueError, "dequantize=1 must be True or False"),
        ({"block_size": 16}, ValueError, "no option 'block_size'.*It has: format"),
        ({"version": 4}, ValueError, "version 4.*Upgrade hf-specdec"),
        ({"version": 0}, ValueError, "version=0"),
        ({"version": "1"}, ValueError, "version='1'"),
        ({"version": True}, ValueError, "version=True"),
        ({"version": None}, ValueError, "version=None"),
    ],
)
def test_wrong_options(arguments, error, words):
    with pytest.raises(error, match=words):
        mx.MXConfig(**arguments)


# --- wrong checkpoints --------------------------------------------------------------------------------------------------------


def both_fail(folder: Path, *words: str) -> None:
    for read in (lambda: load(folder), lambda: mx.load(AutoModelForCausalLM, folder)):
        with pytest.raises(ValueError) as caught:
            read()
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_newer_version(folder):
    both_fail(configured(folder, version=4), "version 4", "up to 3", "Upgrade hf-specdec")


def test_unknown_formats_and_options(folder):
    both_fail(configured(folder, format="mxfp3"), "format='mxfp3'")
    both_fail(configured(folder, format="mxint8", block=16), "no option 'block'")


@pytest.mark.parametrize("tensor", ["weight", "weight_scale"])
def test_tensors_that_are_missing(tensor, folder):
    both_fail(edited(folder, lambda tensors: tensors.pop(f"{LAYER}.{tensor}")), f"{LAYER}.{tensor} is not in the checkpoint")


def test_a_bias_that_is_missing(tmp_path):
    mx.compress(tiny("qwen2")).save_pretrained(tmp_path)
    name = "model.layers.1.self_attn.q_proj.bias"
    both_fail(edited(tmp_path, lambda tensors: tensors.pop(name)), f"{name} is not in the checkpoint")


@pytest.mark.parametrize("tensor", ["weight", "weight_scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bfloat16])
def test_tensors_of_another_type(tensor, dtype, folder):
    name = f"{LAYER}.{tensor}"
    both_fail(edited(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)})), name, "not U8", "has not written it")


@pytest.mark.parametrize("tensor, shape", [("weight", (96, 64)), ("weight", (95, 48)), ("weight_scale", (96, 3)), ("weight_scale", (192,))])
def test_tensors_of_another_shape(tensor, shape, folder):
    name = f"{LAYER}.{tensor}"
    both_fail(edited(folder, lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.uint8)})), name, str(list(shape)))


def test_a_config_of_another_format_than_the_tensors(folder):
    both_fail(configured(folder, format="mxint8"), "weight has shape", "does not fit the config's format")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_files_that_are_cut_short(share, folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    both_fail(folder, "model.safetensors", "damaged or cut short", "again")


def test_a_dense_folder_is_no_mx_checkpoint(tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not an MX checkpoint: its config has no quantisation.*AutoModelForCausalLM.from_pretrained"):
        mx.load(AutoModelForCausalLM, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ValueError, match="not an MX checkpoint: its config has quantisation by 'gptq'"):
        mx.load(AutoModelForCausalLM, tmp_path)


def test_dense_weights_under_an_mx_config(folder):
    tiny().save_pretrained(folder.parent / "dense")
    (folder / "model.safetensors").write_bytes((folder.parent / "dense/model.safetensors").read_bytes())
    both_fail(folder, "weight is F32 in the checkpoint, not U8")


def test_offloaded_layers(folder, tmp_path):
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match="would be offloaded.*device_map"):
        load(folder, device_map={"model": "disk", "lm_head": "cpu"}, offload_folder=tmp_path / "offload")
