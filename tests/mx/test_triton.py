"""The GPU kernel: its planes, and y = x W^T against integer decoding in float64.

Without a GPU the kernel runs under Triton's interpreter, which has to be chosen before Triton is imported: one process of its own
runs all checks (`python test_triton.py` prints their tracebacks as JSON), and a test here reads what it found.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[2] / "src/hf_specdec/mx/kernels/triton_mx.py"
FORMATS = {"mxfp6_e2m3": (6, 2, 3, 1), "mxfp6_e3m2": (6, 3, 2, 3), "mxfp4_e2m1": (4, 2, 1, 1)}  # bits, exponent, mantissa, bias
DTYPES = {torch.bfloat16: (7, -126), torch.float16: (10, -14)}  # mantissa bits, smallest normal exponent
FULL = os.environ.get("HF_SPECDEC_FULL") == "1"
LOOPLESS = "only 0-dimensional arrays can be converted to Python scalars"  # Triton 3.6 with numpy 2.4 or later
SHAPES = [(1, 32), (17, 96), (48, 160), (3, 1056), (70, 256)]


def load():
    """The kernel's module, from its file, so that the package's imports are not waited for."""
    spec = importlib.util.spec_from_file_location("triton_mx_under_test", PATH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def value(code: int, name: str) -> float:
    """What a code means, from the format's definition."""
    bits, exponent_bits, mantissa_bits, bias = FORMATS[name]
    exponent, mantissa = (code >> mantissa_bits) & (2**exponent_bits - 1), code & (2**mantissa_bits - 1)
    significand = mantissa + (2**mantissa_bits if exponent else 0)
    return (-1) ** (code >> (bits - 1)) * significand * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)


def decoded(codes: torch.Tensor, scales: torch.Tensor, name: str) -> torch.Tensor:
    """float64 `[N, K]`, bit by bit."""
    bits = FORMATS[name][0]
    stream = np.unpackbits(codes.cpu().numpy(), axis=1, bitorder="little").reshape(len(codes), -1, bits).astype(np.int64)
    table = np.array([value(code, name) for code in range(2**bits)])
    scale = np.array([math.ldexp(1, b - 127) for b in range(255)] + [np.nan])[scales.cpu().numpy()]
    return torch.from_numpy(table[stream @ (1 << np.arange(bits))] * np.repeat(scale, 32, axis=1))


def packed(values: np.ndarray, bits: int) -> torch.Tensor:
    """Codes `[N, K]` to uint8 `[N, K * bits / 8]`, from the least significant bit on."""
    stream = (values[..., None] >> np.arange(bits)) & 1
    return torch.from_numpy(np.packbits(stream.reshape(len(values), -1).astype(np.uint8), axis=1, bitorder="little"))


