"""Which instructions multiply layers whose activations are rounded (csrc/integers.c): all give the same bits, some are faster."""

from __future__ import annotations

import platform

from . import cpu

KINDS = ("neon" if platform.machine() in ("arm64", "aarch64") else "avx2", "avx_vnni", "avx512vl_vnni", "avx512_vnni")


def available(path: str) -> list[str]:
    """Their names, the narrowest first, of those that layers on the code path `path` may have here; [] where x is rounded and multiplied as ever."""
    lib, number = cpu.library(), cpu.PATHS.index(path)
    return [] if lib is None else [name for kind, name in enumerate(KINDS) if lib.mx_has_path(number) and lib.mx_has_integers(number, kind)]


def current(path: str) -> str | None:
    """The one in use: the widest, unless another one is forced; None where there is none."""
    if cpu.library() is None or path == "portable":
        return None
    return KINDS[cpu.library().mx_integer_kind(cpu.PATHS.index(path))]


def force(name: str | None) -> None:
    """Take this one on all paths that have it; None goes back to the widest. For comparisons."""
    cpu.library().mx_force_integers(-1 if name is None else KINDS.index(name))
