"""Weight-only matmul on a GPU for MXFP6 and MXFP4 weights and a few rows: y = x W^T + bias, one Triton kernel.

Storage. A tile is 128 elements of one weight row, four blocks of 32. In `scales[t, n]` byte p is the E8M0 byte of block p.
For i = 0..7 the words `words[t, :, n, i]`, two of 4-bit codes or three of 6-bit ones, hold eight pairs of codes: q = 2 p + c
has the elements 128 t + 32 p + 4 i + 2 c and the next one, in one half of the bits and in the other. PAIRS says where. For
few instructions most pairs have the gap between sign and magnitude that a bfloat16 has, with parts of other pairs in it: one
rotation and one mask of a word is two weights, as a tensor core's registers hold them. What bits are left make pairs of two
such pieces. Nothing is gathered, and a tile of many rows is a few contiguous runs.

Arithmetic. A code's bits, put at the right place of a bfloat16 or float16, are its value times a power of two (subnormal
codes become subnormal numbers). The inverse power, with which it is the exact value, comes in before the products for
bfloat16, as they could leave the range of float32 without it, and after the sums for float16. A block of 32 is one dot into
a fresh float32 accumulator, which is multiplied by 2^(b-127) and added to the sum.

Row invariance. Rows are taken in groups of 8, each with its own dot of the same shape, and K is split among programs by N
and K alone, the parts being added in order by a second kernel. So the bits of a row of y do not depend on the other rows, on
their number or on its place among them. Past the last row that one is taken again, in vain: a mask would cost more.
"""

from __future__ import annotations

from functools import reduce
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
TILE_N, WARPS, STAGES = 64, 2, 3  # a warp has 32 rows of weights: what it does per tile is shared by two dots
PROGRAMS = 1024  # K is split until there are about so many, a few thousand warps in all
FORMATS = {"mxfp6_e2m3": (6, 3, 1), "mxfp6_e3m2": (6, 2, 3), "mxfp4_e2m1": (4, 1, 1)}  # bits, mantissa bits, bias
DTYPES = {torch.bfloat16: (tl.bfloat16, 127), torch.float16: (tl.float16, 15)}  # the last: bias
_FOUR = [[(6, 0x81C0)], [(28, 0x81C0)], [(2, 0x81C0)], [(0, 0x8180), (24, 0x0040)]]  # the same in both words
PAIRS = {  # of each pair the pieces: which word, how far it is rotated left, the mask of a half
    "mxfp6_e2m3": [
        [(0, 6, 0x81F0)], [(1, 15, 0x81F0)], [(0, 2, 0x81E0), (1, 0, 0x10)], [(0, 3, 0x8000), (1, 9, 0x1F0)], [(2, 6, 0x81F0)],
        [(0, 13, 0x1B0), (2, 12, 0x8040)], [(1, 5, 0x81C0), (2, 0, 0x30)], [(2, 9, 0x8070), (2, 0, 0x180)],
    ],
    "mxfp6_e3m2": [
        [(0, 5, 0x83E0)], [(0, 0, 0x83E0)], [(1, 5, 0x83E0)], [(1, 0, 0x83E0)], [(2, 6, 0x83E0)],
        [(0, 10, 0x01E0), (2, 4, 0x8200)], [(2, 11, 0x82A0), (2, 0, 0x0140)], [(1, 10, 0x01E0), (2, 2, 0x8200)],
    ],
    "mxfp4_e2m1": [[(c, *piece) for piece in _FOUR[p]] for p in range(4) for c in range(2)],
}  # fmt: skip
NUMBERS = {  # the same for the kernel: of each pair two pieces of three numbers
    name: sum([(word, left, mask * 0x10001) for pair in pairs for word, left, mask in [*pair, (0, 0, 0)][:2]], ())
    for name, pairs in PAIRS.items()
}


class Planes(NamedTuple):
    """Weights `[N, K]`, T = ceil(K / 128); beyond K there are zero codes with scale byte 127."""

    words: torch.Tensor  # int32 [T, 2 or 3, N, 8]
    scales: torch.Tensor  # int32 [T, N]
    k: int

    @property
    def n(self) -> int:
        return self.scales.shape[1]


