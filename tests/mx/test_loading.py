"""What is passed to `from_pretrained` beside the checkpoint, and what a checkpoint lacks."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, BertConfig, BertLMHeadModel, BertModel

from hf_specdec import mx

from ..architectures import FAMILIES
from .models import mx_layers, same, tiny
from .test_plan import t5

load = AutoModelForCausalLM.from_pretrained


def test_one_config_serves_many_models(tmp_path):
    """T5's layers that stay dense are no other model's business."""
    t5().save_pretrained(tmp_path / "t5")
    tiny().save_pretrained(tmp_path / "llama")
    config = mx.MXConfig(skip=["k"])
    assert len(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t5", quantization_config=config).config.quantization_config.skip) == 5
    assert config.skip == ["k"]
    config.skip = ["up_proj"]
    model = load(tmp_path / "llama", quantization_config=config)
    assert model.config.quantization_config.skip == ["up_proj"] and model.config.quantization_config is not config


@pytest.mark.parametrize("options", [{"skip": ["layers.0.*", "up_proj"]}, {"layer_formats": {"layers.0.*": "mxint8"}}, {"skip": ["model.embed_tokens.*"], "layer_formats": {"layers.*": "bf16", "v_proj": "mxint8"}}],
                         ids=["skip", "layer_formats", "both"])
@pytest.mark.filterwarnings("ignore:.*the model has no module")
def test_a_pattern_that_fits_no_layer_fits_none_of_what_was_saved(options, tmp_path):
    """`layers.0.*` would fit those of a model without a head, as which the folder can be read, too."""
    tiny().save_pretrained(tmp_path / "dense")
    one, two = mx.compress(tiny(), **options), load(tmp_path / "dense", quantization_config=mx.MXConfig(**options))
    assert len(mx_layers(one)) == (12 if "up_proj" in options.get("skip", ()) else 14)
    for folder, model in ((tmp_path / "one", one), (tmp_path / "two", two)):
        model.save_pretrained(folder)
        base = AutoModel.from_pretrained(folder).state_dict()
        assert same(load(folder), model) and same(one, model) and all(torch.equal(model.state_dict()[f"model.{name}"], part) for name, part in base.items())
    assert (tmp_path / "one/config.json").read_text() == (tmp_path / "two/config.json").read_text()


@pytest.mark.parametrize("options", [{}, {"skip": ["q_proj", "in_proj_z"]}, {"format": "mxint8", "skip": ["q_proj", "in_proj_z"]}, {"layer_formats": {"k_proj": "bf16", "in_proj_z": "mxint8"}},
                                     {"format": "mxint8", "layer_formats": {"gate_proj": "mxfp4_e2m1"}}], ids=str)
@pytest.mark.parametrize("name", ["HRM (text)", "Sarvam-MoE", "Lara mini"])
@pytest.mark.filterwarnings("ignore:.*the model has no module")
def test_layers_that_a_checkpoint_has_in_one_tensor_may_be_stored_in_different_formats(name, options, tmp_path):
    family = next((family for family in FAMILIES if family.name == name), None)
    if family is None:
        pytest.skip(f"{name} needs a newer transformers")
    family.model().save_pretrained(tmp_path / "dense")
    model, read = mx.compress(load(tmp_path / "dense"), **options), load(tmp_path / "dense", quantization_config=mx.MXConfig(**options)).state_dict()
    assert all(torch.equal(part, read[name]) for name, part in model.state_dict().items())
    for folder in (tmp_path / "one", tmp_path / "two"):
        model.save_pretrained(folder)
        again = load(folder)
        expected, found = model.state_dict(), again.state_dict()
        assert expected.keys() == found.keys() and all(part.dtype == found[name].dtype and torch.equal(part, found[name]) for name, part in expected.items())
        model = again


def test_dequantize_is_taken_from_a_config_beside_the_checkpoint(tmp_path):
    model = mx.compress(tiny(), "mxint8")
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        packed = load(tmp_path, quantization_config=mx.MXConfig("mxfp4_e2m1"))
    assert same(packed, model) and packed.config.quantization_config.format == "mxint8"
    with pytest.warns(UserWarning, match="dequantize"):
        dense = load(tmp_path, quantization_config=mx.MXConfig(dequantize=True))
    assert not mx_layers(dense) and not hasattr(dense.config, "quantization_config") and same(dense, mx.dequantize(model))


def test_a_model_config_that_is_passed_stays_as_it_is(tmp_path):
    mx.compress(tiny()).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    before = config.to_dict()
    for dequantize in (True, False, True):
        assert bool(mx_layers(mx.load(AutoModelForCausalLM, tmp_path, config=config, dequantize=dequantize))) is not dequantize
        assert config.to_dict() == before


def test_layers_that_a_checkpoint_lacks_are_made_up_and_compressed(tmp_path):
    sizes = dict(vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    model = BertLMHeadModel.from_pretrained(tmp_path, is_decoder=True, add_cross_attention=True, quantization_config=mx.MXConfig())
    new = "bert.encoder.layer.0.crossattention.self.query"
    assert new in mx_layers(model) and 0 < model.get_submodule(new).dequantize().std() < 0.1
    assert {layer.name for layer in model.mx_report.compressed} == mx_layers(model).keys()


def test_float64_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"up_proj.weight is torch.float64: MX layers multiply float32"):
        mx.compress(tiny(dtype=torch.float64), skip=["self_attn", "gate_proj"])
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="dtype=torch.float64: MX layers multiply float32"):
        load(tmp_path, quantization_config=mx.MXConfig(), dtype=torch.float64)


def test_what_is_no_class_no_path_or_no_model_is_named(tmp_path):
    for value in (3, None, "llama"):
        with pytest.raises(TypeError, match="^auto_class: expected a class with from_pretrained, such as AutoModelForCausalLM, got "):
            mx.load(value, tmp_path)
    for value in (3, None, []):
        with pytest.raises(TypeError, match="^folder: expected a path"):
            mx.load(AutoModelForCausalLM, value)
    with pytest.raises(ValueError, match="^folder='.*': no model's config can be read there .*Name a folder that a compressed model was saved to"):
        mx.load(AutoModelForCausalLM, tmp_path)


@pytest.mark.parametrize("head", ["mxint8", "bf16"])
@pytest.mark.parametrize(("edited", "name"), [({"lm_head": None}, "lm_head"), ({"skip": ["mlp"]}, "model.layers.0.mlp.gate_proj")], ids=["head", "skip"])
def test_codes_that_an_edited_config_takes_for_dense_weights_are_refused(head, edited, name, tmp_path):
    mx.compress(tiny(dtype=torch.bfloat16), "mxint8", lm_head=head).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= edited
    path.write_text(json.dumps(config))
    for read in (load, partial(mx.load, AutoModelForCausalLM), partial(mx.load, AutoModelForCausalLM, dequantize=True)):
        with pytest.raises(ValueError, match=f"^{name}.weight is packed in the checkpoint, but a dense layer's by the config"):
            read(tmp_path)
