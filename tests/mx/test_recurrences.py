"""Kernels of layers that carry states: transformers' numbers but for rounding, one token's bits always the same, and the texts of plain generate."""

from __future__ import annotations

import copy
import pickle
from importlib import import_module

import pytest
import torch
from transformers import CONFIG_MAPPING, DynamicCache

from hf_specdec import mx
from hf_specdec.cached_model import CachedModel
from hf_specdec.caches import CACHE, GOES_ON
from hf_specdec.drafts import PromptLookupDraft
from hf_specdec.mx.kernels import cpu, recurrence
from hf_specdec.mx.linear import MXLinear
from hf_specdec.mx.readers import SHORT_CUTS
from hf_specdec.mx.recurrences import OTHERS, KernelStates, steady_softplus
from hf_specdec.proposal import Proposal

from ..architectures import STATEFUL
from ..helpers import generated, perturbed, plain, prompts, speculate

pytestmark = pytest.mark.skipif(cpu.library() is None or not GOES_ON, reason="no kernels here, or states that nothing goes on from")
PATHS = [path for i, path in enumerate(cpu.PATHS) if cpu.library() is not None and cpu.library().mx_has_path(i)]
every_path = pytest.mark.parametrize("path", PATHS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = [(1, 1, 2, 4, 16, 24), (2, 7, 3, 3, 40, 33), (3, 40, 2, 4, 20, 64), (1, 3, 1, 1, 256, 7)]  # rows, tokens, groups, heads, numbers of a key, of a value
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
HYBRIDS = ("Qwen3.5 (text)", "Granite 4 (hybrid)", "Mamba 2", "Falcon-H1", "Kimi Linear", "Nemotron-H", "LFM2", "Mamba")


@pytest.fixture(autouse=True)
def forced(request):
    if "path" in request.fixturenames:
        cpu.set_kernel_path(request.getfixturevalue("path"))
    with torch.no_grad():
        yield
    cpu.set_kernel_path(None)


def theirs(kind: str, name: str):
    return getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), name)


def never(*args, **kwargs):
    raise AssertionError("the kernel did not take it")


def near(found, wanted, dtype) -> None:
    """Float32 sums in another order; in bfloat16 what comes out may be the next number."""
    torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=2e-2 if dtype == torch.bfloat16 else 1e-4)


def numbers(*shape: int, dtype=torch.float32, seed: int = 0, split: bool = True) -> torch.Tensor:
    """[B, L, H, D] as layers have it: of one tensor with other parts, token after token or (split=False) channel after channel."""
    made = torch.randn(*shape[:2], 3 + shape[2] * shape[3], generator=torch.Generator().manual_seed(seed)).to(dtype)
    made = made if split else made.transpose(1, 2).contiguous().transpose(1, 2)
    return made[..., 3:].unflatten(-1, shape[2:])


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def delta_inputs(shape, dtype, split: bool = True, by_channel: bool = False) -> dict:
    rows, length, groups, heads, nk, nv = shape
    groups = heads if by_channel else groups
    gate = -uniform(rows, length, heads, *((nk,) if by_channel else ()), seed=4)
    return dict(query=numbers(rows, length, groups, nk, dtype=dtype, split=split), key=numbers(rows, length, groups, nk, dtype=dtype, seed=1, split=split),
                value=numbers(rows, length, heads, nv, dtype=dtype, seed=2, split=split), g=gate, beta=uniform(rows, length, heads, seed=5).to(dtype))


def space_inputs(shape, dtype, split: bool = True) -> tuple:
    rows, length, groups, heads, n, p = shape
    return (numbers(rows, length, heads, p, dtype=dtype, split=split), numbers(rows, length, 1, heads, seed=3)[:, :, 0].to(dtype), -uniform(heads),
            numbers(rows, length, groups, n, dtype=dtype, seed=1, split=split), numbers(rows, length, groups, n, dtype=dtype, seed=2, split=split))


