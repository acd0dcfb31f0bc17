"""Calibrated compression: against GPTQ as it is written down, in float64; what it gains on layers and models; what it refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_specdec import mx
from hf_specdec.bench.embedded import load_target
from hf_specdec.mx import calibrate
from hf_specdec.mx.calibration import own_text, pieces, sequences_of
from hf_specdec.mx.formats import get_format
from hf_specdec.mx.gptq import Inputs, compensated

from ..bench.test_embedded import needs_package
from ..encoder_decoders import family
from ..helpers import VOCAB, assert_unchanged, snapshot
from . import reference
from .models import inputs_of, logits, mx_layers, same, tiny

FORMATS, RULES = list(mx.FORMATS), ("floor", "even", "ceil", "mse")
GENERATOR = torch.Generator().manual_seed(11)
TEXT = [torch.randint(1, VOCAB, (48,), generator=GENERATOR) for _ in range(6)]


def inputs(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Correlated ones of very different sizes, as layers see them."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(rows, columns // 4, generator=generator) @ torch.randn(columns // 4, columns, generator=generator)
    return (few + torch.randn(rows, columns, generator=generator)) * torch.randn(columns, generator=generator).exp()


def matrix(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def rounded(weight, format, rule, gram):
    return compensated(weight, get_format(format), rule, Inputs.of(gram))


def textbook(name: str, weight: torch.Tensor, rule: str, gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GPTQ without its tricks (Frantar et al. 2022, equations 2 and 3): after each column the inverse Hessian loses that column. All in float64."""
    weight, hessian = weight.double().clone(), gram.double()
    inverse = torch.linalg.inv(hessian + 0.3 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64))
    codes, scales = torch.empty(weight.shape, dtype=torch.long), torch.empty(weight.shape[0], weight.shape[1] // 32, dtype=torch.long)
    size = hessian.diagonal().tolist()
    for block in sorted(range(len(size) // 32), key=lambda block: -sum(size[32 * block : 32 * block + 32])):
        columns = range(32 * block, 32 * block + 32)
        scales[:, block] = scale = scale_of(name, weight[:, columns], rule)
        step = reference.power(scale - 127)
        for q in sorted(columns, key=lambda q: -size[q]):
            codes[:, q] = reference.nearest(name, weight[:, q] / step)
            error = weight[:, q] - reference.values_of(name, codes[:, q]) * step
            weight -= torch.outer(error / inverse[q, q], inverse[q])
            inverse -= torch.outer(inverse[:, q], inverse[q]) / inverse[q, q]
            inverse[q, :] = inverse[:, q] = 0
            inverse[q, q] = 1
    return codes, scales


def scale_of(name: str, block: torch.Tensor, rule: str) -> torch.Tensor:
    if rule != "mse":
        return reference.quantise(name, block, rule)[1].squeeze(-1)
    floor = reference.quantise(name, block, "floor")[1] - 127
    tried = torch.cat([floor, floor + 1, floor - 1], 1)
    squares = torch.stack([reference.errors(name, block, e) for e in tried.unbind(1)], 1)
    return tried.gather(1, squares.argmin(1, keepdim=True)).squeeze(1) + 127


def loss(x: torch.Tensor, weight: torch.Tensor, packed) -> float:
    return float((x.double() @ (weight.double() - packed.dequantize().double()).T).square().sum())


# --- one matrix ---------------------------------------------------------------------------------------------------------------


@pytest.mark.share(4 / 3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_scales_are_those_of_the_textbook(format, rule):
    """But where float32 and float64 part at a tie, and from there on, in that row."""
    weight, x = matrix(24, 96), inputs(400, 96)
    gram = x.T @ x
    packed = rounded(weight, format, rule, gram)
    codes, scales = textbook(format, weight, rule, gram)
    expected = reference.stored(codes.tolist(), get_format(format).bits)
    alike = (packed.codes == expected).all(1) & (packed.scales == scales).all(1)
    assert packed.codes.dtype == packed.scales.dtype == torch.uint8 and alike.float().mean() >= 0.7


@pytest.mark.share(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", FORMATS)
def test_where_inputs_are_uncorrelated_and_alike_it_is_rounding_to_nearest(format, rule, dtype):
    weight = matrix(33, 128).to(dtype)
    packed, nearest = rounded(weight, format, rule, 7 * torch.eye(128)), mx.quantize(weight, format, rule)
    assert torch.equal(packed.codes, nearest.codes) and torch.equal(packed.scales, nearest.scales)


@pytest.mark.share(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", FORMATS)
def test_outputs_are_nearer_than_with_rounding_to_nearest_and_with_a_wrong_gram_matrix_they_are_not(format, rule):
    weight, x, other = matrix(64, 128), inputs(600, 128), inputs(600, 128, seed=5)
    nearest = loss(x, weight, mx.quantize(weight, format, rule))
    assert loss(x, weight, rounded(weight, format, rule, x.T @ x)) < 0.8 * nearest < nearest < loss(x, weight, rounded(weight, format, rule, other.T @ other))


@pytest.mark.parametrize("format", FORMATS)
def test_the_matrix_is_one_that_quantize_gives_back(format):
    """Its values are the format's: rounding them once more, with the scales that are there, changes nothing."""
    weight, x = matrix(32, 64), inputs(100, 64)
    packed = rounded(weight, format, "even", x.T @ x)
    values = packed.dequantize(torch.float64).unflatten(1, (-1, 32)) / reference.power(packed.scales.long() - 127).unsqueeze(-1)
    assert torch.equal(packed.codes, reference.stored(reference.nearest(format, values).flatten(1).tolist(), packed.format.bits))
    assert packed.scales.max() < 255 and packed.shape == (32, 64)


def test_gram_matrices_that_are_hard_to_factorise():
    weight, x = matrix(16, 64), inputs(5, 64)
    gram, one = x.T @ x, torch.eye(64)
    few, mean = Inputs.of(gram), gram.diagonal().mean()
    damped = (gram + 0.3 * mean * one)[few.order][:, few.order].double()
    assert few.factor.dtype == torch.float32 and torch.equal(few.factor, few.factor.triu()) and torch.equal(few.order.sort().values, torch.arange(64))
    assert torch.allclose(few.factor.double().T @ few.factor.double() @ damped, one.double(), atol=1e-3)
    assert torch.equal(Inputs.of(torch.zeros(64, 64)).factor, Inputs.of(one).factor)
    assert Inputs.of(gram - 0.5 * mean * one).factor.isfinite().all()  # no sum of squares: more damping makes up for it
    x[:, [3, 40]] = 0
    dead, nearest = rounded(weight, "mxfp4_e2m1", "even", x.T @ x), mx.quantize(weight, "mxfp4_e2m1")
    scale = reference.power(dead.scales.long() - 127).repeat_interleave(32, 1)
    expected = reference.values_of("mxfp4_e2m1", reference.nearest("mxfp4_e2m1", weight / scale)) * scale
    assert torch.equal(dead.dequantize().double()[:, [3, 40]], expected[:, [3, 40]]) and not torch.equal(dead.codes, nearest.codes)
    with pytest.raises(ValueError, match="NaN or an infinity"):
        Inputs.of(torch.full((32, 32), float("nan")))


# --- models -------------------------------------------------------------------------------------------------------------------


def layer_losses(original, compressed, text) -> dict[str, float]:
    """Of each layer: what its outputs for the original's inputs have lost, relative to the outputs."""
    seen: dict[str, list] = {name: [] for name in mx_layers(compressed)}
    handles = [original.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].flatten(0, -2))) for name in seen]
    with torch.no_grad():
        for ids in text:
            original(input_ids=ids[None], use_cache=False)
    [handle.remove() for handle in handles]
    found = {}
    for name, x in seen.items():
        weight, x = original.get_submodule(name).weight.detach(), torch.cat(x)
        found[name] = loss(x, weight, compressed.get_submodule(name).packed()) / float((x @ weight.T).square().sum())
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "qwen2"])
def test_no_layer_of_a_model_loses_more_than_by_rounding_to_nearest(kind):
    original = tiny(kind)
    nearest, better = mx.compress(copy.deepcopy(original), "mxfp4_e2m1"), mx.compress(copy.deepcopy(original), "mxfp4_e2m1", calibration=TEXT)
    plain, found = layer_losses(original, nearest, TEXT), layer_losses(original, better, TEXT)
    assert found.keys() == plain.keys() and all(found[name] <= plain[name] for name in found)
    assert sum(found.values()) < 0.8 * sum(plain.values())
    ids = torch.cat(TEXT)
    assert mx.compare(original, better, ids).kl < 0.8 * mx.compare(original, nearest, ids).kl
    assert {layer.note for layer in better.mx_report.compressed} == {"calibrated"}
    assert [layer.name for layer in better.mx_report.layers] == [layer.name for layer in nearest.mx_report.layers]


@pytest.mark.share(4 / 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_calibrated_model_is_saved_and_loaded_as_any_other(format, tied, dtype, tmp_path):
    model = mx.compress(tiny(dtype=dtype, tie_word_embeddings=tied), format, lm_head=format, calibration=TEXT)
    model.save_pretrained(tmp_path)
    assert same(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")) and "calibration" not in model.config.quantization_config.to_dict()
    head = next(layer for layer in model.mx_report.layers if layer.name == "lm_head")
    assert head.note == ("untied from the embedding, which stays dense, calibrated" if tied else "calibrated") and head.bytes_before == 0 or not tied


@pytest.mark.share(4)
@pytest.mark.parametrize("rule", RULES)
def test_the_layers_hold_what_the_inputs_say_in_one_stage_and_in_many(rule, monkeypatch):
    """In one, the inputs are those of the dense model; with a stage for each, the layers before are compressed already."""
    original = tiny(tie_word_embeddings=False)
    for memory in (1.0, 0.0):
        monkeypatch.setattr(calibrate, "MEMORY", memory)
        model = mx.compress(copy.deepcopy(original), "mxfp6_e2m3", scale_rule=rule, lm_head="mxint8", calibration=TEXT)
        first, last = "model.layers.0.self_attn.q_proj", "lm_head"
        for name, source in ((first, original), (last, model if memory == 0.0 else original)):
            x = inputs_of(source, name, TEXT)
            packed = compensated(original.get_submodule(name).weight, model.get_submodule(name).format, rule, Inputs.of(x.T @ x))
            assert (packed.codes == model.get_submodule(name).packed().codes).float().mean() > 0.99, (name, memory)


@pytest.mark.parametrize("memory", [1.0, 1e-4, 0.0])
def test_layers_with_one_input_share_its_matrix_and_passes_end_where_nothing_more_is_wanted(memory, monkeypatch):
    model, measured, heads = tiny(), [], []
    model.lm_head.register_forward_hook(lambda *_: heads.append(1))
    before = calibrate._measure

    def measure(*arguments):
        grams = before(*arguments)
        measured.append(sorted(grams))
        return grams

    monkeypatch.setattr(calibrate, "_measure", measure)
    monkeypatch.setattr(calibrate, "MEMORY", memory)
    mx.compress(model, "mxfp4_e2m1", calibration=TEXT)
    names = [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("mlp.down_proj", "mlp.gate_proj", "self_attn.o_proj", "self_attn.q_proj")]
    assert sorted(sum(measured, [])) == names and len(heads) == 1  # of the pass that finds the order
    assert len(measured) == {1.0: 1, 1e-4: 2, 0.0: 8}[memory]


def test_skipped_and_odd_layers_are_left_dense_and_the_others_calibrated():
    model = mx.compress(tiny(intermediate_size=80), "mxfp4_e2m1", skip=["q_proj", "layers.1"], calibration=TEXT)
    report = {layer.name: layer for layer in model.mx_report.layers}
    assert report["model.layers.0.mlp.down_proj"].note == "80 inputs are no multiple of 32"
    assert report["model.layers.0.self_attn.q_proj"].note == "skipped on request"
    assert {name for name, layer in report.items() if layer.note == "calibrated"} == {
        f"model.layers.0.{name}" for name in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")}
    experts = {layer.name: layer.note for layer in mx.compress(tiny("qwen3_moe"), calibration=TEXT).mx_report.layers}
    assert experts["model.layers.0.mlp.experts.down_proj"] == "experts are rounded to nearest" and experts["model.layers.0.self_attn.o_proj"] == "calibrated"


class Experts(nn.Module):
    """Three routes: the pass that finds the order and the first text take the first one, other texts the second."""

    def __init__(self, before):
        super().__init__()
        self.before, self.routes = before, nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.before(x) + self.routes[int(self.calls > 2)](x)


def test_layers_that_only_some_text_reaches():
    model = tiny()
    model.model.layers[0].mlp = Experts(model.model.layers[0].mlp)
    notes = {layer.name: layer.note for layer in mx.compress(model, calibration=TEXT).mx_report.layers}
    assert notes["model.layers.0.mlp.routes.0"] == notes["model.layers.0.mlp.routes.1"] == "calibrated"
    assert notes["model.layers.0.mlp.routes.2"] == "no calibration text reached it: rounded to nearest"


def test_a_layer_that_a_pass_calls_twice_is_measured_on_both():
    model = tiny()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    mx.compress(model, calibration=TEXT)
    assert {layer.note for layer in model.mx_report.compressed} == {"calibrated"} and logits(model).isfinite().all()


def test_rounded_activations_are_what_is_measured():
    model, dense = mx.compress(tiny(), "mxfp4_e2m1", activations="mxint8", lm_head="mxfp8_e4m3", calibration=TEXT), tiny()
    name = "model.layers.0.self_attn.q_proj"
    x = []
    dense.get_submodule(name).register_forward_pre_hook(lambda _, args: x.append(mx.linear.round_to_integers(args[0].flatten(0, -2))))
    for ids in TEXT:
        logits_of(dense, ids)
    expected = rounded(dense.get_submodule(name).weight, "mxfp4_e2m1", "even", sum(part.T @ part for part in x))
    layer = model.get_submodule(name)
    assert layer.activations == "mxint8" and model.lm_head.activations is None
    assert (layer.packed().codes == expected.codes).float().mean() > 0.99


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits


def test_an_encoder_decoder_reads_the_text_on_both_sides():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4, decoder_start_token_id=0))
    notes = {layer.name: layer.note for layer in mx.compress(model.eval(), calibration=TEXT).mx_report.layers if layer.format}
    assert any("EncDecAttention" in name for name in notes) and set(notes.values()) == {"calibrated"}


def test_a_model_that_reads_no_token_ids_is_refused_by_name():
    model, message = family("Whisper").model(d_model=64), "token ids, which WhisperForConditionalGeneration does not take"
    for use in (lambda: mx.compress(model, calibration=TEXT), lambda: mx.choose_formats(model, 5.0, TEXT), lambda: own_text(model, [2])):
        with pytest.raises(TypeError, match=message):
            use()
    assert not hasattr(model, "mx_report")
    assert len(sequences_of(torch.compile(tiny()), TEXT)) == len(TEXT)  # whose forward takes anything


def test_the_model_trains_again_and_has_no_hooks_left_and_random_numbers_go_on():
    model, state = tiny().train(), torch.get_rng_state()
    mx.compress(model, calibration=TEXT)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_stopped_before_the_first_layer_is_swapped_nothing_has_changed(error):
    model, calls = tiny().train(), []
    before, config = snapshot(model), model.config

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise error

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(error):
        mx.compress(model, calibration=TEXT)
    handle.remove()
    assert_unchanged(model, before)
    assert not mx_layers(model) and model.config is config and model.training and not hasattr(model, "mx_report")
    assert not any(module._forward_pre_hooks for module in model.modules())


# --- bad input ----------------------------------------------------------------------------------------------------------------

BAD = [
    ([], ValueError, "calibration is empty"),
    ("text", TypeError, "not str"),
    (7, TypeError, "not int"),
    ([[]], ValueError, r"calibration\[0\] has no tokens"),
    ([[1, 2], [0.5]], ValueError, r"calibration\[1\] must be integers .* not torch.float32"),
    ([torch.ones(2, 5, dtype=torch.long)], ValueError, r"\[2, 5\]"),
    (torch.arange(5), ValueError, r"calibration\[0\] must be integers"),
    ([torch.ones(5, dtype=torch.bool)], ValueError, "torch.bool"),
    (["abc"], TypeError, r"calibration\[0\] is a str"),
    ([[1, VOCAB]], ValueError, f"from 1 to {VOCAB}; the model's go from 0 to {VOCAB - 1}"),
    ([[-1, 2]], ValueError, "from -1 to 2"),
    ([[1] * 129], ValueError, "129 tokens, more than the model's context of 128"),
]


@pytest.mark.parametrize(("calibration", "error", "words"), BAD)
def test_bad_calibration_is_refused_before_any_work(calibration, error, words):
    model = tiny()
    before = snapshot(model)
    with pytest.raises(error, match=words):
        mx.compress(model, calibration=calibration)
    assert_unchanged(model, before)
    assert not mx_layers(model)


def test_models_and_formats_without_anything_to_calibrate():
    with pytest.raises(ValueError, match="calibration has no meaning where nothing is rounded"):
        mx.compress(tiny(), "fp32", lm_head="bf16", calibration=TEXT)
    with pytest.raises(TypeError, match="which Sequential does not take"):
        mx.compress(nn.Sequential(nn.Linear(64, 64)), calibration=TEXT)
    model = tiny()
    model.model.layers[0].input_layernorm.weight.data.fill_(float("inf"))
    with pytest.raises(ValueError, match="inputs of model.layers.0.self_attn.q_proj hold a NaN or an infinity"):
        mx.compress(model, calibration=TEXT)
    assert not mx_layers(model)


def test_sequences_may_be_lists_rows_or_a_generator():
    models = [mx.compress(tiny(), calibration=given) for given in (
        TEXT, [ids.tolist() for ids in TEXT], [ids[None].int() for ids in TEXT], torch.stack(TEXT), (ids for ids in TEXT))]
    assert all(same(models[0], other) for other in models[1:])


# --- text ---------------------------------------------------------------------------------------------------------------------


def test_a_text_is_cut_into_pieces():
    parts = pieces(list(range(25)), tokens=23, length=10)
    assert [part.tolist() for part in parts] == [[list(range(10))], [list(range(10, 20))], [list(range(20, 23))]]
    with pytest.raises(ValueError, match="no token"):
        pieces([])


def test_the_model_writes_text_of_its_own():
    model, state = tiny(bos_token_id=1, eos_token_id=2), torch.get_rng_state()
    parts = own_text(model, tokens=96, length=32)
    assert len(parts) == 3 and all(part.shape == (1, 32) and part.dtype == torch.long and part[0, 0] == 1 for part in parts)
    again, other, begun = own_text(model, tokens=96, length=32), own_text(model, tokens=96, length=32, seed=1), own_text(model, [4, 5], tokens=10, length=500)
    assert torch.equal(torch.cat(parts), torch.cat(again)) and not torch.equal(torch.cat(parts), torch.cat(other))
    assert len(begun) == 1 and begun[0].shape == (1, 128) and begun[0][0, :2].tolist() == [4, 5]  # the model's context
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in {"max_new_tokens": 4, "no_repeat_ngram_size": 1, "repetition_penalty": 1.3, "num_beams": 2, "stop_strings": ["a"]}.items():
        setattr(model.generation_config, name, value)  # what a model's own config says of its chats is no matter here
    kept = model.generation_config
    assert torch.equal(torch.cat(parts), torch.cat(own_text(model, tokens=96, length=32))) and model.generation_config is kept
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = None, [3, 2]
    assert own_text(model, tokens=8, length=8)[0][0, 0] == 3
    model.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="there is no token to begin with"):
        own_text(model)


# --- a real model -------------------------------------------------------------------------------------------------------------

PASSAGES = Path(__file__).parents[2] / "recipes" / "prompts" / "passages.jsonl"


@pytest.mark.share(0)
@needs_package
def test_two_layers_of_smollm2_in_four_bits_lose_far_less_on_a_text_of_another_kind():
    original, tokenizer = load_target(device="cpu")
    skip = [f"layers.{i}" for i in range(2, 30)]
    words = "\n".join(json.loads(line)["prompt"] for line in PASSAGES.read_text().splitlines()[:20])
    nearest = mx.compress(copy.deepcopy(original), "mxfp4_e2m1", skip, measure=False)
    better = mx.compress(copy.deepcopy(original), "mxfp4_e2m1", skip, measure=False, calibration=pieces(tokenizer(words)["input_ids"], 1536))
    plain, found = (mx.compare(original, model, tokenizer, max_tokens=512) for model in (nearest, better))
    assert found.kl < 0.8 * plain.kl and found.loss_difference < plain.loss_difference
