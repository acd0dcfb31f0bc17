"""Experts of mixtures in MX formats and tiles: their products, whole models, files, compilers and speculation."""

from __future__ import annotations

import copy
import io
import json
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from hf_specdec import mx
from hf_specdec.drafts import EarlyExitDraft, PromptLookupDraft
from hf_specdec.mx import passes
from hf_specdec.mx.codec import round_to_integers
from hf_specdec.mx.experts import ExpertMatrix, expert_projections, matrices
from hf_specdec.mx.formats import DENSE
from hf_specdec.mx.in_place import leave_experts_dense
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.packed import quantize
from hf_specdec.mx.plan import ON_GPU, plan, recorded

from ..architectures import FAMILIES
from ..helpers import OLD_TORCH, KnowingTreeDraft, generated, perturbed, plain, repetitive, speculate, torch_threads
from .models import IDS, logits, same, tiny

each_path = pytest.mark.parametrize("path", cpu.kernel_info()["available"], indirect=True)
each_format = pytest.mark.parametrize("name", [*mx.FORMATS, *DENSE])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
each_half = pytest.mark.parametrize("skip", [(), ("down_proj",), ("gate_up_proj",)], ids=str)
needs_the_compiler = pytest.mark.skipif(OLD_TORCH, reason="this torch does not compile the model: docs/performance.md")
read = AutoModelForCausalLM.from_pretrained
moe = partial(tiny, "qwen3_moe")
NAMES = [f"model.layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")]


@pytest.fixture
def path(request):
    cpu.set_kernel_path(request.param)
    yield request.param
    cpu.set_kernel_path(None)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrix(name: str, activations: str | None = None) -> ExpertMatrix:
    """Five experts [48, 96]."""
    layer = ExpertMatrix(96, 5 * 48, name, activations=activations, experts=5)
    layer.set_packed(quantize(torch.randn(5 * 48, 96, generator=generator(0)) / 10, name))
    return layer


def routed(tokens: int, share: int, dtype=torch.float32, k: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, k, generator=generator(tokens)).to(dtype), torch.randint(0, 5, (tokens, share), generator=generator(tokens + share))


def assert_near(layer: ExpertMatrix, x: torch.Tensor, index: torch.Tensor) -> None:
    """Within a millionth of the sum of the terms' sizes, and the rounding of a 16-bit output."""
    with torch.no_grad():
        y = layer(x, index)
    given = (round_to_integers(x.float()) if layer.activations else x).double().repeat_interleave(index.numel() // len(x), 0)
    weight = torch.cat([layer.packed().dequantize(torch.float64).view(5, 48, 96), torch.zeros(1, 48, 96)])[index.reshape(-1).long()]
    exact, terms = (torch.einsum("pnk,pk->pn", *pair) for pair in ((weight, given), (weight.abs(), given.abs())))
    allowed = 1e-6 * terms + (0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps * exact.abs() + 6e-8)
    assert y.shape == (index.numel(), 48) and y.dtype == x.dtype and bool(((y.double() - exact).abs() <= allowed).all())


# --- the product --------------------------------------------------------------------------------------------------------------


@each_format
@each_path
@each_dtype
def test_the_product_is_that_of_float64(name, path, dtype):
    for activations in (None, "mxint8") if name in ("mxint8", "mxfp6_e2m3", "mxfp4_e2m1") else (None,):
        for tokens, share in ((1, 1), (1, 3), (2, 2), (7, 1), (7, 3), (40, 2), (300, 2)):
            assert_near(matrix(name, activations), *routed(tokens, share, dtype))


@pytest.mark.parametrize("name", ["mxfp6_e2m3", *DENSE])
@pytest.mark.parametrize("index", [[[2, 2], [2, 2], [2, 2]], [[0, 4], [4, 0], [0, 4]], [[5, 1], [1, 5], [5, 5]], [[5, 5], [5, 5], [5, 5]], [[0], [1], [2]]], ids=str)
def test_experts_that_all_none_or_some_choose_and_numbers_of_no_expert(name, index, kernels):
    layer, index = matrix(name), torch.tensor(index)
    for x in (routed(3, 1)[0], routed(96, 1, k=3)[0].T):
        for chosen in (index, index.int(), index.T.contiguous().T):
            assert_near(layer, x, chosen)
        assert not layer(x, index)[index.reshape(-1) == 5].any()


def test_no_tokens_are_no_products_and_what_does_not_fit_is_refused(kernels):
    layer, (x, index), nothing = matrix("mxfp6_e2m3"), routed(4, 2), torch.zeros(0, 2, dtype=torch.int64)
    assert layer(x[:0], nothing).shape == (0, 48)
    assert mx.compress(moe()).model.layers[0].mlp.experts(torch.zeros(0, 64), nothing, torch.zeros(0, 2)).shape == (0, 64)
    for rows, chosen in ((x, index[:3]), (x, index.reshape(-1)[:2]), (x[:0], index), (x[None], index)):
        with pytest.raises(ValueError, match="rows are wanted, and as many experts for each"):
            layer(rows, chosen)


@each_path
@each_dtype
@pytest.mark.parametrize(("name", "activations"), [("mxfp6_e2m3", None), ("mxfp6_e2m3", "mxint8"), ("mxint8", "mxint8"), ("mxfp8_e4m3", None), ("bf16", None), ("fp32", None)])
def test_a_rows_bits_do_not_depend_on_others_or_their_experts_or_threads(name, activations, path, dtype):
    layer, (x, index) = matrix(name, activations), routed(70, 2, dtype)
    with torch.no_grad():
        alone = torch.stack([layer(x[i : i + 1], index[i : i + 1]) for i in range(70)])
        for seed in range(4):
            others, kept = torch.randint(0, 6 if seed else 1, (70, 2), generator=generator(seed)), torch.rand(70, generator=generator(seed)) < 0.3
            with torch_threads(1 + seed % 2):
                assert torch.equal(layer(x, torch.where(kept[:, None], index, others)).view(70, 2, 48)[kept], alone[kept])
                assert torch.equal(layer(x[kept], index[kept]).view(-1, 2, 48), alone[kept])


@each_format
@each_dtype
def test_gradients_are_those_of_dense_weights(name, dtype, kernels):
    layer, (x, index) = matrix(name), routed(7, 2, dtype)
    index[3] = 5
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weight = torch.cat([layer.dequantize(dtype).view(layer.shape), torch.zeros(1, 48, 96, dtype=dtype)])[index.reshape(-1)]
    layer(mine, index).square().sum().backward()
    torch.bmm(weight, theirs.repeat_interleave(2, 0)[..., None]).square().sum().backward()
    near = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=near, atol=near)


