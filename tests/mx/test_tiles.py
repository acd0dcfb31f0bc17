"""`mx.to_tiles`: the model's own numbers in the kernels' layout."""

import copy

import pytest
import torch

import hf_specdec
from hf_specdec import mx
from hf_specdec.bench.arms import twin
from hf_specdec.drafts import PromptLookupDraft
from hf_specdec.mx.formats import DENSE
from hf_specdec.mx.kernels import cpu

from ..helpers import assert_unchanged, snapshot
from .models import logits, mx_layers, same, tiny

KINDS = ["llama", "gpt_neox", "qwen2"]
DTYPES = {fmt.dtype: name for name, fmt in DENSE.items()}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("kind", KINDS)
@each_dtype
def test_every_linear_layer_and_the_head_keep_their_numbers(kind, dtype):
    model = tiny(kind, dtype=dtype)
    original = copy.deepcopy(model)
    assert mx.to_tiles(model) is model and model.dtype == dtype
    layers = mx_layers(model)
    assert {layer.format.name for layer in layers.values()} == {DTYPES[dtype]}
    assert model.get_output_embeddings() in layers.values()
    for name, layer in layers.items():
        assert torch.equal(layer.dequantize(dtype), original.get_submodule(name).weight)
    near = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits(model), logits(original), rtol=near, atol=near)
    assert same(mx.dequantize(model), original)


def test_a_tied_head_is_untied_and_the_embedding_left_alone():
    model = tiny(tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.detach().clone()
    mx.to_tiles(model)
    assert torch.equal(model.get_input_embeddings().weight, embedding) and not model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.dequantize(), embedding)


@each_dtype
def test_whoever_else_holds_the_weights_keeps_their_order(dtype):
    model = tiny(dtype=dtype)
    other = twin(model)
    before, state = snapshot(model), model.state_dict()
    mx.to_tiles(model)
    assert_unchanged(other, before)
    assert all(torch.equal(state[name], tensor) for name, tensor in other.state_dict().items())
    two = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)).to(dtype)
    two[1].weight = two[0].weight
    x = torch.randn(3, 64, dtype=dtype)
    with torch.no_grad():
        expected = two(x)
        assert torch.allclose(mx.compress(two, DTYPES[dtype])(x), expected, atol=0.02)


@pytest.mark.share(2)
@pytest.mark.parametrize("k", [1, 4, "auto"])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_text_in_float32_is_plain_generates(k, batch):
    model = hf_specdec.enable(tiny())
    ids = torch.randint(5, model.config.vocab_size, (batch, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
    wanted = model.generate(ids, **options)
    mx.to_tiles(model)
    assert torch.equal(model.generate(ids, **options), wanted)
    for draft in (PromptLookupDraft(), mx.compress(tiny(), "mxfp4_e2m1")):
        assert torch.equal(model.generate(ids, assistant_model=draft, speculative={"num_assistant_tokens": k}, **options), wanted)


@pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("path", cpu.kernel_info()["available"])
def test_a_layer_gives_a_token_the_same_bits_at_every_width(path):
    layers = mx_layers(mx.to_tiles(tiny()))
    cpu.set_kernel_path(path)
    try:
        with torch.no_grad():
            for layer in layers.values():
                x = torch.randn(40, layer.in_features, generator=torch.Generator().manual_seed(1))
                alone = torch.cat([layer(row) for row in x.split(1)])
                assert all(torch.equal(layer(x[:rows]), alone[:rows]) for rows in (2, 3, 8, 9, 33, 40))
    finally:
        cpu.set_kernel_path(None)


def test_models_that_have_no_tiles_are_refused_as_they_are():
    model = tiny(dtype=torch.float16)
    before = snapshot(model)
    with pytest.raises(TypeError, match="model: expected a model, got str"):
        mx.to_tiles("smollm2")
    with pytest.raises(ValueError, match="float16.*bfloat16 or float32"):
        mx.to_tiles(model)
    with pytest.raises(ValueError, match="on meta.*CPU"):
        mx.to_tiles(tiny().to("meta"))
    assert_unchanged(model, before)
    with pytest.raises(ValueError, match="already"):
        mx.to_tiles(mx.compress(tiny()))


@pytest.mark.parametrize("again", [mx.to_tiles, mx.compress])
def test_a_model_in_tiles_is_named_as_such_and_left_alone(again):
    model = mx.to_tiles(tiny())
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"model is in tiles already \((fp32|bf16)\); mx.dequantize"):
        again(model)
    assert_unchanged(model, before)


@pytest.mark.parametrize(("more", "options"), [(["mxint8"], {}), ([], {"lm_head": "mxint8"}), ([], {"skip": ["lm_head"]})])
def test_what_to_tiles_does_not_take_is_compress_s(more, options):
    with pytest.raises(TypeError, match="to_tiles.. has no place for .*: tiles keep the weights as they are; mx.compress"):
        mx.to_tiles(tiny(), *more, **options)
