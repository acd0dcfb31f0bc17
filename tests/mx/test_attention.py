"""Row-invariant attention: a query's bits depend on what it sees and on nothing else, and they are the right ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_specdec import mx
from hf_specdec.mx import attention
from hf_specdec.mx.attention import EAGER_NAME, FEW, FEW_NAME, rows_attention
from hf_specdec.mx.interface import set_attention_from
from hf_specdec.mx.kernels import attention as kernel
from hf_specdec.mx.kernels import cpu
from hf_specdec.tree import Tree

from ..architectures import FAMILIES as DECODERS
from ..encoder_decoders import FAMILIES as ENCODER_DECODERS
from ..helpers import build, enabled, torch_threads
from ..seeing import FAMILIES
from .models import HEADS as ONE_TO_ONE
from .models import tiny

needs_kernels = pytest.mark.skipif(cpu.library() is None, reason="no kernels here")
HEADS, GROUPS, SLOTS = 6, 2, 47
DTYPES = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 4e-7}  # of the largest; torch's own is as far off


@pytest.fixture(params=["compiled", "torch"])
def either(request, monkeypatch):
    """Both implementations in turn."""
    if request.param == "compiled":
        if cpu.library() is None:
            pytest.skip("no kernels here")
    else:
        monkeypatch.setattr(kernel, "takes", lambda *tensors: False)
    return request.param


def tensors(dtype=torch.bfloat16, batch=1, width=9, size=64, value_size=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, HEADS, width, size), (batch, GROUPS, SLOTS, size), (batch, GROUPS, SLOTS, value_size or size)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def chain_mask(width: int, slots: int = SLOTS, dtype=torch.bfloat16) -> torch.Tensor:
    """The last `width` slots are the queries' own: additive, with the dtype's minimum."""
    seen = torch.arange(slots) <= torch.arange(slots - width, slots)[:, None]
    return torch.zeros(width, slots, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def exact(query, key, value, mask):
    """float64, from sdpa."""
    key, value = (part.double().repeat_interleave(HEADS // GROUPS, 1) for part in (key, value))
    return scaled_dot_product_attention(query.double(), key, value, mask if mask is None else mask.double()).transpose(1, 2)


@pytest.mark.parametrize("size", [64, 128, 80, 24, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_attention(either, dtype, size):
    query, key, value = tensors(dtype, batch=2, size=size, value_size=size + 12)
    mask = chain_mask(9)
    got, want = rows_attention(query, key, value, mask), exact(query, key, value, mask)
    assert got.dtype == dtype and got.shape == want.shape
    assert float((got.double() - want).abs().max()) <= DTYPES[dtype] * float(want.abs().max()) * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_query_alone_gives_the_bits_it_gives_among_others(either, dtype):
    for width in (2, 3, 8, 9, 17, 33):
        query, key, value = tensors(dtype, width=width, seed=width)
        mask = chain_mask(width)
        whole = rows_attention(query, key, value, mask)
        for i in range(width):
            end = SLOTS - width + i + 1  # as it would be if the later tokens had never been there
            alone = rows_attention(query[:, :, i : i + 1], key[:, :, :end], value[:, :, :end])
            assert torch.equal(whole[:, i : i + 1], alone)


def test_causal_without_a_mask_is_the_mask(either):
    query, key, value = (part[:, :, :9] for part in tensors())
    assert torch.equal(rows_attention(query, key, value, causal=True), rows_attention(query, key, value, chain_mask(9, 9)))
    assert not torch.equal(rows_attention(query, key, value, causal=True), rows_attention(query, key, value))


def test_rows_of_a_batch_capacity_padding_and_strides_do_not_matter(either):
    query, key, value = tensors(batch=5, width=4)
    mask = chain_mask(4)
    whole = rows_attention(query, key, value, mask)
    for b in range(5):
        pad = 3 * b + 1  # garbage before and behind, which the mask hides
        shape = (1, GROUPS, SLOTS + 2 * pad, 64)
        keys, values = torch.full(shape, 1e4, dtype=key.dtype), torch.full(shape, torch.nan, dtype=key.dtype)
        keys[:, :, pad : pad + SLOTS], values[:, :, pad : pad + SLOTS] = key[b], value[b]
        hidden = torch.nn.functional.pad(mask, (pad, pad), value=-torch.inf)
        strided = query[b : b + 1].transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(rows_attention(strided, keys, values, hidden), whole[b : b + 1])
        assert torch.equal(rows_attention(strided, keys, values, hidden > -1), whole[b : b + 1])


def test_a_node_of_a_tree_gives_the_bits_of_its_own_path(either):
    tree, past = Tree((0, 0, 1, 1, 2, 0, 3, 5)), 20
    width = len(tree) + 1
    query, key, value = tensors(width=width)
    seen = torch.cat([torch.ones(width, past, dtype=torch.bool), tree.ancestors], 1)
    mask = torch.zeros(width, past + width).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    keys, values = key[:, :, : past + width], value[:, :, : past + width]
    whole = rows_attention(query, keys, values, mask)
    for node in range(width):
        path = torch.cat([torch.arange(past), past + torch.nonzero(tree.ancestors[node]).flatten()])
        alone = rows_attention(query[:, :, node : node + 1], keys[:, :, path], values[:, :, path])
        assert torch.equal(whole[:, node : node + 1], alone)


def test_softcap_sinks_scale_and_finite_biases(either):
    query, key, value = tensors(torch.float32)
    bias, sinks = torch.randn(1, HEADS, 9, SLOTS), torch.randn(HEADS)
    got = rows_attention(query, key, value, bias, 0.3, softcap=5.0, sinks=sinks)
    keys, values = (part.double().repeat_interleave(HEADS // GROUPS, 1) for part in (key, value))
    scores = 5 * torch.tanh(0.3 * query.double() @ keys.transpose(-1, -2) / 5) + bias
    scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(-1, -1, 9, -1)], -1)
    want = (scores.softmax(-1)[..., :-1] @ values).transpose(1, 2)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6)


def test_a_query_that_sees_nothing_gets_zeros(either):
    query, key, value = tensors(width=2)
    mask = torch.ones(1, 1, 2, SLOTS, dtype=torch.bool)
    mask[..., 0, :] = False
    out = rows_attention(query, key, value, mask)
    assert not out[:, 0].any() and out[:, 1].isfinite().all() and out[:, 1].any()


@needs_kernels
def test_many_heads_to_a_key_long_texts_and_windows(monkeypatch):
    """Several tiles, several blocks of slots, slots that no query of a tile sees before, between and behind those that some see."""
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(2, heads, n, 40, generator=generator) for heads, n in ((24, 70), (2, 333), (2, 333)))
    at = torch.arange(263, 333)[:, None]
    slots = torch.arange(333)
    seen = (slots <= at) & (slots > at - 37) & (slots % 7 != 3)
    mask = torch.zeros(70, 333).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    got = rows_attention(query, key, value, mask)
    keys, values = (part.double().repeat_interleave(12, 1) for part in (key, value))
    want = scaled_dot_product_attention(query.double(), keys, values, mask.double()).transpose(1, 2)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    for q in (0, 1, 33, 69):
        alone = rows_attention(query[:, :, q : q + 1], key[:, :, seen[q]], value[:, :, seen[q]])
        assert torch.equal(got[:, q : q + 1], alone)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_kernel_paths_do_not_matter(dtype):
    query, key, value = tensors(dtype, batch=3, width=17, size=72)
    mask, seen = chain_mask(17), []
    try:
        for path in cpu.kernel_info()["available"]:
            cpu.set_kernel_path(path)
            for count in (1, 2, 3):
                with torch_threads(count):
                    seen.append(rows_attention(query, key, value, mask))
    finally:
        cpu.set_kernel_path(None)
    assert len(seen) >= 3 and all(torch.equal(seen[0], other) for other in seen)


@needs_kernels
def test_a_score_that_is_no_number_takes_no_part_on_any_path():
    """Nor where scores are capped, whichever sign NaN has."""
    query, key, value = tensors(torch.float32, width=5)
    lame, keys = torch.tensor([torch.nan, -torch.nan]), key.clone()
    keys[:, :, 3:5, 0] = lame
    others = [slot for slot in range(SLOTS) if slot not in (3, 4)]
    try:
        for path in cpu.kernel_info()["available"]:
            cpu.set_kernel_path(path)
            for softcap in (None, 5.0):
                assert torch.equal(rows_attention(query, keys, value, softcap=softcap), rows_attention(query, key[:, :, others], value[:, :, others], softcap=softcap))
    finally:
        cpu.set_kernel_path(None)


def test_gradients_go_through_torch():
    query, key, value = (part.requires_grad_() for part in tensors(torch.float32, width=2))
    out = rows_attention(query, key, value, chain_mask(2))
    (ours,) = torch.autograd.grad(out.square().sum(), key, retain_graph=True)
    (theirs,) = torch.autograd.grad(exact(query, key, value, chain_mask(2)).square().sum(), key)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="no compiler")
def test_the_operator_is_well_formed():
    query, key, value = tensors(width=2)
    for operator in (torch.ops.hf_specdec.rows_attention, torch.ops.hf_specdec.rows_attention_by_torch):
        torch.library.opcheck(operator.default, (query, key, value, chain_mask(2), 0.25, False, 0.0, None))


def test_another_device_is_refused_by_name():
    query, key, value = tensors(width=1)
    with pytest.raises(ValueError, match="key is on meta"):
        rows_attention(query, key.to("meta"), value)


# --- attention for few queries ------------------------------------------------------------------------------------------------


def attention_of(model) -> str:
    return model.config._attn_implementation


@needs_kernels
def test_compressed_models_use_the_kernel_for_few_queries_and_get_sdpa_back():
    model = mx.compress(tiny())
    assert attention_of(model) == FEW_NAME
    assert attention_of(copy.deepcopy(model)) == FEW_NAME
    assert attention_of(mx.dequantize(model)) == "sdpa"
    eager = tiny()
    eager.set_attn_implementation("eager")
    assert attention_of(mx.compress(eager)) == "eager"


@needs_kernels
def test_a_model_with_code_of_its_own_for_sdpa_keeps_it():
    falcon = build("falcon", **ONE_TO_ONE, alibi=False)
    set_attention_from(falcon, "sdpa", FEW_NAME)
    assert attention_of(falcon) == "sdpa"
    eager = tiny()
    eager.set_attn_implementation("eager")
    set_attention_from(eager, "sdpa", FEW_NAME)
    assert attention_of(eager) == "eager"


@needs_kernels
@pytest.mark.parametrize("name", [line.name for line in FAMILIES if line.name in ("Qwen3-VL", "Qwen3.5", "Qwen2-VL")])
def test_of_a_model_that_reads_images_the_text_model_alone_may_run_it(name):
    line = next(line for line in FAMILIES if line.name == name)
    model = line.model()
    model.set_attn_implementation("sdpa")
    shown = line.prompts(2)
    options = dict(max_new_tokens=10, min_new_tokens=10, do_sample=False, pad_token_id=0)
    expected = model.generate(**shown, **options)
    mx.to_tiles(model)
    assert (attention_of(model), attention_of(model.get_decoder())) == ("sdpa", FEW_NAME)
    assert torch.equal(model.generate(**shown, **options), expected)
    assert torch.equal(enabled(model).generate(**shown, **options, speculative=True, num_assistant_tokens=3), expected)
    assert attention_of(mx.dequantize(model)) == attention_of(model.get_decoder()) == "sdpa"


@needs_kernels
def test_few_queries_go_to_the_kernel_and_many_to_torch(monkeypatch):
    widths = []
    monkeypatch.setattr(attention, "rows_attention", lambda query, *rest: widths.append(query.shape[2]) or rows_attention(query, *rest))
    model = tiny()
    dense = {}
    ids = torch.arange(FEW + 4)[None] % 20
    with torch.no_grad():
        for width in (1, FEW, FEW + 1, FEW + 4):
            dense[width] = model(ids[:, :width]).logits
        model.set_attn_implementation(FEW_NAME)
        for width, expected in dense.items():
            torch.testing.assert_close(model(ids[:, :width]).logits, expected, rtol=1e-4, atol=1e-5)
    assert set(widths) == {1, FEW}
    widths.clear()
    with torch.no_grad():
        tiny(dtype=torch.bfloat16, attn=FEW_NAME)(ids)
    assert set(widths) == ({FEW + 4} if cpu.kernel_info()["path"] in kernel.WIDEST else set())  # there it is faster for any number
    widths.clear()
    out = model(ids[:, :3], labels=ids[:, :3]).loss  # a gradient is wanted: torch
    out.backward()
    assert not widths and model.get_input_embeddings().weight.grad.isfinite().all()


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
def test_texts_with_and_without_it_are_the_same_in_float32(kind):
    model = tiny(kind)
    texts = []
    for name in ("sdpa", FEW_NAME):
        model.set_attn_implementation(name)
        inputs = {"input_ids": torch.tensor([[1, 5, 9, 2, 7], [0, 0, 0, 3, 4]]), "attention_mask": torch.tensor([[1] * 5, [0] * 3 + [1] * 2])}
        texts.append(model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0).tolist())
    assert texts[0] == texts[1]


@needs_kernels
@pytest.mark.parametrize(("kind", "own"), [
    ("gemma2", dict(ONE_TO_ONE, head_dim=16, sliding_window=8, query_pre_attn_scalar=16, attn_logit_softcapping=2.0)),
    ("gpt_oss", dict(ONE_TO_ONE, head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)),
])  # fmt: skip
def test_models_that_know_eager_alone_use_the_kernel_for_few_queries_and_get_it_back(kind, own, monkeypatch):
    """Capped scores and sinks, which sdpa would leave out."""
    stock = build(kind, 0, "eager", **own)
    for name, parameter in stock.named_parameters():
        if "sinks" in name:
            parameter.data.normal_()
    model, widths = copy.deepcopy(stock), []
    set_attention_from(model, "eager", EAGER_NAME)
    monkeypatch.setattr(attention, "rows_attention", lambda query, *rest: widths.append(query.shape[2]) or rows_attention(query, *rest))
    ids, mask = torch.arange(2 * (FEW + 6)).view(2, -1) % 20, torch.ones(2, FEW + 6, dtype=torch.long)
    mask[1, :5] = 0
    for width in (1, 9, FEW, FEW + 6):
        with torch.no_grad():
            found, wanted = (each(ids[:, -width:], attention_mask=mask[:, -width:]).logits for each in (model, stock))
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert set(widths) == {1, 9, FEW}
    widths.clear()
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-3, atol=1e-4)  # gradients are wanted
    assert not widths
    tiles = mx.to_tiles(copy.deepcopy(stock))
    known = stock._supports_sdpa  # of Gemma 2, in older versions of transformers
    assert attention_of(tiles) == ("eager" if known else EAGER_NAME) and attention_of(mx.dequantize(tiles)) == "eager"


@needs_kernels
def test_weights_that_the_config_of_an_eager_model_asks_for_are_given():
    model = build("gemma2", 0, "eager", **ONE_TO_ONE, head_dim=16, sliding_window=8, query_pre_attn_scalar=16)
    model.config.output_attentions = True
    ids = torch.arange(12)[None]
    with torch.no_grad():
        wanted, found = model(ids).attentions, mx.to_tiles(copy.deepcopy(model))(ids).attentions
    assert len(wanted) == len(found) == 2
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("name", ["LongT5", "Inkling 2 (text)"])
def test_what_an_eager_model_adds_to_its_scores_is_added_in_tiles(name):
    """Learned biases of positions and, of Inkling, sinks under another name: neither is handed to the kernel."""
    line = next((line for line in (*ENCODER_DECODERS, *DECODERS) if line.name == name), None)
    if line is None:
        pytest.skip("not in these transformers")
    model, ids = line.model("eager"), torch.arange(3, 15)[None]
    inputs = {"input_ids": ids, "use_cache": False} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        wanted = model(**inputs).logits
        found = mx.to_tiles(model)(**inputs).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