def test_tensors_without_numbers_have_shapes():
    model = mx.compress(moe(), skip=("0.mlp.experts.down_proj",))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, index = mode.from_tensor(torch.ones(3, 32)), mode.from_tensor(torch.ones(3, 2, dtype=torch.int64))
        assert model.model.layers[1].mlp.experts.mx_down_proj(x, index).shape == (6, 64)
    assert model.to("meta")(input_ids=IDS.to("meta")).logits.shape == (1, 7, 61)


# --- whole models -------------------------------------------------------------------------------------------------------------

_MOE_LAYER = dict(layers_block_type=["mamba", "attention", "moe"], n_routed_experts=4, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32)
_KNOWN = {family.name: replace(family, settings=family.settings | _MOE_LAYER) if family.name == "Nemotron-H" else family for family in FAMILIES}
WANTED = ["Qwen3-MoE", "Qwen2-MoE", "Mixtral", "GPT-OSS", "GLM-4-MoE", "DeepSeek-V2", "DeepSeek-V3", "OLMoE", "Granite-MoE", "Aria (text)", "Phi-MoE", "Nemotron-H", "Zaya", "HY v4",
          "ERNIE 4.5 MoE", "Hunyuan-MoE", "Jamba", "LFM2-MoE", "Qwen3-Next", "Granite 4 (hybrid)", "Inkling (text)", "MiniMax-M2", "Lara mini", "dots1", "Laguna"]
FAMILY = {name: _KNOWN[name] for name in WANTED if name in _KNOWN}


def wide(name: str):
    """The family's model with experts whose sizes go into tiles, and biases that count."""
    settings = FAMILY[name].settings
    sizes = {key: size for key, size in {"moe_intermediate_size": 32, "intermediate_size": 64}.items() if key in settings}
    model = replace(FAMILY[name], settings=settings | sizes | {"tie_word_embeddings": False}).model("eager" if name in ("GPT-OSS", "HY v4") else "sdpa")
    [nn.init.normal_(parameter, 0.0, 0.3) for key, parameter in model.named_parameters() if key.endswith("bias")]
    if not any(map(expert_projections, model.modules())):
        pytest.skip("this version of transformers holds its experts otherwise")
    return model


