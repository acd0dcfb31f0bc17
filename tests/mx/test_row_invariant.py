"""`row_invariant`: in bfloat16, speculative greedy output is plain greedy output, and logits are the same bits at every width."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from hf_specdec import disable, enable, mx
from hf_specdec.compat import CACHE
from hf_specdec.drafts import ModelDraft, ModelTreeDraft, PromptLookupDraft, UniformDraft
from hf_specdec.mx.activation import RowActivation, needs_table
from hf_specdec.mx.kernels import cpu

from ..helpers import FULL, OLD_TORCH, VOCAB, build, perturbed
from .models import MOE, SIZE, mx_layers, tiny

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no kernels here")
GEMMA = dict(SIZE, head_dim=16, sliding_window=8, query_pre_attn_scalar=16)
KINDS = {
    "llama": SIZE,
    "qwen2": SIZE,
    "qwen3": dict(SIZE, head_dim=16),
    "mistral": dict(SIZE, sliding_window=8),
    "gemma2": GEMMA,
    "gemma3_text": dict(GEMMA, layer_types=["sliding_attention", "full_attention"]),
    "qwen3_moe": MOE,
    "gpt_oss": dict(SIZE, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
}
DRAFTS = {
    "lookup": lambda target: PromptLookupDraft(),
    "uniform": lambda target: UniformDraft(),
    "perturbed": lambda target: ModelDraft(perturbed(target, 0.1)),
    "itself": lambda target: ModelDraft(target),
    "tree": lambda target: ModelTreeDraft(perturbed(target, 0.1), (3, 2)),
}


def bfloat16(kind: str, seed: int = 0):
    model = build(kind, seed, "eager" if kind in ("gemma2", "gpt_oss") else "sdpa", **KINDS[kind])
    for parameter in model.parameters():  # and no buffer: the rotary frequencies are float32 in every loaded model
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def texts(seed: int) -> list[list[int]]:
    """Of several lengths, one with a pattern that recurs."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (3, 11, 70)]
    return [*rows, rows[1][:5] * 3]


