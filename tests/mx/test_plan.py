"""Which layers are left dense because they are more to the model than something to call; and a config that is the model's own."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, LlamaForCausalLM

from hf_specdec import mx
from hf_specdec.mx.calibration import own_text
from hf_specdec.mx.plan import plan
from hf_specdec.mx.readers import weights_read_by

from .models import IDS, mx_layers, same, tiny
from .test_compress import report_of


def t5(kind: str = "t5", **settings):
    settings = dict(vocab_size=61, d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, decoder_start_token_id=0, **settings)
    config = AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    return AutoModelForSeq2SeqLM.from_config(config).eval()


@pytest.mark.parametrize("make", [t5, lambda: t5(feed_forward_proj="gated-gelu"), lambda: t5("umt5"), lambda: t5("longt5")])
def test_a_layer_whose_weight_the_model_reads_stays_dense(make, tmp_path):
    """T5's `wo` says which type its input gets; UMT5 scales what a tied head gets."""
    model, ids = make(), torch.tensor([[3, 4, 5, 6]])
    before = model(input_ids=ids, decoder_input_ids=ids).logits
    mx.compress(model, "mxint8", lm_head="mxint8")
    notes = {layer.name: layer.note for layer in model.mx_report.layers}
    assert all(note == "the model reads its weight itself" for name, note in notes.items() if name.endswith(".wo"))
    after = model(input_ids=ids, decoder_input_ids=ids).logits
    assert torch.allclose(before, after, atol=0.05 * float(before.abs().max()))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=ids, decoder_input_ids=ids).logits, after)
    assert [name for name in notes if name.endswith(".wo")] == [name for name in again.config.quantization_config.skip if name.endswith(".wo")]


def test_a_packed_head_is_not_taken_for_one_that_lost_its_tie(tmp_path, caplog):
    """T5's config says that it ties whatever was saved: transformers compared numbers with bytes, and advised to change the config."""
    mx.compress(t5(), lm_head="mxint8").save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert isinstance(again.lm_head, mx.MXLinear) and "tied weights" not in caplog.text


def test_which_weights_are_read():
    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(64, 64) for _ in range(4))
            self.a.weight = self.b.weight

        def forward(self, x):
            x = self.c(x).to(self.c.weight.device).view(-1, self.b.weight.shape[0])
            return x @ self.helper() if x.dtype == self.d.weight.dtype else x

    class Reader(Base):
        def helper(self):
            return self.b.weight.t()

        def reset_parameters(self):
            self.c.weight.zero_()

    assert weights_read_by(Base) == {"d"} and weights_read_by(Reader) == {"b", "d"} and weights_read_by(nn.Linear) == set()
    choices = plan(nn.Sequential(Reader(), nn.Linear(64, 64)), "mxint8", (), None)
    assert [(choice.name, choice.format is None) for choice in choices] == [("0.a", False), ("0.b", True), ("0.c", False), ("0.d", True), ("1", False)]


def test_a_classifiers_head_stays_dense_like_any_other(tmp_path):
    tiny().save_pretrained(tmp_path / "dense")
    mx.compress(tiny()).save_pretrained(tmp_path / "packed")
    for folder, options in ((tmp_path / "dense", {"quantization_config": mx.MXConfig()}), (tmp_path / "packed", {})):
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5, **options)
        assert type(model.score) is nn.Linear and len(mx_layers(model)) == 14
    assert report_of(mx.compress(AutoModelForSequenceClassification.from_pretrained(tmp_path / "dense"), lm_head="mxint8"))["score"].format == "mxint8"


def bart():
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 96))}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", vocab_size=61, d_model=64, max_position_embeddings=64, **sizes))


def bert():
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", vocab_size=61, **sizes))


@pytest.mark.parametrize("make, inputs", [(bart, ["input_ids", "decoder_input_ids"]), (bert, ["input_ids"]), (t5, ["input_ids", "decoder_input_ids"])])
def test_what_was_tied_beside_the_head_is_saved_with_it(make, inputs, tmp_path):
    """BART's two embeddings are one with the head; so is BERT's bias."""
    torch.manual_seed(0)
    model, inputs = make().eval(), dict.fromkeys(inputs, torch.tensor([[3, 4, 5, 6]]))
    model.save_pretrained(tmp_path / "dense")
    packed = mx.compress(model, lm_head="mxint8")
    packed.save_pretrained(tmp_path / "packed")
    fly = type(model).from_pretrained(tmp_path / "dense", quantization_config=mx.MXConfig(lm_head="mxint8"))
    fly.save_pretrained(tmp_path / "fly")
    with torch.no_grad():
        expected = packed(**inputs).logits
        for other in (fly, type(model).from_pretrained(tmp_path / "packed"), type(model).from_pretrained(tmp_path / "fly")):
            other.tie_weights()
            assert torch.equal(other(**inputs).logits, expected)


def test_a_dense_head_that_equals_the_embedding_stays_apart_from_it(tmp_path):
    model = tiny(tie_word_embeddings=False)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)
    mx.compress(model).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again.lm_head.weight, again.model.embed_tokens.weight) and again.lm_head.weight is not again.model.embed_tokens.weight