def random_weight(n: int, k: int, name: str, seed: int, low: int = 110, high: int = 130) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k * FORMATS[name][0] // 8), dtype=torch.uint8, generator=generator)
    return codes, torch.randint(low, high, (n, k // 32), dtype=torch.uint8, generator=generator)


def planes_of(kernel, codes, scales, name: str, device: str):
    return kernel.to_planes(codes.to(device), scales.to(device), name)


def half_a_unit(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rounding error of y in `dtype` at most."""
    mantissa_bits, smallest = DTYPES[dtype]
    exponent = torch.frexp(y.double())[1] - 1
    return torch.ldexp(torch.ones_like(y, dtype=torch.float64), exponent.clamp(min=smallest) - mantissa_bits - 1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def near(kernel, device: str, n: int, k: int, rows: int, name: str, dtype: torch.dtype, with_bias: bool) -> None:
    codes, scales = random_weight(n, k, name, seed=n + k)
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, k, generator=generator) / 64).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype) if with_bias else None
    planes = planes_of(kernel, codes, scales, name, device)
    y = kernel.linear(x.to(device), planes, name, None if bias is None else bias.to(device)).cpu()
    weight = decoded(codes, scales, name)
    exact, terms = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    allowed = 1e-6 * terms + half_a_unit(y, dtype)
    assert y.dtype == dtype and y.shape == (rows, n)
    assert ((y.double() - exact).abs() <= allowed).all(), (n, k, rows, name, dtype)


def check_the_product_is_within_a_millionth_of_the_terms(kernel, device: str) -> None:
    for one, name in enumerate(FORMATS):
        for two, dtype in enumerate(DTYPES):
            for number, (n, k) in enumerate(SHAPES):
                if device == "cpu" and not FULL and (3 * one + 5 * two + number) % 8:  # the interpreter is slow
                    continue
                near(kernel, device, n, k, (3, 1, 9, 2, 17)[number], name, dtype, with_bias=number % 2 == 1)


def check_one_part_and_many_parts_along_k(kernel, device: str) -> None:
    programs = kernel.PROGRAMS
    for kernel.PROGRAMS in (1, 4, programs):
        for with_bias in (False, True):
            near(kernel, device, 40, 1056, 5, "mxfp6_e2m3", torch.bfloat16, with_bias)


def check_every_code_with_every_scale_byte_is_exact(kernel, device: str) -> None:
    """x is the identity, so y is W^T: exact where the dtype holds it, else rounded once."""
    for name, (bits, *_) in FORMATS.items():
        codes = np.tile(np.arange(64) % 2**bits, 256).reshape(512, 32)
        scales = torch.arange(512).div(2, rounding_mode="floor").to(torch.uint8)[:, None]
        weight = decoded(packed(codes, bits), scales, name)
        planes = planes_of(kernel, packed(codes, bits), scales, name, device)
        for dtype in DTYPES:
            y = kernel.linear(torch.eye(32, dtype=dtype, device=device), planes, name).cpu().T
            expected = weight.float().to(dtype)
            assert torch.equal(y.isnan(), expected.isnan()) and y[-2:].isnan().all() and not y[:-2].isnan().any()
            assert torch.equal(y[:-2], expected[:-2]), (name, dtype)


def check_a_row_has_the_same_bits_at_every_number_of_rows_and_place(kernel, device: str) -> None:
    n, k = (20, 288) if device == "cpu" else (1000, 4096)
    every, few = range(1, 33) if FULL or device != "cpu" else (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32), (1, 9, 32)
    for name, dtype, numbers in (
        ("mxfp6_e2m3", torch.bfloat16, every),
        ("mxfp6_e3m2", torch.float16, every if device != "cpu" else few),
        ("mxfp4_e2m1", torch.bfloat16, every if device != "cpu" else few),
    ):
        codes, scales = random_weight(n, k, name, seed=3)
        planes = planes_of(kernel, codes, scales, name, device)
        x = torch.randn(40, k, generator=torch.Generator().manual_seed(5)).to(device, dtype)
        y = kernel.linear(x, planes, name)
        for rows in numbers:
            assert same_bits(kernel.linear(x[:rows], planes, name), y[:rows]), (name, rows)
            order = [(row + 5 * rows) % 32 for row in range(rows)]  # other rows, at other places
            assert same_bits(kernel.linear(x[order], planes, name), y[order]), (name, rows)


def check_a_bad_row_or_block_spoils_nothing_else(kernel, device: str) -> None:
    codes, scales = random_weight(20, 160, "mxfp6_e2m3", seed=1)
    x = torch.randn(10, 160, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    clean = kernel.linear(x, planes_of(kernel, codes, scales, "mxfp6_e2m3", device), "mxfp6_e2m3")
    scales[7, 2], x[4, 100] = 255, math.inf
    y = kernel.linear(x, planes_of(kernel, codes, scales, "mxfp6_e2m3", device), "mxfp6_e2m3")
    kept_rows, kept_columns = [m for m in range(10) if m != 4], [n for n in range(20) if n != 7]
    assert y[:, 7].isnan().all() and not y[4].isfinite().any()
    assert same_bits(y[kept_rows][:, kept_columns], clean[kept_rows][:, kept_columns])


def check_leading_dimensions_and_wrong_arguments(kernel, device: str) -> None:
    planes = planes_of(kernel, *random_weight(17, 64, "mxfp6_e2m3", seed=1), "mxfp6_e2m3", device)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2)).to(device, torch.float16)
    y = kernel.linear(x, planes, "mxfp6_e2m3")
    assert y.shape == (2, 3, 17) and same_bits(y[1, 2], kernel.linear(x[1, 2], planes, "mxfp6_e2m3"))
    turned = x.transpose(0, 1)  # not contiguous
    assert same_bits(kernel.linear(turned, planes, "mxfp6_e2m3"), y.transpose(0, 1).contiguous())
    assert kernel.linear(x[:0], planes, "mxfp6_e2m3").shape == (0, 3, 17)
    for arguments, message in [
        ((x.float(), planes, "mxfp6_e2m3"), "bfloat16 or float16"),
        ((x[..., :32], planes, "mxfp6_e2m3"), "must be 64"),
        ((x, planes, "mxfp4_e2m1"), "6 bits"),
        ((x, planes, "mxfp8_e4m3"), "formats here"),
        ((x, planes, "mxfp6_e2m3", x[0, 0, :16]), "17 floating point numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel.linear(*arguments)


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}


def test_under_the_interpreter():
    """All checks in one test, so that no second process of the session runs them again."""
    pytest.importorskip("triton", minversion="3.5")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if all(LOOPLESS in (trace or "") for trace in found.values()):
        pytest.skip("the interpreter of this Triton cannot run a loop with this numpy")
    assert found.keys() == CHECKS.keys() and not any(found.values()), "\n".join(f"{name}: {trace}" for name, trace in found.items() if trace)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name):
    pytest.importorskip("triton", minversion="3.5")
    CHECKS[name](load(), "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_large_shapes_on_a_gpu(name, dtype):
    pytest.importorskip("triton", minversion="3.5")
    for n, k, rows in ((4096, 4096, 8), (1025, 11008, 32), (32000, 128, 1)):
        near(load(), "cuda", n, k, rows, name, dtype, with_bias=False)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", [1, 17, 48])
@pytest.mark.parametrize("k", [32, 96, 128, 416, 4096])
def test_planes_hold_the_codes_bit_for_bit_and_take_no_more_room(k, n, name):
    pytest.importorskip("triton", minversion="3.5")
    kernel, bits = load(), FORMATS[name][0]
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (n, k // 32), dtype=torch.uint8, generator=generator)
    kernel.CHUNK = 5 * k  # several turns
    planes = kernel.to_planes(codes, scales, name)
    again = kernel.from_planes(planes, name)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    stored = sum(plane.numel() * plane.element_size() for plane in planes if isinstance(plane, torch.Tensor))
    assert stored * k == (codes.numel() + scales.numel()) * (k + -k % 128)


def test_codes_that_do_not_fit_their_scales_are_refused():
    pytest.importorskip("triton", minversion="3.5")
    kernel = load()
    codes, scales = random_weight(4, 64, "mxfp6_e2m3", seed=0)
    for one, other, name in [
        (codes, scales, "mxfp4_e2m1"), (codes.int(), scales, "mxfp6_e2m3"), (codes, scales[:, :1], "mxfp6_e2m3"), (codes[:0], scales[:0], "mxfp6_e2m3"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="codes"):
            kernel.to_planes(one, other, name)


@pytest.mark.parametrize("name", FORMATS)
def test_the_pairs_of_a_format_have_every_bit_of_their_words_once(name):
    pytest.importorskip("triton", minversion="3.5")
    kernel, (bits, _, mantissa_bits, _) = load(), FORMATS[name]
    sign_and_magnitude = 0x8000 | (2 ** (bits - 1) - 1 << 7 - mantissa_bits)  # of a bfloat16
    pairs = kernel.PAIRS[name]
    assert [sum(mask for _, _, mask in pieces) for pieces in pairs] == 8 * [sign_and_magnitude]
    places = [(word, (at - left) % 16) for pieces in pairs for word, left, mask in pieces for at in range(16) if mask >> at & 1]
    assert sorted(places) == [(word, at) for word in range(bits // 2) for at in range(16)]


def test_a_tensor_that_is_not_on_a_gpu_is_refused():
    pytest.importorskip("triton", minversion="3.5")
    kernel = load()
    if kernel.INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set")
    planes = kernel.to_planes(*random_weight(4, 64, "mxfp6_e2m3", seed=0), "mxfp6_e2m3")
    with pytest.raises(ValueError, match="must be on a GPU"):
        kernel.linear(torch.zeros(1, 64, dtype=torch.float16), planes, "mxfp6_e2m3")


def test_without_triton_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="pip install triton"):
        load()


def test_an_older_triton_is_told_so_once_and_torch_multiplies(monkeypatch):
    from hf_specdec.mx.formats import get_format  # not above: the process of its own does without the package
    from hf_specdec.mx.kernels import gpu

    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.4.0")
    gpu._formats.cache_clear()
    try:
        with pytest.warns(UserWarning, match="needs Triton 3.5 or newer, as torch 2.9 brings it, and here is 3.4.0"):
            assert not gpu.has_kernel(get_format("mxfp6_e2m3"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not gpu.has_kernel(get_format("mxfp4_e2m1"))
    finally:
        gpu._formats.cache_clear()


def outcome(check, kernel) -> str | None:
    try:
        check(kernel, "cpu")
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    print(json.dumps({name: outcome(check, load()) for name, check in CHECKS.items()}))