@pytest.mark.parametrize("family", FAMILY)
def test_tiles_give_the_stock_logits_and_mx_those_of_its_dense_copy_and_both_go_back(family):
    model = wide(family)
    count, tiles = sum(len(expert_projections(module)) for module in model.modules()), mx.to_tiles(copy.deepcopy(model))
    torch.testing.assert_close(logits(tiles), logits(model), rtol=3e-5, atol=3e-5)
    for packed in (tiles, mx.compress(copy.deepcopy(model))):
        assert len(list(matrices(packed))) == count > 0
        dense = mx.dequantize(copy.deepcopy(packed))
        torch.testing.assert_close(logits(packed), logits(dense), rtol=3e-5, atol=3e-5)
        assert [type(module) for module in dense.modules()] == [type(module) for module in model.modules()]
        assert {name: p.shape for name, p in dense.named_parameters()} == {name: p.shape for name, p in model.named_parameters()}
    assert same(mx.dequantize(tiles), model)


def test_norms_after_experts_count():
    muse = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    config = muse.MuseSparkTextConfig(num_local_experts=5, moe_hidden_size=64, moe_intermediate_size=32)
    config._experts_implementation, model = "eager", nn.ModuleDict({"experts": muse.MuseSparkExperts(config)})
    [nn.init.normal_(parameter) for parameter in model.parameters()]
    (x, index), weights = routed(7, 2, k=64), torch.rand(7, 2, generator=generator(0))
    with torch.no_grad():
        expected = model["experts"](x, index, weights)
        torch.testing.assert_close(mx.compress(model, "fp32")["experts"](x, index, weights), expected, rtol=1e-5, atol=1e-5)


def test_what_is_skipped_or_has_a_format_of_its_own_and_what_the_report_says():
    dense, formats = moe().requires_grad_(False), ["mxfp4_e2m1", "mxint8", "mxfp4_e2m1", "mxfp4_e2m1"]
    model = mx.compress(moe(), layer_formats={"experts": "mxfp4_e2m1", "0.mlp.experts.down_proj": "mxint8"}, lm_head="mxint8")
    report = {layer.name: layer for layer in model.mx_report.layers}
    assert report["model.layers.0.self_attn.q_proj"].format == "mxfp6_e2m3" and report["lm_head"].format == "mxint8"
    for name, format in zip(NAMES, formats):
        whole, row = dense.get_parameter(name), report[name]
        packed = quantize(whole.flatten(0, 1), format)
        error = packed.dequantize(torch.float64) - whole.flatten(0, 1)
        assert (row.format, row.shape, row.bytes_before, row.bytes_after) == (format, tuple(whole.shape), whole.numel() * 4, packed.nbytes)
        assert (row.max_error, row.sqnr_db) == pytest.approx((float(error.abs().max()), float(10 * torch.log10(whole.double().square().sum() / error.square().sum()))))
    assert not any(layer.sqnr_db for layer in mx.compress(moe(), measure=False).mx_report.layers)
    skipped, half = mx.compress(moe(), skip=("experts",)), mx.compress(moe(), skip=("down_proj",))
    assert not list(matrices(skipped)) and type(skipped.model.layers[0].mlp.experts) is type(dense.model.layers[0].mlp.experts)
    assert {name for _, name, _ in matrices(half)} == {"gate_up_proj"} and {layer.note for layer in half.mx_report.layers if layer.name == NAMES[1]} == {"skipped on request"}
    torch.testing.assert_close(logits(half), logits(mx.dequantize(copy.deepcopy(half))), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sizes", "name", "note"), [
    ({"moe_intermediate_size": 40}, "down_proj", "40 inputs are no multiple of 32"),
    ({"moe_intermediate_size": 36}, "gate_up_proj", "72 outputs of an expert are no multiple of 16"),
    ({"hidden_size": 72}, "gate_up_proj", "72 inputs are no multiple of 32"),
    ({"hidden_size": 72}, "down_proj", "72 outputs of an expert are no multiple of 16"),
])  # fmt: skip
def test_sizes_that_do_not_go_into_tiles_stay_dense_and_say_why(sizes, name, note):
    model = moe(**sizes)
    tiles = mx.to_tiles(copy.deepcopy(model))
    assert {layer.name: layer.note for layer in tiles.mx_report.layers if layer.format is None}[f"model.layers.1.mlp.experts.{name}"] == note
    torch.testing.assert_close(logits(tiles), logits(model), rtol=1e-5, atol=1e-5)
    assert same(mx.dequantize(tiles), model)


