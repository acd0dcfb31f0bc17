"""A drafter: made of the target's parts, stored without what it shares, exact as a draft."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

import hf_specdec
from hf_specdec.mx.attention import FEW_NAME
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.linear import MXLinear
from hf_specdec.mx.packed import quantize
from hf_specdec.training import build_drafter, load_drafter, storage
from hf_specdec.training.drafter import save
from hf_specdec.training.shared import PrunedHead, own_parameters
from hf_specdec.training.storage import pack, stored

from ..helpers import build, tiny_llama

HEAD = torch.arange(0, 61, 2)


@pytest.fixture
def draft(target):
    return build_drafter(target, [1], HEAD)


def logits_of(model):
    return model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits


def test_embedding_is_the_targets_and_the_layers_are_copies(target, draft):
    assert draft.get_input_embeddings() is target.get_input_embeddings()
    layer, copy = target.model.layers[1], draft.model.layers[0]
    assert torch.equal(layer.mlp.up_proj.weight, copy.mlp.up_proj.weight)
    assert layer.mlp.up_proj.weight.data_ptr() != copy.mlp.up_proj.weight.data_ptr()
    assert len(own_parameters(draft)) == len(list(copy.parameters())) + 1  # and the final norm
    assert draft.config.vocab_size == target.config.vocab_size and draft.config.num_hidden_layers == 1


def test_all_layers_and_the_whole_head_are_the_target_itself(target):
    torch.testing.assert_close(logits_of(build_drafter(target, [0, 1])), logits_of(target))


def test_a_pruned_head_gives_its_tokens_and_nothing_else(target, draft):
    logits, whole = logits_of(draft), logits_of(build_drafter(target, [1]))
    torch.testing.assert_close(logits[..., HEAD], whole[..., HEAD])
    left = torch.ones(61, dtype=torch.bool).index_fill(0, HEAD, False)
    assert bool((logits[..., left] == -torch.inf).all())


@pytest.mark.parametrize("format", ["bf16", "mxint8"])
def test_what_is_stored_comes_back(target, draft, tmp_path, format):
    save(draft, tmp_path, "tiny", format)
    again = load_drafter(tmp_path, target)
    assert again.get_input_embeddings() is target.get_input_embeddings()
    head = again.get_output_embeddings()
    assert isinstance(head, PrunedHead) and torch.equal(head.ids, HEAD)
    if format == "mxint8":  # the width is 32, the middle 48 and no multiple of the block
        assert isinstance(again.model.layers[0].mlp.up_proj, MXLinear) and not isinstance(again.model.layers[0].mlp.down_proj, MXLinear)
    torch.testing.assert_close(logits_of(again)[..., HEAD], logits_of(draft)[..., HEAD], atol=0.5, rtol=0.1)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size < 2 * sum(p.numel() for p in own_parameters(draft)) + 4000  # no embedding, no head


def test_stored_in_16_bit_the_weights_are_bit_for_bit_those_in_bfloat16(target, draft, tmp_path):
    save(draft, tmp_path, "tiny")
    again = load_drafter(tmp_path, target)
    for mine, read in zip(own_parameters(draft), own_parameters(again)):
        assert torch.equal(mine.bfloat16().float(), read)


@pytest.mark.skipif(cpu.library() is None, reason="the kernels are not available")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_a_draft_that_was_loaded_runs_on_the_kernels_its_head_in_the_format_of_its_weights(target, draft, dtype, tmp_path):
    save(draft, tmp_path, "tiny", "mxint8")
    target = copy.deepcopy(target).to(dtype)  # other tests have the same one
    again = load_drafter(tmp_path, target)
    head, rows = again.get_output_embeddings().linear, target.get_output_embeddings().weight[HEAD]
    assert isinstance(head, MXLinear) and torch.equal(head.dequantize(), quantize(rows.detach(), "mxint8").dequantize())
    assert again.config._attn_implementation == FEW_NAME
    save(again, tmp_path / "once more", "tiny", "mxint8")
    first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "once more"))
    assert first.keys() == second.keys() and torch.equal(first["head_ids"], second["head_ids"])


@pytest.mark.skipif(cpu.library() is None, reason="the kernels are not available")
def test_stored_in_16_bit_the_head_keeps_its_digits(target, draft, tmp_path):
    save(draft, tmp_path, "tiny")
    low = copy.deepcopy(target).bfloat16()
    head = load_drafter(tmp_path, low).get_output_embeddings().linear
    assert isinstance(head, MXLinear) and torch.equal(head.dequantize(torch.bfloat16), low.get_output_embeddings().weight[HEAD])
    assert not isinstance(load_drafter(tmp_path, target).get_output_embeddings().linear, MXLinear)  # float32: it would lose some


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("head", [None, HEAD], ids=["whole head", "pruned head"])
def test_the_target_writes_what_it_writes_alone(target, head, do_sample):
    model = hf_specdec.enable(tiny_llama(3))
    draft = build_drafter(model, [1], head)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    settings = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=do_sample, pad_token_id=0)
    out = model.generate(**settings, assistant_model=draft, speculative={"num_assistant_tokens": 4, "seed": 1}, return_dict_in_generate=True)
    assert out.speculation.proposed > 20 and out.speculation.lossless
    if not do_sample:
        assert torch.equal(out.sequences, model.generate(**settings))


def test_another_target_is_refused(target, draft, tmp_path):
    save(draft, tmp_path, "tiny")
    with pytest.raises(ValueError, match="drafter for tiny"):
        load_drafter(tmp_path, tiny_llama(4))
    with pytest.raises(ValueError, match="drafter for tiny"):
        load_drafter(tmp_path, build("gpt2", vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=64))


def test_packed_layers_are_made_where_the_dense_ones_were():
    model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    tensors = stored(model, set(), "mxint8")
    pack(model.to("meta"), tensors, "mxint8")
    assert isinstance(model[0], MXLinear) and [p.device.type for p in model.parameters()] == ["meta"] * 3


def test_who_names_a_model_where_a_drafter_is_expected_is_told_how_it_is_loaded(target, tmp_path):
    target.config.save_pretrained(tmp_path)  # what train --config and --distill write has one, too
    with pytest.raises(ValueError, match="holds no drafter .* A model of its own is read by AutoModelForCausalLM.from_pretrained"):
        load_drafter(tmp_path, target)
    with pytest.raises(ValueError, match="smolm2_drafter holds no drafter .*did you mean 'smollm2_drafter'"):
        load_drafter("smolm2_drafter", target)


def test_what_is_overwritten_is_complete_or_absent(target, draft, tmp_path, monkeypatch):
    save(draft, tmp_path, "tiny", "mxint8")

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "save_whole", stopped)
    with pytest.raises(KeyboardInterrupt):
        save(draft, tmp_path, "tiny", "mxfp8_e4m3")
    with pytest.raises(ValueError, match="holds no drafter"):
        load_drafter(tmp_path, target)


@pytest.mark.parametrize("harm", ["absent", "cut", "half", "list", "lacking", "newer", "ids", "missing"])
def test_a_bad_folder_is_refused(target, draft, tmp_path, harm):
    if harm != "absent":
        save(draft, tmp_path, "tiny")
    weights, about = tmp_path / "model.safetensors", tmp_path / "drafter.json"
    if harm == "cut":
        weights.write_bytes(weights.read_bytes()[:-50])
    elif harm == "half":
        about.write_text(about.read_text()[:-20])
    elif harm == "list":
        about.write_text("[]")
    elif harm == "lacking":
        about.write_text(json.dumps({name: value for name, value in json.loads(about.read_text()).items() if name != "probe"}))
    elif harm == "newer":
        about.write_text(json.dumps(json.loads(about.read_text()) | {"format": "hf_specdec drafter 9"}))
    elif harm == "ids":
        draft.get_output_embeddings().ids[-1] = 61
        save(draft, tmp_path, "tiny")
    elif harm == "missing":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_drafter(tmp_path, target)


@pytest.mark.parametrize("layers", [[], [2], [-3], ["0"]])
def test_layers_that_the_target_does_not_have_are_refused(target, layers):
    with pytest.raises(ValueError, match="layers"):
        build_drafter(target, layers)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gpt_neox"])
def test_other_families_have_parts_too(family):
    sizes = dict(gpt2=dict(n_embd=32, n_layer=3, n_head=2, n_positions=64)).get(
        family, dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2))
    model = build(family, vocab_size=61, **sizes)
    torch.testing.assert_close(logits_of(build_drafter(model, [0, 1, 2])), logits_of(model))


@pytest.mark.parametrize("ids", [None, HEAD], ids=["whole head", "pruned head"])
def test_a_head_keeps_its_bias(ids, tmp_path):
    model = build("phi", vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    torch.nn.init.normal_(model.lm_head.bias)
    kept = slice(None) if ids is None else ids
    torch.testing.assert_close(logits_of(build_drafter(model, [0], ids))[..., kept], logits_of(model)[..., kept])
    save(build_drafter(model, [0], ids), tmp_path, "tiny")
    torch.testing.assert_close(logits_of(load_drafter(tmp_path, model))[..., kept], logits_of(model)[..., kept], atol=0.1, rtol=0.1)
