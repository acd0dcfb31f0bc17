"""Weight-only matmul on a GPU for MXFP6 and MXFP4 weights and a few rows: y = x W^T + bias, one Triton kernel.

Storage. A tile is 128 elements of one weight row, four blocks of 32. As in FP6-LLM (arXiv 2401.14112) a 6-bit code is split,
here into the low four bits of its magnitude and its other two (top magnitude bit, sign); a 4-bit code is one nibble. Element
k = 128 t + 32 p + 16 a + 2 i + h of row n lies in

    nibbles[t, a, n, i]   bits 4 p + 16 h .. + 3     all of a 4-bit code, magnitude bits 0..3 of a 6-bit one
    twos[t, n, i]         bit 2 q + 16 h             magnitude bit 4, with q = 2 p + a
                          bit 2 q + 16 h + 7 mod 32  sign
    scales[t, n]          byte p                     the block's E8M0 byte

so that a tile of many rows is one contiguous run, and a shift and a mask of a word give two weights, neighbours along k, one
in each half of the word, as a tensor core's registers hold them. Nothing is gathered.

Arithmetic. A code's bits, put at the right place of a bfloat16 or float16, are its value times a power of two (subnormal
codes become subnormal numbers); times the inverse power that is the exact value, in the dtype of x. A block of 32 is one dot
into a fresh float32 accumulator, which is multiplied by 2^(b-127) and added to the sum.

Row invariance. Rows are taken in groups of 8, each with its own dot of the same shape, and K is split among programs by N
and K alone, the parts being added in order by a second kernel. So the bits of a row of y do not depend on the other rows, on
their number or on its place among them.
"""

from __future__ import annotations

from functools import partial, reduce
from itertools import product
from operator import or_
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the MX kernel for GPUs needs Triton: pip install triton, or choose another kernel") from error

TILE, BLOCK = 128, 32
ROWS, AT_ONCE, CHUNK = 32, 1024, 1 << 24  # rows of x per program and per launch; weights that to_planes takes at a time
TILE_N, WARPS, STAGES = 32, 2, 5  # with two warps every dot is m16n8k16 instructions, on all architectures
PROGRAMS = 1024  # K is split until there are about so many, a few thousand warps in all
_union = partial(reduce, or_)
FORMATS = {"mxfp6_e2m3": (6, 3, 1), "mxfp6_e3m2": (6, 2, 3), "mxfp4_e2m1": (4, 1, 1)}  # bits, mantissa bits, bias
DTYPES = {torch.bfloat16: (tl.bfloat16, 7, 127), torch.float16: (tl.float16, 10, 15)}  # the last two: mantissa bits, bias


class Planes(NamedTuple):
    """Weights `[N, K]`, T = ceil(K / 128); beyond K there are zero codes with scale byte 127."""

    nibbles: torch.Tensor  # int32 [T, 2, N, 8]
    twos: torch.Tensor | None  # int32 [T, N, 8]; None for 4-bit codes
    scales: torch.Tensor  # int32 [T, N]
    k: int

    @property
    def bits(self) -> int:
        return 4 if self.twos is None else 6

    @property
    def n(self) -> int:
        return self.scales.shape[1]


