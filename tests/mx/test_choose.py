"""`choose_formats`: what layers are said to cost is what they cost, the budget is kept, and the choice is better than chance."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_specdec import mx
from hf_specdec.mx.choose import allot, costs, larger, rounded
from hf_specdec.mx.formats import get_format
from hf_specdec.mx.plan import plan

from ..helpers import VOCAB, assert_unchanged, snapshot
from .models import mx_layers, tiny
from .test_calibrate import TEXT

GENERATOR = torch.Generator().manual_seed(5)
OTHER = torch.randint(1, VOCAB, (600,), generator=GENERATOR)
FOUR, SIX, EIGHT = "mxfp4_e2m1", "mxfp6_e2m3", "mxint8"


def uneven(kind: str = "llama", **settings):
    """A model that predicts something, and whose layers matter more or less."""
    model = tiny(kind, **settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "layers" in name:
                parameter.mul_(float((0.5 * torch.randn((), generator=generator)).exp()))
    return model


def bits_of(model) -> float:
    report = model.mx_report.compressed
    return 8 * sum(layer.bytes_after for layer in report) / sum(math.prod(layer.shape) for layer in report)


# --- the choice among costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_budget_is_kept_and_the_best_choice_is_no_better_than_one_more_step(seed):
    generator = torch.Generator().manual_seed(seed)
    bits, names = (4.25, 6.25, 8.25), "abcdef"
    sizes = {name: 32 * int(torch.randint(1, 9, (), generator=generator)) for name in names}
    found = {name: sorted(torch.rand(3, generator=generator).tolist(), reverse=True) for name in names}
    for budget in (4.25, 4.6, 5.5, 7.0, 8.25):
        most = budget * sum(sizes.values()) + 1e-6
        chosen = allot(found, sizes, bits, budget)
        assert sum(bits[chosen[name]] * sizes[name] for name in names) <= most
        every = [dict(zip(names, places)) for places in itertools.product(range(3), repeat=6)]
        best = min(total(found, each) for each in every if sum(bits[each[name]] * sizes[name] for name in names) <= most)
        assert best <= total(found, chosen) <= best + max(own[0] - own[2] for own in found.values())


def total(found, chosen) -> float:
    return sum(own[chosen[name]] for name, own in found.items())


def test_more_bits_that_gain_nothing_are_not_spent_and_steps_may_leave_a_format_out():
    sizes = dict.fromkeys("abc", 32)
    assert allot({"a": [1.0, 1.0, 1.0], "b": [1.0, 2.0, 3.0], "c": [0.0, 0.0, 0.0]}, sizes, (4, 6, 8), 8) == {"a": 0, "b": 0, "c": 0}
    assert allot({"a": [9.0, 8.9, 0.0]}, {"a": 32}, (4, 6, 8), 6) == {"a": 0} and allot({"a": [9.0, 8.9, 0.0]}, {"a": 32}, (4, 6, 8), 8) == {"a": 2}
    assert allot({"a": [1.0, 0.0], "b": [3.0, 0.0], "c": [2.0, 0.0]}, {"a": 32, "b": 320, "c": 32}, (4, 6), 4.5) == {"a": 1, "b": 0, "c": 0} | {"c": 1}


# --- what layers cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.share(1 / 3)
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "qwen2"])
def test_costs_are_the_divergence_of_the_model_with_that_layer_compressed(kind):
    model, sequences = uneven(kind), [ids[None] for ids in TEXT] * 4
    options = [get_format(name) for name in (FOUR, SIX)]
    found = costs(model, rounded(model, plan(model, FOUR, (), None), options, sequences, "even"), sequences)
    text, ratios = torch.cat(TEXT), []
    for place, name in itertools.product((0, 1), found):
        others = [other for other in found if other != name]
        one = mx.compress(copy.deepcopy(model), options[place].name, skip=others, measure=False, calibration=TEXT)
        true = mx.compare(model, one, text, window=len(TEXT[0])).kl
        if true < 0.1:  # of larger changes the second order is not all
            ratios.append(found[name][place] / true)
        assert true > found[name][place] / 3, (name, place)
    assert len(ratios) > len(found) and all(0.6 < ratio < 1.6 for ratio in ratios), ratios
    assert all(small > 3 * large for small, large in found.values())


def test_experts_have_costs_and_formats_too():
    """Of the last layer's: what changes before a router may change the choice of experts, which the second order does not know."""
    model, sequences = uneven("qwen3_moe"), [ids[None] for ids in TEXT] * 4
    options = [get_format(name) for name in (FOUR, SIX)]
    found = costs(model, rounded(model, plan(model, FOUR, (), None), options, sequences, "even"), sequences)
    text, kind = torch.cat(TEXT), type(model.model.layers[1].mlp.experts)
    for place, name in itertools.product((0, 1), (f"model.layers.1.mlp.experts.{part}_proj" for part in ("gate_up", "down"))):
        one = mx.compress(copy.deepcopy(model), options[place].name, skip=[other for other in found if other != name], measure=False)
        assert 0.75 < found[name][place] / mx.compare(model, one, text, window=len(TEXT[0])).kl < 1.33, (name, place)
    assert type(model.model.layers[1].mlp.experts) is kind and "_project" not in vars(model.model.layers[1].mlp.experts)
    chosen = mx.choose_formats(model, 5.0, TEXT, (FOUR, SIX))
    made = mx.compress(model, FOUR, layer_formats=chosen)
    assert chosen.keys() == {layer.name for layer in made.mx_report.compressed} and 4.75 < bits_of(made) <= 5.0