def to_planes(codes: torch.Tensor, scales: torch.Tensor, format_name: str) -> Planes:
    """`codes` uint8 `[N, K * bits / 8]`, packed from the least significant bit on; `scales` uint8 `[N, K / 32]`."""
    bits, mantissa, _ = FORMATS[format_name]
    if {codes.dtype, scales.dtype} != {torch.uint8} or codes.dim() != 2 or scales.dim() != 2:
        raise ValueError("codes and scales must be uint8 matrices")
    n, k = scales.shape[0], scales.shape[1] * BLOCK
    if not n * k or codes.shape != (n, k * bits // 8):
        raise ValueError(f"codes {[*codes.shape]} with {bits} bits do not fit scales {[*scales.shape]} of blocks of {BLOCK}")
    tiles = -(-k // TILE)
    padded = scales.new_full((n, tiles * 4), 127)
    padded[:, : scales.shape[1]] = scales
    words = torch.zeros(tiles, bits // 2, n, 8, dtype=torch.int32, device=codes.device)
    step = max(1, CHUNK // k)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        tile = torch.zeros(rows.stop - first, tiles * TILE, dtype=torch.int32, device=codes.device)
        tile[:, :k] = _unpack(codes[rows], bits)
        tile = (tile & (1 << bits - 1) - 1) << 7 - mantissa | tile >> bits - 1 << 15  # as a bfloat16 has them
        tile = tile.view(-1, tiles, 4, 8, 2, 2).permute(1, 0, 3, 2, 4, 5).flatten(3, 4)  # [T, n, i, q, h]
        for q, pieces in enumerate(PAIRS[format_name]):
            pair = tile[..., q, 0] | tile[..., q, 1] << 16
            for word, left, mask in pieces:
                words[:, word, rows] |= _turned(pair & _both(mask), -left)
    return Planes(words, padded.view(torch.int32).t().contiguous(), k)


def from_planes(planes: Planes, format_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `to_planes`, bit for bit: codes uint8 `[N, K * bits / 8]` and scales uint8 `[N, K / 32]`."""
    (bits, mantissa, _), words = FORMATS[format_name], planes.words.unbind(1)
    piece = lambda word, left, mask: _turned(words[word], left) & _both(mask)  # noqa: E731
    pair = torch.stack([reduce(or_, [piece(*of) for of in pieces]) for pieces in PAIRS[format_name]], -1)
    tile = torch.stack([pair & 0xFFFF, pair >> 16 & 0xFFFF], -1)  # [T, n, i, q, h]
    tile = (tile & 0x7FFF) >> 7 - mantissa | tile >> 15 << bits - 1
    codes = tile.unflatten(3, (4, 2)).permute(1, 0, 3, 2, 4, 5).reshape(planes.n, -1)[:, : planes.k]
    scales = planes.scales.t().contiguous().view(torch.uint8)[:, : planes.k // BLOCK]
    return _pack(codes, bits), scales.contiguous()


def _both(mask: int) -> int:
    """The mask in both halves of an int32."""
    return (mask * 0x10001 ^ 1 << 31) - (1 << 31)


def _turned(words: torch.Tensor, left: int) -> torch.Tensor:
    """int32, rotated."""
    left %= 32
    return words << left | words >> 32 - left & (1 << left) - 1 if left else words


def _unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[n, K * bits / 8]` to int32 `[n, K]`: four codes of 6 bits are three bytes, two of 4 bits are one."""
    size = 3 if bits == 6 else 1
    word = reduce(or_, [codes[:, byte::size].int() << 8 * byte for byte in range(size)])
    return torch.stack([word >> at & (1 << bits) - 1 for at in range(0, 8 * size, bits)], -1).flatten(1)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_unpack`."""
    size = 3 if bits == 6 else 1
    word = reduce(or_, [codes[:, i :: 8 * size // bits] << bits * i for i in range(8 * size // bits)])
    return torch.stack([(word >> 8 * byte & 255).to(torch.uint8) for byte in range(size)], -1).flatten(1)


@triton.jit
def _piece(words, NUMBERS: tl.constexpr, AT: tl.constexpr):
    word = words[NUMBERS[AT]]
    if NUMBERS[AT + 1]:
        word = (word << NUMBERS[AT + 1]) | (word >> (32 - NUMBERS[AT + 1]))
    return word & NUMBERS[AT + 2]


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
def _weights(words, NUMBERS: tl.constexpr, Q: tl.constexpr, DTYPE: tl.constexpr, X_DTYPE: tl.constexpr):
    """Pair Q, `[n, 16]` in the order of i, times a power of two."""
    pair = _piece(words, NUMBERS, 6 * Q)
    if NUMBERS[6 * Q + 5]:
        pair |= _piece(words, NUMBERS, 6 * Q + 3)
    if DTYPE == tl.float16:
        pair += (pair & 0x7FFF7FFF) * 7  # magnitudes three bits up
    return tl.join(_number(pair & 0xFFFF, DTYPE, X_DTYPE), _number(pair >> 16, DTYPE, X_DTYPE)).reshape(pair.shape[0], 16)


@triton.jit
def _scale(word, P: tl.constexpr):
    """2^(b-127) in float32 from byte P of a word: 2^-127 for b = 0 (a subnormal number), infinity for b = 255."""
    bits = (word << (23 - 8 * P) if P < 3 else word >> 1) & 0x7F800000
    return tl.maximum(bits.to(tl.int32, bitcast=True), 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def _blocks(x_ptr, first, t, rows, K, WHOLE: tl.constexpr):
    """8 rows of x from `first` on, block by block: `[32, 8]`, k in the order of c, i, h as the weights have it."""
    k = t * 128 + tl.arange(0, 128)
    at = x_ptr + tl.minimum(first + tl.arange(0, 8), rows - 1)[:, None] * K + k[None, :]
    x = tl.load(at) if WHOLE else tl.load(at, mask=(k < K)[None, :], other=0.0)
    x = x.reshape(8, 2, 2, 8, 2, 2).permute(4, 3, 5, 0, 2, 1).reshape(32, 8, 2, 2)  # the last two: the bits of p
    low, high = tl.split(x)
    return tl.split(low) + tl.split(high)


@triton.jit
def _stored(out_ptr, total, bias_ptr, first, n, rows, N, HAS_BIAS: tl.constexpr):
    m = first + tl.arange(0, 8)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    at = out_ptr + m[None, :] * N + n[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(m < rows)[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr, rows, N, K, tiles, per_part,
    NUMBERS: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr, UP: tl.constexpr,
    TILE_N: tl.constexpr, GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x `[rows, K]`; out `[parts, rows, N]`, the sums over `per_part` tiles each; GROUPS * 8 rows from axis 2 on."""
    X_DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    EARLY: tl.constexpr = DTYPE == tl.bfloat16
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    part, first = tl.program_id(1), tl.program_id(2) * (8 * GROUPS)
    near = tl.minimum(n, N - 1)
    places = near[:, None] * 8 + tl.arange(0, 8)[None, :]
    up = tl.full((1, 1), UP, X_DTYPE if EARLY else tl.float32)
    sums, spoiled = (), tl.zeros((TILE_N,), tl.uint32)
    for _ in tl.static_range(GROUPS):
        sums += (tl.zeros((TILE_N, 8), tl.float32),)
    for t in tl.range(part * per_part, tl.minimum(part * per_part + per_part, tiles), num_stages=STAGES):
        words = ()
        for at in tl.static_range(WORDS):
            words += (tl.load(words_ptr + (t * WORDS + at) * (8 * N) + places).to(tl.uint32, bitcast=True),)
        scales = tl.load(scales_ptr + t * N + near).to(tl.uint32, bitcast=True)
        spoiled |= (0xFEFEFEFE - scales) & scales & 0x80808080  # not 0 if a byte is 255, which means NaN
        x = ()
        for group in tl.static_range(GROUPS):
            x += (_blocks(x_ptr, first + 8 * group, t, rows, K, WHOLE),)
        for p in tl.static_range(4):
            even = _weights(words, NUMBERS, 2 * p, DTYPE, X_DTYPE)
            odd = _weights(words, NUMBERS, 2 * p + 1, DTYPE, X_DTYPE)
            weights = tl.join(even, odd).permute(0, 2, 1).reshape(TILE_N, 32)
            if EARLY:
                weights *= up
            scale = _scale(scales, p)[:, None]
            added = ()
            for group in tl.static_range(GROUPS):
                added += (tl.fma(tl.dot(weights, x[group][p]), scale, sums[group]),)
            sums = added
    for group in tl.static_range(GROUPS):
        total = tl.where(spoiled[:, None] == 0, sums[group] if EARLY else sums[group] * up, float("nan"))
        _stored(out_ptr + part * rows * N, total, bias_ptr, first + 8 * group, n, rows, N, HAS_BIAS)


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
                _launch(some, planes, bias, out, format_name, *DTYPES[x.dtype])
    return y.to(x.dtype).view(*x.shape[:-1], planes.n)


def _launch(x, planes: Planes, bias, y, format_name: str, dtype, x_bias: int):
    """Writes y `[rows, N]` for x `[rows, K]`, by way of the partial sums where K is split."""
    (rows, n), tiles = y.shape, planes.scales.shape[0]
    per_part = tiles_per_part(n, tiles)
    parts, groups = -(-tiles // per_part), -(-min(rows, ROWS) // 8)
    out = y if parts == 1 else torch.empty(parts, rows, n, dtype=torch.float32, device=y.device)
    no_bias = bias is None
    _matmul[(-(-n // TILE_N), parts, -(-rows // ROWS))](
        x, planes.words, planes.scales, y if no_bias else bias, out, rows, n, planes.k, tiles, per_part,
        NUMBERS=NUMBERS[format_name], WORDS=planes.words.shape[1], WHOLE=planes.k % TILE == 0, DTYPE=dtype, TILE_N=TILE_N,
        UP=2.0 ** (x_bias - FORMATS[format_name][2]), GROUPS=groups, HAS_BIAS=not no_bias and parts == 1, STAGES=STAGES,
        num_warps=WARPS,
    )  # fmt: skip
    if parts > 1:
        grid = (-(-y.numel() // 512),)
        _reduce[grid](out, y if no_bias else bias, y, y.numel(), n, PARTS=parts, WIDTH=512, HAS_BIAS=not no_bias)


def tiles_per_part(n: int, tiles: int) -> int:
    """How many tiles of 128 along K one program adds up: by the size of the weight alone, so that rows do not matter."""
    return max(2, -(-tiles // max(1, PROGRAMS // -(-n // TILE_N))))


def _check(x: torch.Tensor, planes: Planes, format_name: str, bias: torch.Tensor | None) -> None:
    bits = 2 * planes.words.shape[1]
    if format_name not in FORMATS or FORMATS[format_name][0] != bits:
        raise ValueError(f"{format_name!r} does not fit planes of {bits} bits; formats here: {', '.join(FORMATS)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be bfloat16 or float16, not {x.dtype}")
    if x.dim() == 0 or x.shape[-1] != planes.k:
        raise ValueError(f"the last dimension of x must be {planes.k}, the shape is {tuple(x.shape)}")
    if not x.is_cuda and not INTERPRETED:
        raise ValueError(f"x must be on a GPU, not on {x.device}")
    if any(other is not None and other.device != x.device for other in (planes.words, planes.scales, bias)):
        raise ValueError(f"x is on {x.device}, the weights and the bias must be, too")
    if bias is not None and (bias.shape != (planes.n,) or not bias.is_floating_point()):
        raise ValueError(f"bias must be {planes.n} floating point numbers, not {bias.dtype} of shape {tuple(bias.shape)}")