def to_planes(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> Planes:
    """`codes` uint8 `[N, K * bits / 8]`, packed from the least significant bit on; `scales` uint8 `[N, K / 32]`."""
    if bits not in (4, 6) or {codes.dtype, scales.dtype} != {torch.uint8} or codes.dim() != 2 or scales.dim() != 2:
        raise ValueError("codes and scales must be uint8 matrices, bits must be 4 or 6")
    n, k = scales.shape[0], scales.shape[1] * BLOCK
    if not n * k or codes.shape != (n, k * bits // 8):
        raise ValueError(f"codes {[*codes.shape]} with {bits} bits do not fit scales {[*scales.shape]} of blocks of {BLOCK}")
    tiles = -(-k // TILE)
    padded = scales.new_full((n, tiles * 4), 127)
    padded[:, : scales.shape[1]] = scales
    nibbles = torch.empty(tiles, 2, n, 8, dtype=torch.int32, device=codes.device)
    twos = torch.empty(tiles, n, 8, dtype=torch.int32, device=codes.device) if bits == 6 else None
    step = max(1, CHUNK // k)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        tile = torch.zeros(rows.stop - first, tiles * TILE, dtype=torch.int32, device=codes.device)
        tile[:, :k] = _unpack(codes[rows], bits)
        tile = tile.view(-1, tiles, 4, 2, 8, 2).permute(1, 3, 0, 4, 2, 5)  # [T, a, n, i, p, h]
        nibbles[:, :, rows] = _union([(tile[..., p, h] & 15) << 4 * p + 16 * h for p in range(4) for h in range(2)])
        if twos is not None:
            twos[:, rows] = _union([(tile[:, a, ..., p, h] >> 4 + b & 1) << at for p, a, h, b, at in _places()])
    return Planes(nibbles, twos, padded.view(torch.int32).t().contiguous(), k)


def from_planes(planes: Planes) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `to_planes`, bit for bit: codes uint8 `[N, K * bits / 8]` and scales uint8 `[N, K / 32]`."""
    tiles, _, n, _ = planes.nibbles.shape
    tile = torch.zeros(tiles, 2, n, 8, 4, 2, dtype=torch.int32, device=planes.nibbles.device)
    for p, h in product(range(4), range(2)):
        tile[..., p, h] = planes.nibbles >> 4 * p + 16 * h & 15
    for p, a, h, b, at in _places() if planes.bits == 6 else []:
        tile[:, a, ..., p, h] |= (planes.twos >> at & 1) << 4 + b
    codes = tile.permute(2, 0, 4, 1, 3, 5).reshape(n, tiles * TILE)[:, : planes.k]
    scales = planes.scales.t().contiguous().view(torch.uint8)[:, : planes.k // BLOCK]
    return _pack(codes, planes.bits), scales.contiguous()


def _places() -> list[tuple[int, int, int, int, int]]:
    """(p, a, h, 0 for the top magnitude bit or 1 for the sign, its bit in `twos`)."""
    return [(p, a, h, b, (4 * p + 2 * a + 16 * h + 7 * b) % 32) for p, a, h, b in product(range(4), *[range(2)] * 3)]


def _unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[n, K * bits / 8]` to int32 `[n, K]`: four codes of 6 bits are three bytes, two of 4 bits are one."""
    size = 3 if bits == 6 else 1
    word = _union([codes[:, byte::size].int() << 8 * byte for byte in range(size)])
    return torch.stack([word >> at & (1 << bits) - 1 for at in range(0, 8 * size, bits)], -1).flatten(1)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_unpack`."""
    size = 3 if bits == 6 else 1
    word = _union([codes[:, i :: 8 * size // bits] << bits * i for i in range(8 * size // bits)])
    return torch.stack([(word >> 8 * byte & 255).to(torch.uint8) for byte in range(size)], -1).flatten(1)


@triton.jit
def _shifted(words, LEFT: tl.constexpr):
    """Left by LEFT bits, or right by -LEFT."""
    return words << LEFT if LEFT >= 0 else words >> (-LEFT)


@triton.jit
def _rotated(words, LEFT: tl.constexpr):
    """Left by LEFT bits, what falls out coming back at the right."""
    return words if LEFT % 32 == 0 else (words << (LEFT % 32)) | (words >> ((-LEFT) % 32))


@triton.jit
def _number(bits, DTYPE: tl.constexpr, X_DTYPE: tl.constexpr):
    """The numbers of DTYPE with these bits; as float32 under the interpreter, whose bfloat16 cannot be multiplied."""
    if X_DTYPE == DTYPE:
        return bits.to(tl.uint16).to(DTYPE, bitcast=True)
    elif DTYPE == tl.bfloat16:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _weights(
    nibbles, twos, P: tl.constexpr, A: tl.constexpr, SIX: tl.constexpr, LSB: tl.constexpr,
    DTYPE: tl.constexpr, X_DTYPE: tl.constexpr,
):  # fmt: skip
    """Block P's half A, `[n, 16]`, times a power of two: in DTYPE, magnitudes from bit LSB on, signs in bit 15."""
    if SIX:
        Q: tl.constexpr = 2 * P + A
        pair = _shifted(nibbles, LSB - 4 * P) & (0x000F000F << LSB)
        if LSB == 4:  # the sign is 7 bits above the top magnitude bit here as in the word: both come with one rotation
            pair |= _rotated(twos, 8 - 2 * Q) & 0x81008100
        else:
            pair |= _rotated(twos, LSB + 4 - 2 * Q) & (0x00100010 << LSB)
            pair |= _rotated(twos, 8 - 2 * Q) & 0x80008000
    else:
        pair = (_shifted(nibbles, LSB - 4 * P) & (0x00070007 << LSB)) | (_shifted(nibbles, 12 - 4 * P) & 0x80008000)
    return tl.join(_number(pair & 0xFFFF, DTYPE, X_DTYPE), _number(pair >> 16, DTYPE, X_DTYPE)).reshape(pair.shape[0], 16)


@triton.jit
def _scale(word, P: tl.constexpr):
    """2^(b-127) in float32 from byte P of a word: 2^-127 for b = 0 (a subnormal number), NaN for b = 255."""
    bits = _shifted(word, 23 - 8 * P) & 0x7F800000
    scale = tl.maximum(bits.to(tl.int32, bitcast=True), 0x00400000).to(tl.float32, bitcast=True)
    return scale + scale * 0.0  # infinity times 0 is NaN


@triton.jit
def _added(total, weights, scale, x_ptr, first, k, rows, K):
    """`total` and the scaled dot with 8 rows of x from `first` on, those before `rows`, at columns k."""
    m = first + tl.arange(0, 8)
    x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=(m < rows)[None, :], other=0.0)
    return tl.fma(tl.dot(weights, x), scale[:, None], total)


@triton.jit
def _stored(out_ptr, total, bias_ptr, first, n, rows, N, HAS_BIAS: tl.constexpr):
    m = first + tl.arange(0, 8)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = out_ptr + m[None, :] * N + n[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(m < rows)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x_ptr, nibbles_ptr, twos_ptr, scales_ptr, bias_ptr, out_ptr, rows, N, K, tiles, per_part,
    SIX: tl.constexpr, LSB: tl.constexpr, DTYPE: tl.constexpr, UP: tl.constexpr,
    TILE_N: tl.constexpr, GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x `[rows, K]`; out `[parts, rows, N]`, the sums over `per_part` tiles each; GROUPS * 8 rows from axis 2 on."""
    X_DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    part, first = tl.program_id(1), tl.program_id(2) * (8 * GROUPS)
    here = n < N
    places = n[:, None] * 8 + tl.arange(0, 8)[None, :]
    up = tl.full((1, 1), UP, X_DTYPE)
    sum0 = tl.zeros((TILE_N, 8), tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    for t in tl.range(part * per_part, tl.minimum(part * per_part + per_part, tiles), num_stages=STAGES):
        even = tl.load(nibbles_ptr + t * 16 * N + places, mask=here[:, None], other=0).to(tl.uint32, bitcast=True)
        odd = tl.load(nibbles_ptr + t * 16 * N + N * 8 + places, mask=here[:, None], other=0).to(tl.uint32, bitcast=True)
        twos = even
        if SIX:
            twos = tl.load(twos_ptr + t * 8 * N + places, mask=here[:, None], other=0).to(tl.uint32, bitcast=True)
        word = tl.load(scales_ptr + t * N + n, mask=here, other=0).to(tl.uint32, bitcast=True)
        for p in tl.static_range(4):
            first16 = _weights(even, twos, p, 0, SIX, LSB, DTYPE, X_DTYPE)
            other16 = _weights(odd, twos, p, 1, SIX, LSB, DTYPE, X_DTYPE)
            weights = tl.join(first16, other16).permute(0, 2, 1).reshape(TILE_N, 32) * up
            scale = _scale(word, p)
            k = t * 128 + p * 32 + tl.arange(0, 32)
            inside = tl.where(t * 128 + p * 32 < K, rows, 0)
            sum0 = _added(sum0, weights, scale, x_ptr, first, k, inside, K)
            if GROUPS > 1:
                sum1 = _added(sum1, weights, scale, x_ptr, first + 8, k, inside, K)
            if GROUPS > 2:
                sum2 = _added(sum2, weights, scale, x_ptr, first + 16, k, inside, K)
            if GROUPS > 3:
                sum3 = _added(sum3, weights, scale, x_ptr, first + 24, k, inside, K)
    out_ptr += part * rows * N
    _stored(out_ptr, sum0, bias_ptr, first, n, rows, N, HAS_BIAS)
    if GROUPS > 1:
        _stored(out_ptr, sum1, bias_ptr, first + 8, n, rows, N, HAS_BIAS)
    if GROUPS > 2:
        _stored(out_ptr, sum2, bias_ptr, first + 16, n, rows, N, HAS_BIAS)
    if GROUPS > 3:
        _stored(out_ptr, sum3, bias_ptr, first + 24, n, rows, N, HAS_BIAS)


@triton.jit(do_not_specialize=["size"])
def _reduce(parts_ptr, bias_ptr, out_ptr, size, N, PARTS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr):
    """out = the sum of `parts [PARTS, size]`, size = rows * N, in order, and the bias."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.load(parts_ptr + at, mask=at < size, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * size + at, mask=at < size, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at % N, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


INTERPRETED = not isinstance(_matmul, triton.runtime.JITFunction)  # TRITON_INTERPRET=1: runs on the CPU, for tests


def linear(x: torch.Tensor, planes: Planes, format_name: str, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + bias for x `[..., K]` bfloat16 or float16, `[..., N]` in x's dtype; sums are float32, rounded once.

    `format_name` is a key of FORMATS. Meant for up to 32 rows; more give the same bits at a growing cost.
    """
    _check(x, planes, format_name, bias)
    flat = x.reshape(-1, planes.k).contiguous()
    y = torch.empty(flat.shape[0], planes.n, dtype=x.dtype, device=x.device)
    if INTERPRETED:
        flat, y = flat.float(), y.float()
    if y.numel():
        with torch.cuda.device(x.device if x.is_cuda else -1):
            for some, out in zip(flat.split(AT_ONCE), y.split(AT_ONCE)):
                _launch(some, planes, bias, out, *FORMATS[format_name], *DTYPES[x.dtype])
    return y.to(x.dtype).view(*x.shape[:-1], planes.n)


def _launch(x, planes: Planes, bias, y, bits: int, mantissa: int, exponent_bias: int, dtype, x_mantissa: int, x_bias: int):
    """Writes y `[rows, N]` for x `[rows, K]`, by way of the partial sums where K is split."""
    (rows, n), tiles = y.shape, planes.scales.shape[0]
    per_part = tiles_per_part(n, tiles)
    parts, groups = -(-tiles // per_part), -(-min(rows, ROWS) // 8)
    out = y if parts == 1 else torch.empty(parts, rows, n, dtype=torch.float32, device=y.device)
    twos, no_bias = planes.nibbles if planes.twos is None else planes.twos, bias is None
    _matmul[(-(-n // TILE_N), parts, -(-rows // ROWS))](
        x, planes.nibbles, twos, planes.scales, y if no_bias else bias, out, rows, n, planes.k, tiles, per_part,
        SIX=bits == 6, LSB=x_mantissa - mantissa, DTYPE=dtype, UP=2.0 ** (x_bias - exponent_bias), TILE_N=TILE_N,
        GROUPS=groups, HAS_BIAS=not no_bias and parts == 1, STAGES=max(3, STAGES + 1 - groups), num_warps=WARPS,
    )  # fmt: skip
    if parts > 1:
        grid = (-(-y.numel() // 512),)
        _reduce[grid](out, y if no_bias else bias, y, y.numel(), n, PARTS=parts, WIDTH=512, HAS_BIAS=not no_bias)


def tiles_per_part(n: int, tiles: int) -> int:
    """How many tiles of 128 along K one program adds up: by the size of the weight alone, so that rows do not matter."""
    return max(2, -(-tiles // max(1, PROGRAMS // -(-n // TILE_N))))


def _check(x: torch.Tensor, planes: Planes, format_name: str, bias: torch.Tensor | None) -> None:
    if format_name not in FORMATS or FORMATS[format_name][0] != planes.bits:
        raise ValueError(f"{format_name!r} does not fit planes of {planes.bits} bits; formats here: {', '.join(FORMATS)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be bfloat16 or float16, not {x.dtype}")
    if x.dim() == 0 or x.shape[-1] != planes.k:
        raise ValueError(f"the last dimension of x must be {planes.k}, the shape is {tuple(x.shape)}")
    if not x.is_cuda and not INTERPRETED:
        raise ValueError(f"x must be on a GPU, not on {x.device}")
    if any(other is not None and other.device != x.device for other in (planes.nibbles, planes.twos, planes.scales, bias)):
        raise ValueError(f"x is on {x.device}, the weights and the bias must be, too")
    if bias is not None and (bias.shape != (planes.n,) or not bias.is_floating_point()):
        raise ValueError(f"bias must be {planes.n} floating point numbers, not {bias.dtype} of shape {tuple(bias.shape)}")