def test_a_nan_is_named_and_the_projection_can_be_left_out(tmp_path):
    model, name = moe(), NAMES[3]
    model.get_parameter(name).data[2, 3, 4] = float("nan")
    model.save_pretrained(tmp_path)
    for attempt in (lambda: mx.compress(model), lambda: read(tmp_path, quantization_config=mx.MXConfig())):
        with pytest.raises(ValueError, match=f"^{name} holds a NaN or an infinity.*skip="):
            attempt()
    for left in (read(tmp_path, quantization_config=mx.MXConfig(skip=[name])), mx.compress(model, skip=(name,))):
        assert len(list(matrices(left))) == 3


def test_the_implementation_that_the_config_names_does_not_matter():
    model, expected = moe(), logits(mx.compress(moe()))
    for name in ("batched_mm", "grouped_mm", "eager"):
        model.set_experts_implementation(name)
        assert torch.equal(logits(mx.compress(copy.deepcopy(model))), expected)
    mx.compress(model).set_experts_implementation("grouped_mm")
    assert torch.equal(logits(model), expected)


# --- files and copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name in FAMILY if name in ("Qwen3-MoE", "Mixtral", "GPT-OSS", "Aria (text)", "Nemotron-H", "DeepSeek-V3")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_files_hold_the_same_bits_and_compressing_on_the_way_gives_them_too(family, dtype, tmp_path):
    def names(folder) -> set[str]:
        return {name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}

    wide(family).save_pretrained(tmp_path / "dense")
    dense = read(tmp_path / "dense", dtype=dtype)
    packed, on_the_way = mx.compress(copy.deepcopy(dense)), read(tmp_path / "dense", dtype=dtype, quantization_config=mx.MXConfig())
    assert same(on_the_way, packed) and on_the_way.mx_report.to_json() == packed.mx_report.to_json()
    packed.save_pretrained(tmp_path / "mx", max_shard_size="20KB")
    assert same(read(tmp_path / "mx", dtype=dtype), packed) and read(tmp_path / "mx").config.quantization_config.version == 3
    back = mx.load(AutoModelForCausalLM, tmp_path / "mx", dequantize=True, dtype=dtype)
    assert same(back, mx.dequantize(packed)) and back.state_dict().keys() == dense.state_dict().keys()
    back.save_pretrained(tmp_path / "back")
    assert names(tmp_path / "back") == names(tmp_path / "dense")


def edit(folder, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_checkpoints_of_older_versions_keep_their_dense_experts(tmp_path):
    model = mx.compress(moe(), skip=("experts",))
    model.save_pretrained(tmp_path)
    assert model.config.quantization_config.version == 1
    edit(tmp_path, skip=[])
    again = read(tmp_path)
    again.save_pretrained(tmp_path / "again")
    assert same(again, model) and same(read(tmp_path / "again"), model) and not list(matrices(again))
    assert same(mx.load(AutoModelForCausalLM, tmp_path, dequantize=True), mx.dequantize(model))


@pytest.mark.parametrize("changes", [{"skip": ["experts"]}, {"version": 1}], ids=str)
def test_packed_experts_that_an_edited_config_takes_for_dense_are_refused(changes, tmp_path):
    mx.compress(moe()).save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    for attempt in (read, partial(mx.load, AutoModelForCausalLM, dequantize=True)):
        with pytest.raises(ValueError, match=rf"^{NAMES[0]} is packed in the checkpoint, but dense by the config"):
            attempt(tmp_path)


def through_a_file(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_a_file], ids=["copy", "pickle", "file"])
def test_copies_and_states(copied, kernels):
    model, other = (mx.compress(moe(seed=seed), skip=("0.mlp.experts.down_proj",)) for seed in (0, 3))
    assert same(copied(model), model)
    for assign in (False, True):
        other.load_state_dict(copied(model).state_dict(), assign=assign)
        assert same(other, model)
    with pytest.raises(RuntimeError, match="mx_gate_up_proj"):
        model.load_state_dict(moe().state_dict())
    assert logits(other.to(torch.bfloat16)).dtype == torch.bfloat16 and same(mx.dequantize(other, "float32"), mx.dequantize(model).to(torch.bfloat16).float())


def test_a_copy_gives_the_same_where_there_are_no_kernels(monkeypatch):
    model = mx.to_tiles(moe())
    data, expected = pickle.dumps(model), logits(model)
    monkeypatch.setattr(cpu, "library", lambda: None)
    for other in (pickle.loads(data), mx.to_tiles(moe())):
        torch.testing.assert_close(logits(other), expected, rtol=1e-5, atol=1e-5)
        assert same(mx.dequantize(other), moe())