@pytest.mark.share(1 / 3)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("bits", [4.6, 5.0, 5.75])
def test_a_chosen_model_keeps_its_budget_and_is_nearer_than_one_chosen_at_random(kind, bits):
    model = uneven(kind, num_hidden_layers=4)
    chosen = mx.choose_formats(model, bits, TEXT, (FOUR, SIX))
    assert chosen.keys() == mx_layers(mx.compress(copy.deepcopy(model))).keys() and set(chosen.values()) == {FOUR, SIX}
    own = compressed(model, chosen)
    assert bits - 0.1 < bits_of(own) <= bits
    found, generator, others = mx.compare(model, own, OTHER, window=100).kl, torch.Generator().manual_seed(1), []
    for _ in range(5):
        names = [list(chosen)[i] for i in torch.randperm(len(chosen), generator=generator)]
        sizes = {name: model.get_submodule(name).weight.numel() for name in names}
        places = allot({name: [float(rank), 0.0] for rank, name in enumerate(names)}, sizes, (4.25, 6.25), bits)
        others.append(mx.compare(model, compressed(model, {name: (FOUR, SIX)[at] for name, at in places.items()}), OTHER, window=100).kl)
    assert found < min(others) and found < 0.9 * sum(others) / len(others)


def compressed(model, chosen):
    return mx.compress(copy.deepcopy(model), FOUR, layer_formats=chosen, calibration=TEXT)


def test_the_whole_range_of_bits():
    model = uneven()
    assert set(mx.choose_formats(model, 4.25, TEXT, (SIX, FOUR)).values()) == {FOUR}
    assert set(mx.choose_formats(model, 6.25, TEXT, (SIX, FOUR)).values()) == {SIX}
    three = mx.choose_formats(model, 6, TEXT, (EIGHT, FOUR, SIX))
    assert set(three.values()) == {FOUR, SIX, EIGHT} and bits_of(compressed(model, three)) <= 6
    assert mx.choose_formats(model, 6, TEXT, (EIGHT, FOUR, SIX)) == three  # labels are drawn with a seed


def test_a_layer_that_is_called_by_name_is_watched_too():
    model, by_name = uneven(), uneven()
    for layer in by_name.model.layers:
        layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.down_proj(input=mlp.act_fn(mlp.gate_proj(input=x)) * mlp.up_proj(x))
    assert mx.choose_formats(by_name, 5.0, TEXT, (FOUR, SIX)) == mx.choose_formats(model, 5.0, TEXT, (FOUR, SIX))


