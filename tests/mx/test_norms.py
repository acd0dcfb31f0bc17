"""RMS norms in one call: the numbers of the model's own norms but for rounding, a row's bits always the same, and nothing that a user of the model can see."""

from __future__ import annotations

import copy
import importlib
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from hf_specdec import mx
from hf_specdec.drafts import PromptLookupDraft
from hf_specdec.mx.beneath import use_own_classes
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.norms import KINDS, KernelNorm, norm_kind, rms_norm, use_kernel_norms

from ..helpers import build, generated, plain, repetitive, speculate
from .models import SIZE

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no kernels here")
GEMMA = dict(SIZE, head_dim=16, sliding_window=8, query_pre_attn_scalar=16)
NORMS = {  # module of transformers, class, how it is made
    "llama.modeling_llama.LlamaRMSNorm": "rounded",
    "qwen3.modeling_qwen3.Qwen3RMSNorm": "rounded",
    "mistral.modeling_mistral.MistralRMSNorm": "rounded",
    "t5.modeling_t5.T5LayerNorm": "rounded",
    "gemma.modeling_gemma.GemmaRMSNorm": "one more",
    "gemma2.modeling_gemma2.Gemma2RMSNorm": "one more",
    "gemma3.modeling_gemma3.Gemma3RMSNorm": "one more",
    "olmo2.modeling_olmo2.Olmo2RMSNorm": "wide",
}
DTYPES = (torch.bfloat16, torch.float32)


def own_norm(name: str, size: int = 48) -> nn.Module:
    module, _, kind = name.rpartition(".")
    norm = getattr(importlib.import_module(f"transformers.models.{module}"), kind)(size, eps=1e-5)
    norm.weight.data = torch.randn(size, generator=torch.Generator().manual_seed(1))
    return norm.requires_grad_(False)


