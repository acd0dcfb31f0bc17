"""Calibration while a model is loaded: what `compress` makes of the loaded model, tensor by tensor and file by file; and what is refused before that."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from hf_specdec import mx
from hf_specdec.mx import in_place
from hf_specdec.mx.calibration import own_text
from hf_specdec.mx.swap import compress_layer

from ..helpers import VOCAB
from .models import mx_layers, same, tiny
from .test_calibrate import BAD, TEXT
from .test_layer_formats import MIXED

load = AutoModelForCausalLM.from_pretrained
FOUR = "mxfp4_e2m1"
LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(tmp_path):
    """A dense Llama's."""
    tiny().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def files(model, folder) -> dict[str, bytes]:
    model.save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# --- what it gives ------------------------------------------------------------------------------------------------------------

OPTIONS = [
    {"format": FOUR},
    {"format": FOUR, "lm_head": "mxint8", "skip": ["up_proj"], "scale_rule": "mse"},
    {"format": "mxfp6_e2m3", "activations": "mxint8"},
    {"format": FOUR, "layer_formats": MIXED},
    {"format": "bf16", "lm_head": FOUR, "layer_formats": {"q_proj": "mxint8"}},
]


@pytest.mark.share(1 / 3)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "head", "activations", "layers", "mostly_dense"])
@pytest.mark.filterwarnings("ignore:.*the model has no module")
@pytest.mark.parametrize("kind, tied", [("llama", False), ("llama", True), ("qwen3_moe", False)])
def test_it_is_compress_after_loading_tensor_by_tensor_and_file_by_file(kind, tied, options, tmp_path):
    tiny(kind, tie_word_embeddings=tied).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", quantization_config=mx.MXConfig(**options, calibration=TEXT))
    after = mx.compress(load(tmp_path / "dense"), **options, calibration=TEXT)
    assert same(model, after) and model.mx_report == after.mx_report and "calibrated" in str(model.mx_report.to_dict())
    assert not same(model, load(tmp_path / "dense", quantization_config=mx.MXConfig(**options)))
    assert files(model, tmp_path / "one") == files(after, tmp_path / "two")
    assert same(load(tmp_path / "one"), model)


def test_sixteen_bits_and_device_maps(tmp_path):
    tiny("qwen2", dtype=torch.bfloat16).save_pretrained(tmp_path)
    after = mx.compress(load(tmp_path, dtype="auto"), FOUR, calibration=TEXT)
    for device_map in (None, "cpu", "auto", {"": "cpu"}):
        model = load(tmp_path, dtype="auto", device_map=device_map, quantization_config=mx.MXConfig(FOUR, calibration=TEXT))
        assert model.dtype == torch.bfloat16 and same(model, after)


def test_an_encoder_decoder(tmp_path):
    torch.manual_seed(0)
    T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, decoder_start_token_id=0)).save_pretrained(tmp_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, quantization_config=mx.MXConfig(FOUR, calibration=TEXT))
    after = mx.compress(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), FOUR, calibration=TEXT)
    one, two = model.state_dict(), after.state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert any(layer.note == "calibrated" for layer in model.mx_report.layers)
    assert not any(part.config.quantization_config.calibration for part in model.modules() if hasattr(part, "config"))  # copies, the encoder's say


def test_one_config_serves_several_models_and_none_of_them_keeps_the_text(folder, tmp_path):
    """A generator of texts is read once, by the config."""
    config = mx.MXConfig(FOUR, calibration=(ids.tolist() for ids in TEXT))
    assert [ids.shape for ids in config.calibration] == [(1, 48)] * 6 and config.calibration[0].dtype == torch.int64
    models = [load(folder, quantization_config=each) for each in (config, config, copy.deepcopy(config), pickle.loads(pickle.dumps(config)))]
    assert all(same(models[0], other) for other in models[1:]) and len(config.calibration) == 6
    for owner in (models[0].config, models[0].hf_quantizer):
        assert owner.quantization_config.calibration is None
    assert "calibration" not in config.to_dict() and "calibration" not in repr(config) and "calibration" not in models[0].config.to_json_string()
    assert same(copy.deepcopy(models[0]), models[0]) and not mx_layers(models[0].dequantize())


def test_text_of_the_models_own(folder):
    dense = load(folder)
    text = own_text(dense, [1], tokens=64, length=32)
    assert same(load(folder, quantization_config=mx.MXConfig(FOUR, calibration=text)), mx.compress(dense, FOUR, calibration=text))


