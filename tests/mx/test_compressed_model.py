"""A compressed model is a model like any other: copied, saved, compiled, adapted, and speculated with."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import hf_specdec
from hf_specdec import mx

from ..helpers import OLD_TORCH, enabled, generated, plain, prompts, repetitive, speculate
from .models import IDS, logits, mx_layers, same, tiny


# --- a model like any other ---------------------------------------------------------------------------------------------------


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), torch_saved], ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("used", [False, True])
def test_copies_are_the_same_and_independent(copied, used):
    model = mx.compress(tiny("qwen2"))
    if used:
        logits(model)
    other = copied(model)
    assert same(model, other) and other.mx_report == model.mx_report
    mx.dequantize(other)
    assert mx_layers(model) and same(model, mx.compress(tiny("qwen2")))


def test_state_dicts_and_other_dtypes():
    model, other = mx.compress(tiny("qwen2", seed=1)), mx.compress(tiny("qwen2", seed=2))
    logits(other)
    assert not same(model, other)
    other.load_state_dict(model.state_dict())
    assert same(model, other)
    model.to(torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.weight.dtype == torch.uint8 and torch.equal(layer.packed().codes, other.model.layers[0].mlp.up_proj.packed().codes)
    assert logits(model).dtype == torch.bfloat16


@pytest.mark.skipif(OLD_TORCH, reason="this torch does not compile the model: docs/performance.md")
def test_torch_compile_makes_one_graph():
    model = mx.compress(tiny())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(input_ids=IDS, use_cache=False).logits, logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["mxfp6_e2m3", "mxint8"])
def test_adapters_on_top_are_trained_and_saved_and_merge_after_dequantize(format, tmp_path):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    base = mx.compress(tiny(), format)
    model = peft.get_peft_model(copy.deepcopy(base), settings).eval()
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert len(trained) == 8 and all("lora_" in name for name in trained)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    before = logits(model)
    assert torch.equal(logits(again), before)
    with pytest.raises(RuntimeError):
        model.merge_adapter()  # there are no numbers in packed bytes to add to
    assert torch.equal(logits(again), before)
    merged = mx.dequantize(again).merge_and_unload()
    assert not mx_layers(merged) and torch.allclose(logits(merged), before, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="has adapters on it"):
        mx.compress(peft.get_peft_model(tiny(), settings))


@pytest.mark.parametrize("after", [logits, lambda model: mx.dequantize(model), lambda model: model.state_dict()], ids=["a pass", "dequantize", "saving"])
def test_bytes_that_a_merge_has_put_in_their_place_are_refused(after):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["v_proj", "o_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(mx.compress(tiny(num_key_value_heads=4), "mxint8"), settings).eval()
    before = logits(model)
    assert torch.equal(logits(model), before)
    merged = model.merge_and_unload(safe_merge=True)
    with pytest.raises(RuntimeError, match=r"^packed MX weights were replaced from outside.* call mx.dequantize\(model\) first"):
        after(merged)


def test_layers_whose_bytes_are_offloaded_are_refused():
    accelerate = pytest.importorskip("accelerate")
    model = mx.compress(tiny(), "mxint8")
    logits(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="^packed MX weights were replaced from outside.*or by offloading"):
        logits(model)


def test_a_plain_module_is_compressed_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    x, dense = torch.randn(5, 64), copy.deepcopy(model)
    mx.compress(model, "mxint8")
    assert torch.allclose(model(x), dense(x), atol=0.05) and not torch.equal(model(x), dense(x))
    assert type(mx.dequantize(model)[0]) is nn.Linear


# --- speculation on top -------------------------------------------------------------------------------------------------------

ROWS = prompts(5, seed=2) + repetitive(14) + prompts(3, seed=1)


@pytest.mark.share(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["mxfp6_e2m3", "mxfp4_e2m1"])
def test_a_compressed_model_speculates_the_text_of_its_own_plain_generate(format, dtype):
    original = tiny(dtype=dtype)
    model = mx.compress(copy.deepcopy(original), format, lm_head=format)
    if dtype == torch.bfloat16:  # where attention that rounds by the width of the pass would part the texts
        model.set_attn_implementation("hf_specdec_rows")
    expected = plain(model, ROWS)
    accepted = 0
    for k in (1, 5):
        for draft in (None, original):
            for row, text in zip(ROWS, expected):
                out = speculate(model, [row], draft, k=k)
                assert generated(out, [row]) == [text], (k, draft is not None)
                accepted += out.speculation.accepted
    hf_specdec.disable(model)
    assert accepted > 0
    if dtype == torch.float32:
        assert generated(speculate(model, ROWS, original), ROWS) == expected


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_compressed_copy_drafts_for_the_original(do_sample):
    model = tiny()
    draft = mx.compress(copy.deepcopy(model), "mxfp8_e4m3")
    out = speculate(model, ROWS, draft, do_sample=do_sample, seed=1)
    assert out.speculation.lossless and out.speculation.acceptance_rate > 0.3
    hf_specdec.disable(model)
    if not do_sample:
        assert generated(out, ROWS) == plain(model, ROWS)
    assert enabled(model) is model and mx_layers(draft)