# --- compilers, gradients, adapters -------------------------------------------------------------------------------------------


@needs_the_compiler
@each_half
def test_the_whole_model_is_one_graph_that_learns_the_same(skip):
    torch._dynamo.reset()
    models = [mx.compress(moe(num_hidden_layers=1), skip=skip) for _ in range(2)]
    models[0].forward = torch.compile(models[0].forward, fullgraph=True, backend="aot_eager")
    for ids in (IDS, IDS[:, :3]):
        torch.testing.assert_close(*(logits(model) for model in models), rtol=1e-5, atol=1e-5)
        [model(input_ids=ids, use_cache=False).logits.square().mean().backward() for model in models]
    grads = [{name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in models]
    assert grads[0].keys() == grads[1].keys() and any("experts" in name for name in grads[0]) is bool(skip)
    [torch.testing.assert_close(grads[0][name], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max())) for name, grad in grads[1].items()]


@each_half
def test_inputs_have_the_gradients_of_the_dense_copy_and_autocast_is_heeded(skip, kernels):
    model, found = mx.compress(moe(), skip=skip), []
    for each in (model, mx.dequantize(copy.deepcopy(model))):
        x = torch.randn(1, 9, 64, generator=generator(0)).requires_grad_()
        each(inputs_embeds=x, use_cache=False).logits.square().mean().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4 * float(found[0].abs().max()))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(input_ids=IDS, use_cache=False).logits
        out.float().square().mean().backward()
    assert out.dtype == torch.bfloat16 and torch.allclose(out.float(), logits(model), atol=0.3)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
def test_adapters_on_all_linear_layers_learn_beside_packed_experts():
    model = get_peft_model(mx.compress(moe()), LoraConfig(r=4, target_modules="all-linear"))
    optimizer, losses = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01), []
    for _ in range(5):
        losses.append(model(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


# --- speculation --------------------------------------------------------------------------------------------------------------

WAYS = {"tiles": mx.to_tiles, "MX": mx.compress, "half": partial(mx.compress, skip=("down_proj",))}


@pytest.mark.parametrize("family", [name for name in FAMILY if name in ("Qwen3-MoE", "GPT-OSS", "Granite 4 (hybrid)")])
@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_is_plain_generates(family, way):
    model, rows = WAYS[way](wide(family)), repetitive(20, 13, 7)
    expected = plain(model, rows)
    drafts = [PromptLookupDraft(), mx.compress(perturbed(wide(family)), "mxfp4_e2m1")]
    drafts += [EarlyExitDraft(model, 1), KnowingTreeDraft([row + text for row, text in zip(rows, expected)])] if FAMILY[family].trees else []
    assert all(generated(speculate(model, rows, draft), rows) == expected for draft in drafts)
    assert generated(speculate(model, rows[:1], k="auto"), rows[:1]) == expected[:1]
    assert [len(row) for row in generated(speculate(model, rows, seed=0, do_sample=True), rows)] == [20] * 3


@pytest.mark.skipif("GPT-OSS" not in FAMILY, reason="not in this transformers")
def test_biases_of_packed_experts_are_no_matrices_that_torch_multiplies_by(monkeypatch):
    monkeypatch.setattr(passes, "LARGE", 100)
    assert not passes._is_large(mx.compress(wide("GPT-OSS")).model.layers[0].mlp.experts)
    assert passes._is_large(mx.compress(wide("GPT-OSS"), skip=("down_proj",)).model.layers[0].mlp.experts)


@needs_the_compiler
def test_compiled_greedy_text_is_plain_generates(strict):
    model, rows = mx.compress(moe(), skip=("0.mlp.experts.down_proj",)), repetitive(20, 13)
    assert generated(speculate(model, rows, PromptLookupDraft(), speculative={"compile": True}), rows) == plain(model, rows)


@pytest.mark.parametrize(("device_map", "dense"), [("cpu", False), ({"": "cpu"}, False), (None, False), ({"": 0}, True), ("cuda:1", True), ({"": "cpu", "model.layers.1": 0}, "1")], ids=str)
def test_experts_that_a_device_map_sends_to_a_gpu_stay_dense(device_map, dense):
    """They have no kernel there."""
    choices = leave_experts_dense(plan(moe(), "mxfp6_e2m3", (), None), device_map)
    left = {choice.name for choice in choices if choice.reason == ON_GPU}
    assert left == {f"model.layers.{i}.mlp.experts.{name}_proj" for i in range(2) for name in ("gate_up", "down") if dense is True or dense == str(i)}
    assert left <= set(recorded(choices, ()))