def test_dense_layers_go_as_they_are_compressed(folder, monkeypatch):
    weights, alive = [], []

    def watched(model, choice, *arguments):
        alive.append(sum(weight() is not None for weight in weights))
        weights.extend([weakref.ref(choice.module.weight)] if choice.format else [])
        return compress_layer(model, choice, *arguments)

    monkeypatch.setattr(in_place, "compress_layer", watched)
    load(folder, quantization_config=mx.MXConfig(FOUR, calibration=TEXT))
    assert len(weights) == 14 and max(alive) <= 1


# --- bad input ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def unread(monkeypatch):
    """No weight may be compressed."""
    monkeypatch.setattr(in_place, "compress_layer", lambda *_: pytest.fail("compressed a layer"))
    monkeypatch.setattr("hf_specdec.mx.calibrate.read", lambda *_: pytest.fail("read a text"))


def broken(folder):
    """Weights that cannot be read: what is refused before that, is refused first."""
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


@pytest.mark.parametrize("calibration, error, words", BAD)
def test_bad_calibration_is_refused_before_the_weights_are_read(calibration, error, words, folder, unread):
    with pytest.raises(error, match=words):
        load(folder, quantization_config=mx.MXConfig(FOUR, calibration=calibration))


@pytest.mark.parametrize("calibration, error, words", [
    ("a text", TypeError, r"not str; a text is read by a tokenizer first: pieces\("),
    (["a text"], TypeError, r"calibration\[0\] is a str.*tokenizer first: pieces\("),
    ([], ValueError, "calibration is empty"),
    ([[1, 2], []], ValueError, r"calibration\[1\] has no tokens: leave it out"),
    (7, TypeError, "calibration must be sequences of token ids, not int"),
])
def test_what_is_wrong_for_every_model_the_config_refuses(calibration, error, words):
    with pytest.raises(error, match=words):
        mx.MXConfig(FOUR, calibration=calibration)


def test_what_is_wrong_for_this_model_is_refused_before_its_weights_are_read(folder, unread):
    with pytest.raises(ValueError, match=f"from 1 to {VOCAB}; the model's go from 0"):
        load(broken(folder), quantization_config=mx.MXConfig(FOUR, calibration=[[1, VOCAB]]))
    with pytest.raises(ValueError, match="calibration has no meaning where nothing is rounded"):
        load(folder, quantization_config=mx.MXConfig("bf16", lm_head="fp32", calibration=TEXT))
    with pytest.raises(ValueError, match=f"{LAYER} would be offloaded.*device_map".replace("up_proj", ".*")):
        load(folder, device_map={"": "cpu", "model.layers.0.mlp": "disk"}, quantization_config=mx.MXConfig(FOUR, calibration=TEXT))


def test_a_compressed_checkpoint_takes_no_calibration(tmp_path):
    mx.compress(tiny(), FOUR, measure=False).save_pretrained(tmp_path)
    broken(tmp_path)
    for read in (load, lambda folder, **options: mx.load(AutoModelForCausalLM, folder, **options)):
        with pytest.raises(ValueError, match="^calibration: this checkpoint is compressed already.*Leave calibration out"), pytest.warns(UserWarning):
            read(tmp_path, quantization_config=mx.MXConfig(FOUR, calibration=TEXT))
    with pytest.raises(ValueError, match="calibration has no meaning with dequantize=True"):
        mx.MXConfig(dequantize=True, calibration=TEXT)


def test_offloaded_and_wrong_weights_are_refused_before_any_layer_is_compressed(folder, tmp_path, unread, monkeypatch):
    pytest.importorskip("accelerate")
    config = mx.MXConfig(FOUR, calibration=TEXT)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="would be offloaded.*device_map"):
        patch.setattr("hf_specdec.mx.quantizer.check_devices", lambda *_: None)  # as with "auto", of which nothing is known before
        load(folder, device_map={"model": "disk", "lm_head": "cpu"}, offload_folder=tmp_path / "offload", quantization_config=config)
    model = tiny()
    model.get_submodule(LAYER).weight.data[5, 7] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ValueError, match=f"{LAYER}.weight holds a NaN"):
        load(tmp_path / "nan", quantization_config=config)


def test_an_offloaded_embedding_is_none_of_the_layers(folder, tmp_path):
    pytest.importorskip("accelerate")
    places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    model = load(folder, device_map=places, offload_folder=tmp_path / "offload", quantization_config=mx.MXConfig(FOUR, calibration=TEXT))
    after = mx.compress(load(folder), FOUR, calibration=TEXT)
    assert all(torch.equal(layer.packed().codes, after.get_submodule(name).packed().codes) for name, layer in mx_layers(model).items())