def numbers(*shape: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compressed(kind: str = "llama", dtype=torch.bfloat16, format: str = "bf16", **settings):
    model = build(kind, attn="eager" if kind.startswith("gemma") else "sdpa", **{**SIZE, **settings})
    return mx.compress(model.to(dtype), format, measure=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_the_kinds_of_norms_that_models_have(name, dtype):
    own = own_norm(name).to(dtype)
    assert KINDS[norm_kind(own)] == NORMS[name]
    for size in (1, 7, 48):
        x = 3 * numbers(size, 48, dtype=dtype)
        wanted, found = own(x), rms_norm(x, own.weight, 1e-5, norm_kind(own))
        assert found.dtype == dtype and torch.allclose(wanted.float(), found.float(), rtol=1e-2 if dtype == torch.bfloat16 else 2e-6, atol=1e-7)
        assert dtype == torch.float32 or (wanted != found).float().mean() < 0.02


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_the_result_is_that_of_float64_but_for_rounding(kind):
    x, weight = 5 * numbers(9, 100), numbers(100, seed=1)
    y = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    exact = y * (weight.double() + (KINDS[kind] == "one more"))
    assert ((rms_norm(x, weight, 1e-6, kind).double() - exact).abs() <= 3e-7 * exact.abs() + 1e-9).all()


class Shifted(nn.Module):
    """Not an RMS norm: the mean is taken away."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(48)), 1e-5

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Clamped(Shifted):
    def forward(self, x):
        wide = x.float().clamp(-20, 20)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class OtherEpsilon(Shifted):
    def forward(self, x):
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-3)).to(x.dtype)


class Gated(Shifted):
    def forward(self, x, gate=None):
        return x


class Failing(Shifted):
    def forward(self, x):
        raise KeyError("x")


@pytest.mark.parametrize("module", [Shifted(), Clamped(), OtherEpsilon(), Gated(), Failing(), nn.LayerNorm(48), nn.LayerNorm(48, bias=False), nn.Linear(48, 48),
                                    nn.Embedding(48, 3), nn.Identity()], ids=lambda module: type(module).__name__)
def test_what_is_no_rms_norm_is_left_alone(module):
    assert norm_kind(module) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 5, 16, 33, 576])
def test_a_row_has_the_same_bits_in_any_company_and_on_every_path(dtype, size):
    x, weight = numbers(70, size, dtype=dtype), numbers(size, dtype=dtype, seed=1)
    for kind in range(len(KINDS)):
        rows = []
        try:
            for path in mx.kernel_info()["available"]:
                mx.set_kernel_path(path)
                whole = rms_norm(x, weight, 1e-5, kind)
                rows.append(whole)
                assert torch.equal(whole, torch.cat([rms_norm(x[i : i + 1], weight, 1e-5, kind) for i in range(70)]))
                assert torch.equal(whole[3:].flip(0), rms_norm(x[3:].flip(0).contiguous(), weight, 1e-5, kind))
        finally:
            mx.set_kernel_path(None)
        assert all(torch.equal(rows[0], other) for other in rows[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_infinities_nans_and_nothing(dtype):
    weight = torch.ones(20, dtype=dtype)
    x = torch.zeros(4, 20, dtype=dtype)
    x[1, 3], x[2, 4], x[3] = torch.inf, torch.nan, 1.0
    found = rms_norm(x, weight, 1e-6, 0)
    assert not found[0].any() and found[1, 3].isnan() and not found[1, :3].any() and found[2].isnan().all() and torch.allclose(found[3].float(), torch.ones(20))
    assert rms_norm(x[:0], weight, 1e-6, 0).shape == (0, 20)


# --- in a model -----------------------------------------------------------------------------------------------------------------


def norms(model) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, KernelNorm)]


@pytest.mark.parametrize("kind, settings, count", [("llama", {}, 5), ("qwen3", dict(head_dim=16), 9), ("gemma2", GEMMA, 9), ("gpt_neox", {}, 0)])
def test_a_compressed_model_has_them_and_a_dense_one_has_not(kind, settings, count):
    model = compressed(kind, **settings)
    assert len(norms(model)) == count
    ids = numbers(1, 9).abs().mul(10).long()
    with torch.inference_mode():
        found = model(ids).logits
        use_own_classes(model)
        assert not norms(model)
        wanted = model(ids).logits
    assert torch.allclose(wanted.float(), found.float(), atol=0.05 * float(wanted.abs().max()))
    use_kernel_norms(model)
    assert len(norms(model)) == count
    assert not norms(mx.dequantize(model))


def test_names_classes_weights_and_hooks_stay():
    dense = build("llama", **SIZE).to(torch.bfloat16)
    kind, keys = type(dense.model.norm), list(dense.model.norm.state_dict())
    seen = []
    dense.model.norm.register_forward_hook(lambda *call: seen.append(1))
    model = mx.compress(dense, "bf16", measure=False)
    norm = model.model.norm
    assert isinstance(norm, kind) and type(norm).__name__ == kind.__name__ and list(norm.state_dict()) == keys and isinstance(norm, KernelNorm)
    with torch.inference_mode():
        model(torch.tensor([[1, 2]]))
    assert seen == [1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"])
def test_copies_and_pickles(copied):
    model = compressed()
    other, x = copied(model), torch.tensor([[1, 5, 7]])
    assert len(norms(other)) == len(norms(model)) and type(other.model.norm) is type(model.model.norm)
    with torch.inference_mode():
        before = model(x).logits
        assert torch.equal(other(x).logits, before)
        other.model.norm.weight.data.mul_(2)
        assert torch.equal(model(x).logits, before) and not torch.equal(other(x).logits, before)


def test_a_parametrised_norm_stays_one():
    model = compressed()
    parametrize.register_parametrization(model.model.norm, "weight", nn.Softplus())
    x = numbers(1, 3, SIZE["hidden_size"], dtype=torch.bfloat16)
    with torch.inference_mode():
        before = model.model.norm(x)
        mx.dequantize(model)
        assert torch.equal(model.model.norm(x), before) and parametrize.is_parametrized(model.model.norm)


def test_what_is_asked_of_the_models_own_norm_is_answered_by_it():
    """A keyword, an epsilon that is no float, weights of other shapes, and such as are elsewhere."""
    norm, x = compressed(dtype=torch.float32, format="fp32").model.norm, numbers(SIZE["hidden_size"], SIZE["hidden_size"])
    own = copy.deepcopy(norm)
    own.__class__ = norm.mx_own
    with torch.inference_mode():
        assert torch.allclose(norm(hidden_states=x), own(x), atol=1e-6)
        norm.variance_epsilon = own.variance_epsilon = 1
        assert torch.equal(norm(x), own(x))
        norm.variance_epsilon = own.variance_epsilon = 1e-5
        for shape in (x.shape, (), x.shape[-1:]):
            norm.weight = own.weight = nn.Parameter(numbers(*shape, seed=1))
            assert torch.allclose(norm(x), own(x), rtol=1e-5, atol=1e-6)
        norm.to("meta")
        with pytest.raises(RuntimeError):
            norm(x)


def test_a_method_that_was_kept_outlives_the_norms():
    """Hooks of accelerate keep a module's forward and put it back later."""
    model, x = compressed(), numbers(3, SIZE["hidden_size"], dtype=torch.bfloat16)
    kept = model.model.norm.forward
    mx.dequantize(model)
    with torch.inference_mode():
        assert torch.equal(kept(x), model.model.norm(x))


class Locked:
    def __init__(self):
        self.lock = threading.Lock()  # which cannot be copied

    def hook(self, *call):
        pass


class Named(Shifted):
    own = "mine"

    def __init__(self):
        super().__init__()
        self.kind = "rms"

    def forward(self, x):
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def test_hooks_and_attributes_of_a_norm_are_left_alone():
    dense = nn.Sequential(Named(), nn.Linear(64, 64)).requires_grad_(False)
    dense[0].register_forward_hook(Locked().hook)
    norm, x = mx.compress(dense, "fp32", measure=False)[0], numbers(3, 48)
    with torch.inference_mode():
        assert isinstance(norm, KernelNorm) and torch.allclose(norm(x), Named()(x), atol=1e-6)
        assert norm.kind == "rms" and norm.own == "mine"


def test_a_class_above_ours_sees_to_copies_itself():
    norm = compressed().model.norm
    other = copy.copy(norm)
    other.__class__ = type("Above", (type(norm),), {})
    assert type(copy.deepcopy(other)) is type(other)
    parametrize.register_parametrization(norm, "weight", nn.Softplus())
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(norm)


def test_a_pickle_is_read_where_there_are_no_kernels(monkeypatch):
    norm, x = compressed().model.norm, numbers(3, SIZE["hidden_size"], dtype=torch.bfloat16)
    stored = pickle.dumps(norm)
    monkeypatch.setattr(cpu, "library", lambda: None)
    with torch.inference_mode():
        assert type(pickle.loads(stored)) is norm.mx_own and pickle.loads(stored)(x).shape == x.shape


def test_where_something_looks_on_the_norm_is_the_models_own():
    norm = compressed(dtype=torch.float32, format="fp32").model.norm
    own = copy.deepcopy(norm)
    own.__class__ = norm.mx_own
    x = numbers(2, 3, SIZE["hidden_size"])
    assert torch.equal(torch.compile(norm, backend="eager", fullgraph=True)(x), own(x))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for module, given in zip((norm, own), inputs):
        module(given).pow(2).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad) and norm.weight.grad is not None
    with torch.inference_mode():
        assert torch.allclose(norm(x), own(x), atol=1e-6)
        for odd in (x.half(), x.double(), x.transpose(0, 1)):
            assert torch.equal(norm(odd), own(odd)) and norm(odd).dtype == own(odd).dtype
        with pytest.raises(RuntimeError):
            norm(x[..., :5])
        with torch.autocast("cpu", torch.bfloat16):
            assert norm(x).dtype == own(x).dtype and torch.equal(norm(x), own(x))


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype, format", [(torch.float32, "fp32"), (torch.float32, "mxfp6_e2m3"), (torch.bfloat16, "bf16")])
@pytest.mark.parametrize("kind, settings", [("llama", {}), ("gemma2", GEMMA), ("qwen3", dict(head_dim=16))])
def test_speculative_text_is_plain_text(kind, settings, dtype, format):
    model = compressed(kind, dtype, format, **settings)
    if dtype == torch.bfloat16:
        mx.row_invariant(model)
    rows = repetitive(12, seed=3)
    assert generated(speculate(model, rows, PromptLookupDraft(), max_new_tokens=24), rows) == plain(model, rows, max_new_tokens=24)