def answer(model, rows: list[list[int]], **kwargs) -> list[list[int]]:
    """New tokens of a batch that is padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0, **kwargs)
    return out[:, width:].tolist()


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for seed in range(12 if FULL else 1) for kind in KINDS])
def test_speculative_greedy_is_plain_greedy_in_bfloat16(kind, seed):
    stock = bfloat16(kind, seed)
    drafts = {name: make(stock) for name, make in DRAFTS.items()}
    target, rows = mx.row_invariant(copy.deepcopy(stock)), texts(seed)
    drafts["itself"] = ModelDraft(target)
    plain = [answer(target, [row])[0] for row in rows]
    assert answer(target, rows) == plain  # a batch is its rows, too
    enable(target)
    for name, draft in drafts.items():
        for k in ((1, 2, 5, 11) if FULL else (5,)):
            kwargs = dict(speculative=True, assistant_model=draft) | ({} if name == "tree" else {"num_assistant_tokens": k})
            assert answer(target, rows, **kwargs) == plain, (name, k, "batch")
            alone = range(len(rows)) if FULL else [2]
            assert [answer(target, [rows[i]], **kwargs)[0] for i in alone] == [plain[i] for i in alone], (name, k)
    disable(target)


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("path", cpu.kernel_info()["available"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_bits_at_every_width(kind, path):
    model, (row,) = mx.row_invariant(bfloat16(kind)), [texts(0)[2]]
    ids = torch.tensor([row + row[:20]])
    cpu.set_kernel_path(path)
    try:
        with torch.no_grad():
            whole = model(input_ids=ids, use_cache=False).logits
            for width in (1, 2, 7, 33):
                cache, got = None, []
                for part in ids.split(width, 1):
                    step = model(input_ids=part, **{CACHE: cache}, use_cache=True)
                    cache, got = step[CACHE], [*got, step.logits]
                assert torch.equal(torch.cat(got, 1), whole), width
    finally:
        cpu.set_kernel_path(None)


@pytest.mark.skipif(OLD_TORCH, reason="this torch's attention is row-invariant for so short a text")
def test_the_control_torchs_attention_is_not_row_invariant():
    model = mx.row_invariant(bfloat16("llama"))
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([texts(0)[2]])
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        cache, steps = None, []
        for token in ids.split(1, 1):
            out = model(input_ids=token, **{CACHE: cache}, use_cache=True)
            cache, steps = out[CACHE], [*steps, out.logits]
    assert not torch.equal(whole, torch.cat(steps, 1))


# --- what torch computes alike, and what it does not ------------------------------------------------------------------------------


def alone(function, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([function(row) for row in x.split(1)])


@pytest.mark.parametrize("size", [64, 96, 576, 2048])
@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm, "llama"])
def test_norms_are_row_invariant_as_they_are(norm, size):
    if norm == "llama":
        from transformers.models.llama.modeling_llama import LlamaRMSNorm as norm
    layer, x = norm(size).bfloat16().requires_grad_(False), torch.randn(33, 5, size, dtype=torch.bfloat16)
    want = alone(layer, x.flatten(0, 1)).view(x.shape)
    for width in (*range(2, 34), 33):
        assert torch.equal(torch.cat([layer(part) for part in x.split(width)]), want)


@pytest.mark.parametrize("size", [16, 64, 80, 128])
def test_rotary_tables_are_row_invariant_as_they_are(size):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=size, hidden_size=size * 4, num_attention_heads=4))
    x, positions = torch.empty(1, 1, dtype=torch.bfloat16), torch.arange(600)[None]
    want = torch.cat([torch.cat(rotary(x, part), -1) for part in positions.split(1, 1)], 1)
    for width in range(2, 34):
        assert torch.equal(torch.cat([torch.cat(rotary(x, part), -1) for part in positions.split(width, 1)], 1), want)


EVERY = torch.arange(65536).to(torch.int16).view(torch.bfloat16)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", ["silu", "relu", "relu2", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "mish", "tanh", "sigmoid"])
def test_activations_are_row_invariant_or_become_tables(name):
    from transformers.activations import ACT2FN

    function = ACT2FN[name]
    used = RowActivation(function) if needs_table(function) else function
    for width in (7, 63, 96, 1000):
        pieces = torch.cat([used(part) for part in EVERY.split(width)])
        assert torch.equal(pieces.nan_to_num(7), used(EVERY).nan_to_num(7))
    assert torch.equal(used(EVERY).nan_to_num(7), function(EVERY).nan_to_num(7))


@pytest.mark.parametrize("module", [torch.nn.Softmax(-1), torch.nn.LogSoftmax(-1), torch.nn.GLU(), torch.nn.PReLU(4), torch.nn.MultiheadAttention(8, 2)],
                         ids=lambda module: type(module).__name__)
def test_functions_of_more_than_a_number_are_no_tables(module):
    assert not needs_table(module)


# --- the way in, and what it refuses ----------------------------------------------------------------------------------------------


def test_weights_stay_as_they_are_and_it_can_be_undone():
    stock = bfloat16("gemma3_text")
    model = mx.row_invariant(copy.deepcopy(stock))
    assert model.config._attn_implementation == "hf_specdec_rows"
    assert all(layer.format.name == "bf16" and layer.alike for layer in mx_layers(model).values()) and mx_layers(model)
    assert mx.row_invariant(model) is model
    mx.dequantize(model).set_attn_implementation("sdpa")
    model.config.tie_word_embeddings = stock.config.tie_word_embeddings
    assert {name: type(module) for name, module in model.named_modules()} == {name: type(module) for name, module in stock.named_modules()}
    one, two = model.state_dict(), stock.state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_an_mx_model_keeps_its_layers_and_gets_a_head_in_tiles(tmp_path):
    from transformers import AutoModelForCausalLM

    model = mx.row_invariant(mx.compress(tiny("llama", dtype=torch.bfloat16), "mxfp8_e4m3"))
    formats = {name: layer.format.name for name, layer in mx_layers(model).items()}
    assert formats.pop("lm_head") == "bf16" and set(formats.values()) == {"mxfp8_e4m3"}
    plain = [answer(model, [row])[0] for row in texts(3)]
    assert answer(enable(model), texts(3), speculative=True, num_assistant_tokens=5) == plain
    disable(model).save_pretrained(tmp_path)
    again = mx.row_invariant(mx.load(AutoModelForCausalLM, tmp_path))
    assert [answer(again, [row])[0] for row in texts(3)] == plain


def test_an_mx_model_keeps_the_formats_of_its_layers_in_what_is_saved(tmp_path):
    from transformers import AutoModelForCausalLM

    model = mx.row_invariant(mx.compress(tiny("llama", dtype=torch.bfloat16), "mxfp6_e2m3", layer_formats={"down_proj": "mxint8"}))
    formats = {name: layer.format.name for name, layer in mx_layers(model).items()}
    assert set(formats.values()) == {"mxfp6_e2m3", "mxint8", "bf16"}
    model.save_pretrained(tmp_path)
    again = mx.load(AutoModelForCausalLM, tmp_path)
    assert {name: layer.format.name for name, layer in mx_layers(again).items()} == formats


def test_once_more_changes_nothing():
    """A router that is a Linear of its own kind is no dense layer any more."""
    model = mx.row_invariant(build("phimoe", 0, **dict(SIZE, sliding_window=8, num_local_experts=4, num_experts_per_tok=2)).to(torch.bfloat16))
    classes = [type(module) for module in model.modules()]
    assert mx.row_invariant(model) is model and classes == [type(module) for module in model.modules()]


def test_copies_stay_row_invariant():
    model = copy.deepcopy(mx.row_invariant(bfloat16("gemma2")))
    assert all(layer.alike for layer in mx_layers(model).values()) and model.config._attn_implementation == "hf_specdec_rows"


@pytest.mark.parametrize(("make", "message"), [
    (lambda: tiny("llama"), "torch.float32 on cpu"),
    (lambda: tiny("llama", dtype=torch.bfloat16).to("meta"), "bfloat16 on meta"),
    (lambda: tiny("gpt2", dtype=torch.bfloat16), "Conv1D is no nn.Linear"),
    (lambda: tiny("qwen3_moe", dtype=torch.bfloat16, moe_intermediate_size=40), "not row-invariant, such as .*down_proj: 40 inputs"),
    (lambda: tiny("llama", dtype=torch.bfloat16, hidden_size=72), "72 inputs are no multiple of 32"),
    (lambda: mx.compress(tiny("llama", dtype=torch.bfloat16), skip=("down_proj",)), "without skip="),
    (lambda: torch.nn.Linear(32, 32), "a transformers model is wanted"),
])  # fmt: skip
def test_what_cannot_be_made_row_invariant_is_refused_before_anything_is_changed(make, message):
    model = make()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=message):
        mx.row_invariant(model)
    assert before == {name: type(module) for name, module in model.named_modules()}
    assert getattr(getattr(model, "config", None), "_attn_implementation", "") != "hf_specdec_rows"


def test_attention_that_does_not_go_through_the_interface_is_refused_by_name():
    model = build("bloom", attn="eager", vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4).to(torch.bfloat16)
    with pytest.raises(ValueError, match="attention of BloomForCausalLM"):
        mx.row_invariant(model)


def test_without_kernels_it_says_so(monkeypatch):
    model = tiny("llama", dtype=torch.bfloat16)
    monkeypatch.setattr(cpu, "library", lambda: None)
    with pytest.raises(RuntimeError, match="needs the compiled kernels"):
        mx.row_invariant(model)
