"""Which instructions multiply on a code path, where it has a choice: of layers whose activations are rounded (csrc/integers.c), and of others on AVX-512
(csrc/products.c). All give the same bits, some are faster."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from . import cpu


@dataclass(frozen=True)
class Instructions:
    """`kinds`: their names, the widest last; `name`: the library's for them."""

    name: str
    kinds: tuple[str, ...]

    def available(self, path: str) -> list[str]:
        """Those that there are here on the code path `path`; [] where it has none of them."""
        lib, number = cpu.library(), cpu.PATHS.index(path)
        has = lib is not None and lib.mx_has_path(number) and getattr(lib, f"mx_has_{self.name}s")
        return [kind for i, kind in enumerate(self.kinds) if has and has(number, i)]

    def current(self, path: str) -> str | None:
        """The one in use: the fastest, unless another one is forced; None where there is none."""
        kind = -1 if cpu.library() is None or path not in cpu.PATHS else getattr(cpu.library(), f"mx_{self.name}_kind")(cpu.PATHS.index(path))
        return self.kinds[kind] if kind >= 0 else None

    def force(self, kind: str | None) -> None:
        """Take this one on all paths that have it; None goes back to the fastest. For comparisons."""
        getattr(cpu.library(), f"mx_force_{self.name}s")(-1 if kind is None else self.kinds.index(kind))


INTEGERS = Instructions("integer", ("neon" if platform.machine() in ("arm64", "aarch64") else "avx2", "avx_vnni", "avx512vl_vnni", "avx512_vnni", "amx_int8"))
PRODUCTS = Instructions("product", ("fused_avx512f", "fused_avx512_vbmi2", "dot_products_avx512_bf16"))
