"""`mx.draft_of`: the target with fewer bits drafts for itself; it is left alone, and the packed matrices are all that is held beside it."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_specdec import mx
from hf_specdec.drafts import CompressedDraft
from hf_specdec.mx.experts import matrices
from hf_specdec.mx.linear import MXMatrix

from ..helpers import assert_unchanged, enabled, generated, plain, prompts, repetitive, snapshot, speculate
from .models import allocated, logits, mx_layers, same, tiny

ROWS = repetitive(13) + prompts(5, seed=4)
KINDS = ["llama", "gpt_neox", "gpt2", "qwen2", "qwen3_moe"]
WAYS = {"dense": lambda model: model, "tiles": mx.to_tiles, "MX": partial(mx.compress, format="mxfp8_e4m3", measure=False), "MX and its head": partial(mx.compress, format="mxint8", lm_head="mxint8")}
GATE_UP, DOWN = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
each_kind_and_way = pytest.mark.parametrize(("kind", "way"), [(kind, way) for kind in KINDS for way in WAYS if (kind, way) != ("gpt2", "MX")])  # its head is its one Linear layer
each_way = pytest.mark.parametrize("way", WAYS)


def target_of(kind: str = "llama", way: str = "dense", **settings):
    return WAYS[way](tiny(kind, **settings))


def dense(model):
    model = copy.deepcopy(model)
    return mx.dequantize(model) if any(isinstance(part, MXMatrix) for part in model.modules()) else model


def packed_in(model) -> dict[str, MXMatrix]:
    return {name: part for name, part in model.named_modules() if isinstance(part, MXMatrix)}


def formats(model) -> dict[str, str]:
    return {name: part.format.name for name, part in packed_in(model).items()}


def exact(target, draft, k: int | str = 3) -> bool:
    return generated(speculate(target, ROWS, draft, k), ROWS) == plain(target, ROWS)


# --- what it holds ------------------------------------------------------------------------------------------------------------


@each_kind_and_way
def test_it_is_what_compress_makes_of_the_dense_model(kind, way):
    target = target_of(kind, way)
    draft, expected = mx.draft_of(target, "mxfp4_e2m1"), mx.compress(dense(target), "mxfp4_e2m1", lm_head="mxint8")
    assert isinstance(draft, CompressedDraft) and type(draft.model) is type(target) and same(draft.model, expected)
    assert draft.model.config.quantization_config.to_dict() == expected.config.quantization_config.to_dict()


@each_kind_and_way
def test_the_target_is_left_as_it_is_and_the_text_is_its_own(kind, way):
    target = enabled(target_of(kind, way))
    parts, before, expected = {name: (part, type(part), sorted(vars(part))) for name, part in target.named_modules()}, snapshot(target), logits(target)
    draft = mx.draft_of(target)
    assert exact(target, draft) and exact(target, draft, "auto")
    assert_unchanged(target, before)
    assert torch.equal(logits(target), expected)
    assert {name: (part, type(part), sorted(vars(part))) for name, part in target.named_modules()} == parts


@each_kind_and_way
def test_what_is_not_packed_is_the_targets_own(kind, way):
    target = target_of(kind, way)
    draft = mx.draft_of(target).model
    fresh = {id(part) for layer in packed_in(draft).values() for part in (layer.weight, layer.weight_scale)}
    owned = {id(part) for part in (*target.parameters(), *target.buffers())}
    assert {id(part) for part in (*draft.parameters(), *draft.buffers())} <= owned | fresh and owned.isdisjoint(fresh)
    assert not any(part.is_meta for part in (*draft.parameters(), *draft.buffers()))


@each_way
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_memory_is_that_of_the_packed_matrices(kind, way):
    target, made = target_of(kind, way, hidden_size=256, intermediate_size=512), []
    mx.draft_of(target)  # what is made once in a process is there
    peak, held = allocated(lambda: made.append(mx.draft_of(target)))
    layers = packed_in(made[0].model).values()
    size = sum(layer.weight.numel() + layer.weight_scale.numel() for layer in layers)
    assert size <= held < 1.1 * size + 8192
    assert peak - held < 12 * 4 * max(layer.in_features * layer.out_features for layer in layers)


def test_a_layer_of_more_bits_that_is_to_stay_is_the_targets_own_in_its_own_mode():
    target = target_of(way="MX").train()
    draft, name = mx.draft_of(target, skip=("down_proj",)).model, "model.layers.1.mlp.down_proj"
    assert draft.get_submodule(name).weight is target.get_submodule(name).weight and draft.get_submodule(name).format.name == "mxfp8_e4m3"
    assert all(part.training for part in target.modules()) and not draft.training


@pytest.mark.parametrize("kept", ["gate_up_proj", "down_proj", "experts"])
@pytest.mark.parametrize("way", ["tiles", "MX"])
def test_packed_experts_that_are_to_stay_are_the_targets_own(way, kept):
    target = target_of("qwen3_moe", way)
    draft = mx.draft_of(target, "mxfp4_e2m1", skip=(kept,))
    theirs, ours = ({(i, name): layer for i, (_, name, layer) in enumerate(matrices(model))} for model in (target, draft.model))
    for place, layer in ours.items():
        stays = kept in (place[1], "experts")
        assert (layer.format.name == "mxfp4_e2m1") is not stays and (layer.weight is theirs[place].weight) is stays
    assert exact(target, draft)


def test_skip_and_layer_formats_and_the_heads_format():
    target = target_of()
    found = formats(mx.draft_of(target, "mxfp4_e2m1", lm_head="mxfp8_e4m3", skip=("k_proj",), layer_formats={"down_proj": "mxint8", "*.layers.1.*": "bf16"}).model)
    assert found["lm_head"] == "mxfp8_e4m3" and not any("k_proj" in name for name in found)
    assert found["model.layers.0.mlp.down_proj"] == "mxint8" and found["model.layers.1.mlp.down_proj"] == "bf16" and found["model.layers.0.mlp.up_proj"] == "mxfp4_e2m1"
    assert formats(mx.draft_of(target).model)["lm_head"] == "mxint8" and "lm_head" not in formats(mx.draft_of(target, lm_head=None).model)
    experts = formats(mx.draft_of(target_of("qwen3_moe", "MX"), layer_formats={"experts": "mxfp4_e2m1", "0.mlp.experts.down_proj": "mxint8"}).model)
    assert [experts[name.replace("experts.", "experts.mx_")] for name in (GATE_UP, DOWN)] == ["mxfp4_e2m1", "mxint8"]


def test_activations_are_rounded_where_the_format_goes_with_it():
    layers = mx_layers(mx.draft_of(target_of(), "mxfp4_e2m1", lm_head="mxfp8_e4m3", activations="mxint8").model)
    assert {layer.activations for name, layer in layers.items() if name != "lm_head"} == {"mxint8"} and layers["lm_head"].activations is None


@pytest.mark.parametrize("way", ["dense", "tiles"])
def test_a_tied_head_is_untied_in_the_draft_alone(way):
    target = target_of("llama", way, tie_word_embeddings=True)
    tied, draft = target.config.tie_word_embeddings, mx.draft_of(target)
    assert draft.model.get_input_embeddings().weight is target.get_input_embeddings().weight and formats(draft.model)["lm_head"] == "mxint8"
    assert target.config.tie_word_embeddings is tied and (way == "tiles" or target.lm_head.weight is target.get_input_embeddings().weight)
    left = mx.draft_of(target, lm_head=None).model
    assert left.lm_head.weight is target.lm_head.weight and exact(target, draft)


@pytest.mark.parametrize(("way", "dtype"), [("dense", torch.bfloat16), ("tiles", torch.bfloat16), ("MX", torch.bfloat16), ("dense", torch.float16), ("MX", torch.float16)], ids=str)
def test_in_sixteen_bits(way, dtype):
    target = target_of("llama", way, dtype=dtype)
    draft = mx.draft_of(target)
    assert same(draft.model, mx.compress(dense(target), lm_head="mxint8")) and draft.model.dtype == dtype
    assert [len(row) for row in generated(speculate(target, ROWS, draft, 3), ROWS)] == [20, 20]


# --- files, life, refusals ----------------------------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "tied"])
@pytest.mark.parametrize("left", [(), ("o_proj", "1.mlp", "experts")], ids=["all", "some stay"])
@pytest.mark.filterwarnings("ignore:skip. the model has no module 'experts'")
def test_a_saved_copy_is_loaded_as_the_draft_again(kind, way, left, tmp_path):
    target = target_of("llama", way, tie_word_embeddings=True) if kind == "tied" else target_of(kind, way)
    before = snapshot(target)
    draft = mx.draft_of(target, "mxfp4_e2m1", skip=left, lm_head=None if left else "mxint8")
    draft.model.save_pretrained(tmp_path)
    assert_unchanged(target, before)
    loaded = mx.load(AutoModelForCausalLM, tmp_path, dtype=torch.float32)
    assert same(loaded, draft.model) and exact(target, CompressedDraft(target, loaded))


def test_the_copy_goes_with_the_draft_and_both_with_the_target():
    target = target_of()
    draft = mx.draft_of(target)
    speculate(target, ROWS, draft, 3)
    model, whole = weakref.ref(draft.model), weakref.ref(target)
    del draft
    gc.collect()
    assert model() is None
    draft = mx.draft_of(target)
    del draft, target
    gc.collect()
    assert whole() is None


def test_of_a_draft_of_a_target_that_has_spoken_before():
    target = target_of("llama", "tiles")
    assert exact(target, None)
    assert exact(target, mx.draft_of(target)) and exact(target, mx.draft_of(mx.draft_of(target).model))


@pytest.mark.parametrize(("settings", "words"), [
    ({"format": "mxfp3"}, "format='mxfp3'"), ({"lm_head": "mxfp3"}, "lm_head='mxfp3'"), ({"scale_rule": "nearest"}, "scale_rule='nearest'"),
    ({"activations": "int4"}, "activations='int4'"), ({"layer_formats": {"down_proj": "mxfp3"}}, r"layer_formats\['down_proj'\]='mxfp3'"),
    ({"layer_formats": {"lm_head": "mxint8"}}, "layer_formats: 'lm_head'.*pass lm_head="), ({"skip": ("*",), "lm_head": None}, "no layer that can be compressed: .*skipped on request"),
])  # fmt: skip
@each_way
def test_what_compress_refuses(way, settings, words):
    target = target_of(way=way)
    before = snapshot(target)
    with pytest.raises(ValueError, match=words):
        mx.draft_of(target, **settings)
    assert_unchanged(target, before)


def test_what_is_no_sequence_of_names_and_what_is_no_model():
    for settings, word in (({"skip": "down_proj"}, "skip"), ({"layer_formats": "mxint8"}, "layer_formats"), ({"calibration": []}, "calibration")):
        with pytest.raises(TypeError, match=word):
            mx.draft_of(target_of(), **settings)
    for target in ("a folder", nn.Linear(32, 32), None, AutoModelForCausalLM):
        with pytest.raises(TypeError, match="target: expected a transformers model"):
            mx.draft_of(target)


def test_weights_that_are_not_finite_are_named():
    target = tiny()
    target.model.layers[1].mlp.down_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(ValueError, match="model.layers.1.mlp.down_proj.weight holds a NaN.*skip="):
        mx.draft_of(target)
    assert formats(mx.draft_of(target, skip=("1.mlp.down_proj",)).model).keys() == formats(mx.draft_of(tiny()).model).keys() - {"model.layers.1.mlp.down_proj"}
