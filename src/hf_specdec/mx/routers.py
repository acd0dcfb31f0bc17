"""Routers of mixtures of experts in 16 bit: torch multiplies one token by other code than many, so that a token's experts can depend on what shares its pass. Here their
rows are filled up to a multiple of `ROWS`, in which a row's bits are the same wherever it lies; whether that is so is tried on the machine at hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F

from .beneath import Beneath, beneath, put_beneath
from .experts import Experts, expert_projections
from .linear import MXMatrix

ROWS = 16
WIDTHS = (1, 2, 3, 7, 8, 16, 17, 33)  # that are tried


class SteadyRouter(Beneath):
    """Beneath the class of a router. dims: of the states that it takes: tokens `[T, H]` (2), or rows of them `[B, T, H]` (3)."""

    mx_by_kernels = False
    dims: tuple[int, ...]

    def forward(self, hidden_states: torch.Tensor, *others):
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if hidden_states.dim() not in self.dims or not isinstance(rows.shape[0], int) or not len(rows):  # a compiler's pass of any length
            return super().forward(hidden_states, *others)
        count, missing = rows.shape[0], -rows.shape[0] % ROWS
        rows = F.pad(rows, (0, 0, 0, missing))
        found = super().forward(rows if hidden_states.dim() == 2 else rows[None], *others)
        return _cut(found, count + missing, count) if missing else found


def _cut(found, rows: int, count: int):
    """The results of the first `count` rows."""
    if isinstance(found, (tuple, list)):
        return type(found)(_cut(part, rows, count) for part in found)
    if isinstance(found, torch.Tensor) and rows in found.shape[:2]:
        return found.narrow(found.shape.index(rows), 0, count)
    return found


def use_steady_routers(model: nn.Module) -> None:
    """Fill up the routers of a model on a CPU in 16 bit, where that does what it is for."""
    if getattr(model, "dtype", None) in (torch.bfloat16, torch.float16) and model.device.type == "cpu" and hasattr(model, "config"):
        for router, dims in steady_routers(model).values():
            if not isinstance(router, SteadyRouter):
                put_beneath(router, SteadyRouter, dims=dims)


def steady_routers(model: nn.Module, tiled: Iterable[str] = ()) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Routers that can be filled up, or are, by name, with the numbers of dimensions that they take. tiled: as in `routers`."""
    size = model.config.get_text_config().hidden_size
    found = {name: (router, steady_dims(router, size, model.dtype)) for name, router in routers(model, tiled).items()}
    return {name: each for name, each in found.items() if each[1]}


def routers(model: nn.Module, tiled: Iterable[str]) -> dict[str, nn.Module]:
    """The modules beside experts in which torch multiplies, by name. tiled: names of layers that go into tiles."""
    known, found = dict(model.named_modules()), {}
    places = [name.rpartition(".")[0] for name, module in known.items() if isinstance(module, Experts) or expert_projections(module)]
    for name, module in known.items():
        dense = not isinstance(module, (MXMatrix, Experts)) and name not in tiled and any(part is not None and part.dim() == 2 for part in module._parameters.values())
        place = next((place for place in places if name.startswith(f"{place}.")), None)
        if dense and place is not None and not expert_projections(module):
            own = f"{place}.{name[len(place) + 1 :].partition('.')[0]}"
            found[own] = known[own]
    return found


@torch.no_grad()
def steady_dims(router: nn.Module, size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """For which numbers of dimensions (2 or 3) of its input, of width `size`, a router that is filled up gives what its own class gives, every row the same
    bits at every number of rows. None for what is no router."""
    if isinstance(router, SteadyRouter):
        return router.dims
    if isinstance(router, Beneath) or any(isinstance(part, Experts) for part in router.modules()):
        return ()
    made = beneath(type(router), SteadyRouter, (("dims", (2, 3)),))
    other, rest = made.__new__(made), len(inspect.signature(router.forward).parameters) - 1
    vars(other).update(vars(router))
    x = torch.randn(1, max(WIDTHS), size, generator=torch.Generator("cpu").manual_seed(0)).to(dtype)
    try:
        others = [torch.zeros(max(part.shape[0] for part in router.parameters()))] * rest  # a bias of the choice, mostly
        return tuple(dim for dim, shaped in ((2, x[0]), (3, x)) if _is_steady(router.forward, other.forward, shaped, others))
    except Exception:  # of whatever kind: a router of another kind
        return ()


def _is_steady(own: Callable, filled: Callable, x: torch.Tensor, others: list[torch.Tensor]) -> bool:
    whole, stock = _tensors(filled(x, *others)), _tensors(own(x, *others))
    if not whole or [(a.shape, a.dtype) for a in whole] != [(a.shape, a.dtype) for a in stock] or any(x.shape[-2] not in a.shape[:2] for a in stock):
        return False
    axis = 0 if whole[0].shape[0] == x.shape[-2] else 1
    return all(torch.equal(a, b.narrow(axis, 0, width)) for width in WIDTHS for a, b in zip(_tensors(filled(x.narrow(-2, 0, width), *others)), whole))


def _tensors(found) -> list[torch.Tensor]:
    return [part for part in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(part, torch.Tensor)]