@pytest.mark.parametrize("make", [t5, bart])
def test_an_encoder_decoder_writes_text_of_its_own(make):
    model = make().eval()
    parts = own_text(model, [4, 5], tokens=64, length=32)
    assert len(parts) == 2 and all(part.shape == (1, 32) and part[0, 0] == model.generation_config.decoder_start_token_id for part in parts)


def test_embeddings_that_shared_one_memory_with_the_head_still_share_one(tmp_path):
    """In memory: a file has each of them, as its config ties nothing. One that was given other weights in between stays apart."""
    def places(model):
        return len({part.weight.data_ptr() for part in (model.model.shared, model.model.encoder.embed_tokens, model.model.decoder.embed_tokens)})

    model = mx.to_tiles(bart().eval())
    assert places(model) == 1
    model.save_pretrained(tmp_path / "packed")
    assert places(model) == 1
    again = type(model).from_pretrained(tmp_path / "packed")
    assert places(again) == 1 and same(model, again) and not again.config.tie_word_embeddings
    assert places(copy.deepcopy(again)) == 1 and places(pickle.loads(pickle.dumps(again))) == 1
    decoder = again.model.decoder
    decoder.embed_tokens.weight = nn.Parameter(decoder.embed_tokens.weight.detach() + 1)
    again.save_pretrained(tmp_path / "changed")
    changed = type(model).from_pretrained(tmp_path / "changed")
    assert places(changed) == 2 and same(again, changed)


def test_a_config_that_two_models_share_stays_the_other_ones(tmp_path):
    one = tiny()
    two = type(one)(one.config)
    assert two.config is one.config
    mx.to_tiles(two)
    assert not hasattr(one.config, "quantization_config") and one.config._attn_implementation == "sdpa"
    assert two.model.config is two.config and two.model.layers[0].self_attn.config is two.config
    one.save_pretrained(tmp_path)
    assert same(one, type(one).from_pretrained(tmp_path))
    assert mx_layers(mx.compress(type(one)(one.config)))


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="model: expected a model, got str"):
        mx.compress("smollm2")
    with pytest.raises(TypeError, match="model: a Linear by itself .* nn.Sequential"):
        mx.compress(nn.Linear(64, 64))


def test_names_to_skip_that_no_module_has_are_named():
    with pytest.warns(UserWarning, match="skip: the model has no module 'dwon_proj'"):
        mx.compress(tiny(), skip=["dwon_proj", "up_proj"])


@pytest.mark.parametrize("skip, left", [(["mlp"], ".mlp."), (["layers.0"], ".layers.0."), (["model.layers.0.mlp"], ".0.mlp."), (["layers.0.*"], None)])
def test_a_part_of_a_name_leaves_out_all_that_is_inside(skip, left):
    with warnings.catch_warnings():
        warnings.simplefilter("error" if left else "ignore")
        model = mx.compress(tiny(), skip=skip)
    skipped = {layer.name for layer in model.mx_report.layers if layer.note == "skipped on request"}
    assert skipped == {layer.name for layer in model.mx_report.layers if left and left in layer.name}


@pytest.mark.parametrize("skip", ["layers.0.mlp.down_proj", "layers.0.*", "layers.0", "mlp"])
@pytest.mark.parametrize("format", ["mxfp6_e2m3", "mxint8"])
def test_what_was_skipped_is_known_to_the_base_model_and_from_it(skip, format, tmp_path):
    whole = mx.compress(tiny(), format, skip=[skip if skip == "mlp" else f"model.{skip}"])
    whole.save_pretrained(tmp_path / "whole")
    base = mx.compress(tiny().model, format, skip=[skip])
    base.save_pretrained(tmp_path / "base")
    one, two = type(base).from_pretrained(tmp_path / "whole"), type(whole).from_pretrained(tmp_path / "base")
    with torch.no_grad():
        expected = base(IDS).last_hidden_state
        assert torch.equal(one(IDS).last_hidden_state, expected) and torch.equal(two.model(IDS).last_hidden_state, expected)
    assert len(mx_layers(one)) == len(mx_layers(whole)) < 14


def test_a_new_classifiers_head_is_not_the_compressed_one(tmp_path):
    mx.compress(tiny(), lm_head="mxint8").save_pretrained(tmp_path / "language")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "language", num_labels=5)
    assert type(model.score) is nn.Linear and len(mx_layers(model)) == 14
    mx.dequantize(model)
    mx.compress(model, lm_head="mxint8").save_pretrained(tmp_path / "classifier")
    assert "score" in mx_layers(AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier"))


def test_layers_with_one_weight_stay_dense(tmp_path):
    class Twins(LlamaForCausalLM):
        _tied_weights_keys = {"model.layers.1.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight"}

    model = Twins(tiny(tie_word_embeddings=True).config)
    assert model.model.layers[0].mlp.up_proj.weight is model.model.layers[1].mlp.up_proj.weight
    model.save_pretrained(tmp_path / "dense")
    packed, fly = mx.compress(model), Twins.from_pretrained(tmp_path / "dense", quantization_config=mx.MXConfig())
    packed.save_pretrained(tmp_path / "packed")
    assert report_of(packed)["model.layers.1.mlp.up_proj"].note == "its weight is another layer's, too" and len(mx_layers(packed)) == 12
    assert same(packed, fly) and same(packed, Twins.from_pretrained(tmp_path / "packed"))
