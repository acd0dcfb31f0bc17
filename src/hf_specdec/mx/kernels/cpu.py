"""The compiled CPU kernels: which code path runs, and the calls, in terms of tensors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from ..codec import round_to_integers
from ..formats import DENSE, FORMATS
from .build import APPLE, BuildError, build, packaged_library

ROWS = 16  # of a tile
ABI = 13
WIDE, PANEL = 64, 1024  # rows of x from which on portable C leaves the product to torch; outputs it decodes at a time
PATHS = ("portable", "neon", "avx2", "avx512f", "avx512_bf16", "amx")  # as in csrc/mx.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NUMBERS = {name: number for number, name in enumerate((*FORMATS, *DENSE))}


BODY = ctypes.CFUNCTYPE(None)
_POINTERS = tuple(ctypes.c_void_p * count for count in range(5))


class Layer(ctypes.Structure):
    """struct mx_layer of csrc/mx.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "tail_codes", "tail_scales", "bias", "values")),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("integers", ctypes.c_int32),
    ]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The loaded library; None, after one warning, where it can neither be found nor built, or is switched off."""
    if os.environ.get("HF_SPECDEC_MX_KERNELS", "").lower() in ("off", "0", "none"):
        _state["reason"] = "switched off by $HF_SPECDEC_MX_KERNELS"
        return None
    try:
        path = packaged_library() or build()
        loaded = _load(path)
        _state["library"] = str(path)
        return loaded
    except (BuildError, OSError) as error:
        _state["reason"] = str(error)
        warnings.warn(f"MX kernels are not available, so that MX weights are dequantised once and multiplied by torch: {error}", stacklevel=3)
        return None


def there() -> bool:
    """Whether there is a library; to torch's compiler, whether it has been asked for."""
    return bool(_state["library"]) if torch.compiler.is_compiling() else library() is not None


def _load(path: Path) -> ctypes.CDLL:
    """The library, bound to the OpenMP that torch has loaded: a second one would fight it for the processors."""
    for runtime in _openmp_runtimes():
        with contextlib.suppress(OSError):
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
            break
    lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # what torch's compiler writes finds it (csrc/shims.c)
    if lib.mx_abi() != ABI:
        raise OSError(f"{path} has interface {lib.mx_abi()}, not {ABI}: reinstall the package, or delete the file.")
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    lib.mx_linear.argtypes = [pointer, pointer, pointer, size, number, number, number]
    lib.mx_linears.argtypes = [pointer, pointer, number, pointer, size, number, number, number]
    lib.mx_together.argtypes, lib.mx_together.restype = [BODY, number], None
    lib.mx_tile.argtypes = [pointer, pointer, pointer, pointer, size, size, number, number, number]
    lib.mx_tile.restype = lib.mx_dequantize.restype = None
    lib.mx_dequantize.argtypes = [pointer, size, size, pointer, number, number]
    lib.mx_quantize.argtypes = [pointer, number, size, size, number, number, pointer, pointer, pointer, pointer, number]
    lib.mx_quantize.restype = size
    lib.mx_attention_rows.argtypes = [ctypes.c_char_p, number, number]
    for own in (lib.mx_norm, lib.mx_delta, lib.mx_space, lib.mx_conv):
        own.argtypes, own.restype = [ctypes.c_char_p, number], None
    lib.mx_read.argtypes = [pointer, size, number]
    lib.mx_read.restype = ctypes.c_uint64
    lib.mx_dot_peak.argtypes, lib.mx_dot_peak.restype = [number], ctypes.c_double
    return lib


def _openmp_runtimes() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # no Linux
        return [str(Path(torch.__file__).parent / "lib" / "libomp.dylib")]
    found = re.findall(r"\s(/\S*/(?:libgomp|libiomp5|libomp)[^/\s]*)$", maps, re.MULTILINE)
    return [*dict.fromkeys(found), "libgomp.so.1"]


_state: dict = {"path": None, "forced": None, "reason": None, "library": None}


def kernel_path() -> int:
    """The number of the code path in use: the forced one, that of $HF_SPECDEC_MX_PATH, else the widest there is."""
    if _state["path"] is None:
        wanted = _state["forced"] or os.environ.get("HF_SPECDEC_MX_PATH")
        path = _number_of(wanted) if wanted else max(i for i in range(len(PATHS)) if library().mx_has_path(i))
        library().mx_set_path(path)
        _state["path"] = path
    return _state["path"]


def current_path() -> str | None:
    """The name of the code path, if one has been chosen yet."""
    return None if _state["path"] is None else PATHS[_state["path"]]


def _number_of(name: str) -> int:
    if name not in PATHS:
        raise ValueError(f"path={name!r} is no kernel path. Take one of: {', '.join(PATHS)}.")
    if library() is None or not library().mx_has_path(PATHS.index(name)):
        raise ValueError(f"path={name!r} cannot run here. {_state['reason'] or 'This processor lacks the instructions.'}")
    return PATHS.index(name)


def set_kernel_path(name: str | None) -> None:
    """Force a code path (`portable`, `neon`, `avx2`, `avx512f`, `avx512_bf16`, `amx`); None goes back to the widest one.

    Raises ValueError for an unknown name, or one that this processor cannot run.
    """
    if name is not None:
        _number_of(name)
    _state["forced"], _state["path"] = name, None
    if library() is not None:
        kernel_path()


def by_panels() -> bool:
    """Whether many rows of x are better multiplied by torch than by the kernel: portable code is slow, and on Apple's processors torch's product has units of its own."""
    return PATHS[kernel_path()] in (("portable", "neon") if APPLE else ("portable",))