def test_skipped_layers_and_the_head_get_no_format_and_what_no_text_reaches_gets_the_smallest():
    model = uneven()
    chosen = mx.choose_formats(model, 6.0, TEXT, skip=["layers.0", "q_proj"])
    assert {name.removeprefix("model.layers.1.") for name in chosen} == {
        "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    model.model.layers[1].mlp.spare = torch.nn.Linear(64, 64)
    assert mx.choose_formats(model, 6.0, TEXT)["model.layers.1.mlp.spare"] == FOUR


@pytest.mark.parametrize("frozen", [False, True])
def test_the_model_is_left_as_it_is(frozen):
    model = uneven().train().requires_grad_(not frozen)
    before, state = snapshot(model), torch.get_rng_state()
    with torch.no_grad():
        mx.choose_formats(model, 5.0, TEXT, activations="mxint8")
    assert_unchanged(model, before)
    assert model.training and torch.equal(torch.get_rng_state(), state) and all(p.grad is None and p.requires_grad is not frozen for p in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_other_models():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, decoder_start_token_id=0))
    assert any("EncDecAttention" in name for name in mx.choose_formats(model, 5.0, TEXT))
    sixteen = mx.choose_formats(uneven(dtype=torch.bfloat16), 5.0, TEXT)
    assert sum(a == b for a, b in zip(sixteen.values(), mx.choose_formats(uneven(), 5.0, TEXT).values())) >= len(sixteen) - 2
    classifier = AutoModelForSequenceClassification.from_config(tiny(pad_token_id=0).config)
    assert "score" not in mx.choose_formats(classifier, 5.0, TEXT)


# --- bad input ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"bits": 4.2}, ValueError, "bits=4.2 must be a number from 4.25 to 6.25, the bits per weight of mxfp4_e2m1 and mxfp6_e2m3"),
    ({"bits": 6.3}, ValueError, "bits=6.3 must be a number from 4.25 to 6.25"),
    ({"bits": float("nan")}, ValueError, "bits=nan must be"),
    ({"bits": "5"}, ValueError, "bits='5' must be a number"),
    ({"bits": True}, ValueError, "bits=True must be a number"),
    ({"formats": FOUR}, TypeError, "formats must be a sequence"),
    ({"formats": [FOUR]}, ValueError, "leaves no choice"),
    ({"formats": [SIX, "mxfp6_e3m2"]}, ValueError, "leaves no choice.*different sizes"),
    ({"formats": [FOUR, "x"]}, ValueError, "formats='x' is not an MX format"),
    ({"scale_rule": "up"}, ValueError, "scale_rule='up'"),
    ({"activations": "int4"}, ValueError, "activations='int4'"),
    ({"calibration": []}, ValueError, "calibration is empty"),
    ({"calibration": "text"}, TypeError, "calibration must be sequences"),
    ({"skip": "mlp"}, TypeError, "skip must be a sequence"),
    ({"model": "smollm2"}, TypeError, "model: expected a model, got str"),
    ({"model": tiny().model}, TypeError, "LlamaModel predicts nothing .*its head"),
])
def test_bad_input_is_refused_before_any_work(arguments, error, words, monkeypatch):
    monkeypatch.setattr("hf_specdec.mx.choose.rounded", lambda *_: pytest.fail("it worked"))
    with pytest.raises(error, match=words):
        mx.choose_formats(**{"model": tiny(), "bits": 5.0, "calibration": TEXT, "formats": (FOUR, SIX), **arguments})


def test_compressed_models_are_refused():
    with pytest.raises(ValueError, match="has MX layers already"):
        mx.choose_formats(mx.compress(tiny()), 5.0, TEXT)


def test_formats_from_one_on():
    assert larger(FOUR) == [FOUR, SIX, EIGHT] and larger("mxfp6_e3m2") == ["mxfp6_e3m2", EIGHT] and larger(EIGHT) == [EIGHT]