@every_path
@every_dtype
@every_shape
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_the_delta_rule_is_that_of_transformers(path, dtype, shape, norm, split):
    inputs, name = delta_inputs(shape, dtype, split), "torch_recurrent_gated_delta_rule"
    if not norm:
        inputs["key"] = inputs["key"] / 10
    state = torch.randn(shape[0], shape[3], *shape[4:], generator=torch.Generator().manual_seed(7))
    for before in (None, state):
        given = dict(initial_state=before, output_final_state=True, use_qk_l2norm_in_kernel=norm)
        repeated = {part: inputs[part].repeat_interleave(shape[3] // shape[2], dim=2) for part in ("query", "key")}  # before transformers 5.24 by its callers
        (out, after), (wanted, last) = OTHERS[name](never)(**inputs, **given), theirs("qwen3_5", name)(**inputs | repeated, **given)
        assert out.dtype == wanted.dtype and after.dtype == torch.float32
        near(out, wanted, dtype)
        near(after, last, torch.float32)
    assert OTHERS[name](never)(**inputs, use_qk_l2norm_in_kernel=norm)[1] is None


@every_path
@every_dtype
@every_shape
def test_gates_of_channels_too(path, dtype, shape):
    if "kimi_linear" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no Kimi Linear")
    inputs, name = delta_inputs(shape, dtype, by_channel=True), "recurrent_kimi_delta_attention"
    state = torch.randn(shape[0], shape[3], *shape[4:], generator=torch.Generator().manual_seed(7))
    given = dict(initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for found, wanted in zip(OTHERS[name](never)(**inputs, **given), theirs("kimi_linear", name)(**inputs, **given)):
        near(found, wanted, dtype)


@every_path
@every_dtype
@every_shape
@pytest.mark.parametrize("split", [True, False])
def test_state_spaces_are_those_of_transformers(path, dtype, shape, split):
    inputs, name, heads = space_inputs(shape, dtype, split), "mamba2_chunk_scan", shape[3]
    state = torch.randn(shape[0], heads, shape[5], shape[4], generator=torch.Generator().manual_seed(7))
    for before, skip, bias, limits in ((None, None, None, (0.0, float("inf"))), (state, uniform(heads).to(dtype), uniform(heads, seed=1).to(dtype), (0.5, 1.0))):
        given = dict(chunk_size=8, D=skip, z=None, initial_states=before, return_final_states=True, dt_bias=bias, dt_softplus=True, dt_limit=limits)
        (out, after), (wanted, last) = OTHERS[name](never)(*inputs, **given), theirs("mamba2", name)(*inputs, **given)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=2e-2 if dtype == torch.bfloat16 else 1e-3)
        near(after, last, torch.float32)


@every_path
@every_dtype
@pytest.mark.parametrize("gated", [False, True])
def test_one_step_of_a_state_space_changes_its_state_in_place(path, dtype, gated):
    shape, name = (2, 1, 2, 4, 20, 24), "mamba2_selective_state_update"
    gate = numbers(2, 1, 4, 24, dtype=dtype, seed=9)[:, 0] if gated else None
    x, dt, decay, b, c = space_inputs(shape, dtype)
    skip, bias = uniform(4).to(dtype), uniform(4, seed=1).to(dtype)
    given = (dt.transpose(1, 2).expand(-1, -1, 24), decay[:, None, None].expand(-1, 24, 20), b[:, 0], c[:, 0], skip[:, None].expand(-1, 24))
    states = [torch.randn(2, 4, 24, 20, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    found, wanted = (step(state, x[:, 0], *given, z=gate, dt_bias=bias[:, None].expand(-1, 24), dt_softplus=True)
                     for step, state in zip((OTHERS[name](never), theirs("mamba2", name)), states))
    near(states[0], states[1], dtype)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=3e-2 if dtype == torch.bfloat16 else 1e-4, atol=6e-2 if dtype == torch.bfloat16 else 1e-4)


@every_path
@every_dtype
@pytest.mark.parametrize(("channels", "length", "taps"), [(64, 1, 4), (77, 12, 4), (5, 33, 3), (200, 7, 1), (16, 40, 16)])
@pytest.mark.parametrize("silu", [True, False])
def test_convolutions_are_those_of_torch(path, dtype, channels, length, taps, silu):
    x, weight = numbers(2, length, 1, channels, dtype=dtype)[:, :, 0].transpose(1, 2), numbers(1, channels, 1, taps, dtype=dtype, seed=1)[0, :, 0]
    for bias in (None, uniform(channels).to(dtype)):
        wanted = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=channels)[..., :length]
        wanted = torch.nn.functional.silu(wanted) if silu else wanted
        for own in (x, x.contiguous()):
            near(OTHERS["causal_conv1d_fn"](never)(own, weight, bias, activation="silu" if silu else None, seq_idx=None), wanted, dtype)


def bits(parts) -> list[torch.Tensor]:
    return [part.view(torch.int32 if part.dtype == torch.float32 else torch.int16) for part in parts]


@every_dtype
@every_shape
def test_a_token_has_the_same_bits_alone_and_among_others_and_by_any_instructions(dtype, shape):
    rows, length, groups, heads, nk, nv = shape
    found = {}
    for path in PATHS:
        cpu.set_kernel_path(path)
        for by_channel in (False, True):
            inputs = delta_inputs(shape, dtype, by_channel=by_channel)
            rule = OTHERS["torch_chunk_gated_delta_rule"](never)
            whole, state, outs = rule(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True), None, []
            for t in range(length):
                out, state = rule(**{name: part[:, t : t + 1] for name, part in inputs.items()}, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
                outs.append(out)
            found.setdefault(f"delta {by_channel}", []).extend([whole, (torch.cat(outs, dim=1), state)])
        x, dt, decay, b, c = space_inputs(shape, dtype)
        scan, state, outs, skip = OTHERS["mamba2_chunk_scan"](never), None, [], uniform(heads)
        given = dict(chunk_size=8, D=skip, return_final_states=True, dt_softplus=True)
        whole = scan(x, dt, decay, b, c, **given)
        for t in range(length):
            out, state = scan(*(part[:, t : t + 1] for part in (x, dt)), decay, *(part[:, t : t + 1] for part in (b, c)), initial_states=state, **given)
            outs.append(out)
        found.setdefault("space", []).extend([whole, (torch.cat(outs, dim=1), state)])
        signal, weight = x.flatten(2).transpose(1, 2), numbers(1, heads * nv, 1, 4, dtype=dtype)[0, :, 0]
        conv = OTHERS["causal_conv1d_fn"](never)
        padded = torch.nn.functional.pad(signal, (3, 0))
        found.setdefault("conv", []).append((conv(signal, weight, activation="silu"),))
        found["conv"].append((torch.cat([conv(padded[..., t : t + 4], weight, activation="silu")[..., 3:] for t in range(length)], dim=-1),))
    for name, runs in found.items():
        for other in runs[1:]:
            assert all(torch.equal(*pair) for pair in zip(bits(runs[0]), bits(other))), name


def test_what_there_is_no_kernel_for_goes_to_transformers():
    asked = []

    def original(*args, **kwargs):
        asked.append(kwargs)
        return "transformers"

    inputs = delta_inputs(SHAPES[0], torch.float32)
    half = {name: part.half() for name, part in inputs.items()}
    wide = delta_inputs((1, 2, 1, 1, recurrence.MOST + 1, 4), torch.float32)
    rule, conv = OTHERS["torch_chunk_gated_delta_rule"](original), OTHERS["causal_conv1d_fn"](original)
    for given in (half, wide, {**inputs, "query": inputs["query"].bfloat16()}):
        assert rule(**given, chunk_size=4) == "transformers" and asked.pop()["chunk_size"] == 4
    with torch.enable_grad():
        assert rule(**inputs) == "transformers"
    x, weight = torch.ones(1, 4, 5), torch.ones(4, 3)
    assert conv(x, weight, activation="gelu") == conv(x, torch.ones(4, recurrence.TAPS + 1)) == conv(x.bfloat16(), weight) == "transformers"
    x, dt, decay, b, c = space_inputs(SHAPES[1], torch.float32)
    assert OTHERS["mamba2_chunk_scan"](original)(x, dt, decay, b, c, z=x, chunk_size=8) == "transformers"


# --- models ---------------------------------------------------------------------------------------------------------------

def draft_of(kind: str):
    return perturbed(next(family for family in STATEFUL if family.name == kind).model("eager", 0), 0.02)


def tiled(kind: str, dtype=torch.float32, format: str | None = None, attn: str = "eager"):
    family = next(family for family in STATEFUL if family.name == kind)
    model = family.model(attn, 0).to(dtype)
    return mx.to_tiles(model) if format is None else mx.compress(model, format, measure=False)


here = [kind for kind in HYBRIDS if any(family.name == kind and family.kind in CONFIG_MAPPING for family in STATEFUL)]


@pytest.mark.parametrize("kind", here)
@pytest.mark.parametrize("format", [None, "mxfp6_e2m3"])
def test_texts_are_those_of_plain_generate(kind, format):
    model, rows = tiled(kind, format=format), prompts(12, 1, 20, seed=5)
    expected = [plain(model, [row], max_new_tokens=24)[0] for row in rows]
    for draft in (draft_of(kind), PromptLookupDraft()):
        assert generated(speculate(model, rows, draft, k=4, max_new_tokens=24), rows) == expected
        assert generated(speculate(model, rows[:1], draft, k=4, max_new_tokens=24), rows[:1]) == expected[:1]


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that are called."""
    made, library = [], cpu.library()
    for name in ("mx_delta", "mx_space", "mx_conv"):
        own = getattr(library, name)
        monkeypatch.setattr(library, name, lambda *given, own=own, name=name: made.append(name) or own(*given))
    return made


@pytest.mark.parametrize("kind", [kind for kind in here if kind != "Mamba"])
def test_plain_generate_runs_the_kernels_too_until_the_model_is_dense_again(kind, calls):
    model, (row,) = tiled(kind), prompts(12)
    expected = plain(mx.dequantize(tiled(kind)), [row], max_new_tokens=8)
    calls.clear()
    assert plain(model, [row], max_new_tokens=8) == expected and set(calls) >= ({"mx_conv"} if kind == "LFM2" else {"mx_conv", "mx_delta"} if "mx_delta" in calls else {"mx_space"})
    assert len(calls) >= 8
    mx.dequantize(model)
    calls.clear()
    assert generated(speculate(model, [row], PromptLookupDraft(), k=3, max_new_tokens=8), [row]) == expected and not calls


@pytest.mark.parametrize("kind", [kind for kind in here if kind != "Mamba"])
def test_copies_and_pickles_run_the_kernels_and_keep_their_names(kind, calls):
    model, (row,) = tiled(kind), prompts(12)
    expected = plain(model, [row], max_new_tokens=8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls.clear()
        assert plain(other, [row], max_new_tokens=8) == expected and calls
        assert [type(own).__qualname__ for own in other.modules()] == [type(own).__qualname__ for own in model.modules()]
        mx.dequantize(other)
        assert {type(own) for own in other.modules()} == {type(own) for own in mx.dequantize(copy.deepcopy(model)).modules()}


def test_gradients_go_through_transformers_functions(calls):
    model, ids = tiled(here[0]), torch.tensor(prompts(12))
    with torch.enable_grad():
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=embeds, use_cache=False).logits.sum().backward()
    assert embeds.grad.abs().sum() > 0 and not calls


@pytest.mark.parametrize("kind", [kind for kind in here if kind not in ("LFM2", "Mamba")])
def test_in_bfloat16_the_states_after_a_rejection_have_the_bits_of_those_without_it(kind):
    """Of the first layer, whose inputs are the same."""
    model, (row,) = tiled(kind, torch.bfloat16), prompts(9)
    states = []
    for rejected in ([3, 5, 7], [8]):
        cached = CachedModel(model, 64)
        cached.score([row[:5]])
        cached.commit([1])
        cached.score([row[:6]], Proposal.from_lists([row[6:] + rejected], torch.device("cpu")))
        cached.commit([4])
        states.append(next(recurrent[0] for _, recurrent in cached.states.kept[-1].states if recurrent.get(0) is not None))
    assert torch.equal(*states)


def test_of_a_model_with_dense_layers_too():
    model, rows = next(family for family in STATEFUL if family.name == here[0]).model("eager", 0), prompts(12, 7)
    mx.compress(model, "fp32", skip=["in_proj_b", "in_proj_a"], measure=False)
    assert generated(speculate(model, rows, PromptLookupDraft(), k=3, max_new_tokens=12), rows) == [plain(model, [row], max_new_tokens=12)[0] for row in rows]


@pytest.mark.parametrize("kind", [kind for kind in ("Mamba 2", "Granite 4 (hybrid)", "Falcon-H1", "Mamba") if kind in here])
def test_what_takes_weights_out_of_layers_in_training_does_nothing(kind, monkeypatch):
    """With mamba_ssm on a GPU transformers hands `out_proj.weight` to one function for all; compressed layers are called."""
    model, ids = tiled(kind, format="mxfp6_e2m3"), torch.tensor(prompts(12))
    layer = next(part for part in model.modules() if isinstance(part, KernelStates))
    assert isinstance(layer.out_proj, MXLinear)
    for name in set(SHORT_CUTS) & set(vars(import_module(type(layer).__module__))):
        monkeypatch.setattr(f"{type(layer).__module__}.{name}", never)
    expected = model(input_ids=ids, use_cache=False).logits
    with torch.enable_grad():
        torch.testing.assert_close(model.train()(input_ids=ids, use_cache=False).logits, expected, atol=1e-3, rtol=1e-3)


@every_dtype
def test_time_steps_have_the_same_bits_whatever_is_around_them(dtype):
    x = (4 * torch.randn(203, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = steady_softplus(x)
    torch.testing.assert_close(whole, torch.nn.functional.softplus(x))
    assert all(torch.equal(steady_softplus(x[i : i + n]), whole[i : i + n]) for n in (1, 7, 64) for i in range(0, 203 - n, 3))


@pytest.mark.parametrize(("kind", "attn"), [(kind, attn) for kind in here for attn in ("eager", "sdpa") if kind not in ("Mamba", "Kimi Linear") and (kind, attn) != ("Mamba 2", "sdpa")])
def test_in_bfloat16_verification_has_the_bits_of_plain_decoding(kind, attn):
    """All layers of it; Kimi Linear's router sums as torch likes."""
    model, (row,) = tiled(kind, torch.bfloat16, attn=attn), prompts(20)
    assert attn == "eager" or model.config._attn_implementation == "hf_specdec_few"
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([row[:12]]), **{CACHE: cache}, use_cache=True)
    plainly = torch.cat([model(input_ids=torch.tensor([[token]]), **{CACHE: cache}, use_cache=True).logits for token in row[12:]], dim=1)
    cached = CachedModel(model, 64)
    cached.score([row[:12]])
    cached.commit([1])
    assert torch.equal(cached.score([row[:13]], Proposal.from_lists([row[13:]], torch.device("cpu"))), plainly)