def kernel_info() -> dict:
    """What runs here, for people: the code path in use and why, those available, the library, by which instructions layers are multiplied (None: the path has
    no choice; on Intel's processors fused multiply-adds are faster than dot products), by which those with activations="mxint8" (None: x is rounded and multiplied as ever), whether more than 64 rows in bfloat16 are left to torch, and torch's threads."""
    from .instructions import INTEGERS, PRODUCTS

    lib = library()
    available = [name for i, name in enumerate(PATHS) if lib is not None and lib.mx_has_path(i)]
    if lib is None:
        path, why = "torch", _state["reason"]
    else:
        forced = _state["forced"] or os.environ.get("HF_SPECDEC_MX_PATH")
        path, why = PATHS[kernel_path()], "forced" if forced else "the widest instructions this processor has"
    return {
        "path": path,
        "why": why,
        "available": available,
        "library": _state["library"],
        "reason": _state["reason"],
        "products": PRODUCTS.current(path),
        "integer_products": INTEGERS.current(path),
        "many_rows": "torch" if lib is None or by_panels() else "kernels",
        "threads": torch.get_num_threads(),
    }


def address_of(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


@lru_cache(maxsize=None)
def values_of(name: str) -> torch.Tensor:
    table = torch.zeros(256, dtype=torch.float32, device="cpu")
    if name in FORMATS:
        table[: 2 ** FORMATS[name].bits] = FORMATS[name].values
    return table


def multiply(layer: int, x: torch.Tensor, n: int) -> torch.Tensor:
    """`[..., n]` in x's dtype from x `[..., K]`, contiguous, and the address of a `Layer`."""
    *rest, k = x.shape
    out = x.new_empty((*rest, n))
    rows = x.numel() // max(k, 1)
    if rows and library().mx_linear(
        layer, x.data_ptr(), out.data_ptr(), rows, DTYPES[x.dtype], kernel_path(), torch.get_num_threads()
    ):
        raise MemoryError(f"no memory for {rows} rows of activations.")
    return out


def multiply_several(layers: list[int], x: torch.Tensor, features: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """`multiply` by at most four layers, at once."""
    outs = tuple(x.new_empty((*x.shape[:-1], n)) for n in features)
    rows, pointers = x.numel() // max(x.shape[-1], 1), _POINTERS[len(layers)]
    if rows and library().mx_linears(
        pointers(*layers), pointers(*(out.data_ptr() for out in outs)), len(layers), x.data_ptr(), rows, DTYPES[x.dtype], kernel_path(),
        torch.get_num_threads(),
    ):  # fmt: skip
        raise MemoryError(f"no memory for {rows} rows of activations.")
    return outs


def together(function, *args, **kwargs):
    """`function(...)`, during which torch's threads stay with the products: while this thread does what lies between two products, the
    others fetch the weights that come next (csrc/team.h). For passes in which everything large is a product or attention by these kernels: torch's
    own operators run on one thread meanwhile."""
    done: list = []

    def body():
        try:
            done.append((function(*args, **kwargs), None))
        except BaseException as error:  # also Ctrl-C: it is raised below, behind the C code
            done.append((None, error))

    library().mx_together(BODY(body), torch.get_num_threads())
    if not done:  # Ctrl-C before the first line of `body`, where ctypes prints and drops it
        raise KeyboardInterrupt
    result, error = done.pop()
    if error is not None:
        raise error
    return result


class Kernel:
    """One layer's weights as the library wants them. Holds on to the tensors whose addresses it has taken. integers: x is rounded to MXINT8."""

    def __init__(self, name: str, bits: int, n: int, k: int, codes, scales, tail, bias: torch.Tensor | None, integers: bool = False):
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.kept = codes, scales, tail, values_of(name)
        tail = tail or (None, None)
        self.layer = Layer(
            address_of(codes), address_of(scales), address_of(tail[0]), address_of(tail[1]), address_of(self.bias),
            values_of(name).data_ptr(), n, k, NUMBERS[name], bits, integers,
        )  # fmt: skip
        self.address = ctypes.addressof(self.layer)
        self.n, self.k, self.integers = n, k, integers
        self.bytes = torch.frombuffer(self.layer, dtype=torch.uint8).clone()  # for `ops.mx_tiles`

    def __call__(self, x: torch.Tensor, alike: bool = False) -> torch.Tensor:
        """`x [..., K]` times the weights, plus the bias: `[..., N]` in x's dtype (float32, bfloat16 or float16). `alike`: any
        number of rows is multiplied as a few are."""
        if not x.is_contiguous():
            x = x.contiguous()
        if x.numel() > WIDE * self.k and not alike and by_panels():
            return self._by_panels(x)
        return multiply(self.address, x, self.n)

    def _by_panels(self, x: torch.Tensor) -> torch.Tensor:
        """Many rows where the kernel is slower than torch: stretches of the weights, and torch's own product, in float32."""
        flat = x.reshape(-1, self.k).float()
        flat = round_to_integers(flat) if self.integers else flat
        out = flat.new_empty(flat.shape[0], self.n)
        for first in range(0, self.n, PANEL):
            last = min(first + PANEL, self.n)
            panel = flat.new_empty(last - first, self.k)
            library().mx_dequantize(self.address, first // ROWS, -(-(last - first) // ROWS), panel.data_ptr(), DTYPES[torch.float32], torch.get_num_threads())
            out[:, first:last] = torch.nn.functional.linear(flat, panel, None if self.bias is None else self.bias[first:last])
        return out.to(x.dtype).view(*x.shape[:-1], self.n)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights `[N, K]` in `dtype`."""
        out = torch.empty(self.n, self.k, dtype=dtype, device="cpu")
        groups = -(-self.n // ROWS)
        library().mx_dequantize(self.address, 0, groups, out.data_ptr(), DTYPES[dtype], torch.get_num_threads())
        return out
