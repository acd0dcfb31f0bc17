"""Models that several processes run together, each a part of every pass (tensor, expert and pipeline parallel): what time or chance decides is decided by the
first of them, so that all go on with passes of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedModel


Number = TypeVar("Number", int, float)


def alone(value: Number) -> Number:
    """What a process that shares no model agrees to."""
    return value


def agreement(models: Iterable[PreTrainedModel], max_time: float | None = None) -> Callable[[Number], Number]:
    """agree(value): the value of the first of the processes that run these models, which all of them have to ask for; `alone` where there is one.

    Raises ValueError for a limit of time, which each process would reach at another token."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return alone
    shared = list(dict.fromkeys(mesh for model in models if (mesh := _mesh(model)) is not None))
    if shared and max_time is not None:
        raise ValueError(f"max_time={max_time!r}: the processes that run this model together would stop at different tokens, and wait for each other for ever. Leave it "
                         "out; max_new_tokens bounds the text.")
    return partial(_first, shared) if shared else alone


def shared_by_processes(model: PreTrainedModel) -> bool:
    """Whether other processes have a share in every pass of the model."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and _mesh(model) is not None


def in_stages(model: PreTrainedModel) -> bool:
    """Whether each of several processes has some of the model's layers."""
    return shared_by_processes(model) and "pp" in (names := _mesh(model).mesh_dim_names or ()) and _mesh(model).size(names.index("pp")) > 1


def _mesh(model: PreTrainedModel):
    """torch's DeviceMesh of the processes that run it together; None for one."""
    mesh = getattr(model, "_device_mesh", None)
    return mesh if mesh is not None and mesh.size() > 1 else None


def _first(meshes: list, value: Number) -> Number:
    told = torch.tensor([value], dtype=torch.int64 if isinstance(value, int) else torch.float64, device=meshes[0].device_type)
    for mesh in meshes:
        for dim, size in enumerate(mesh.shape):  # from the first of every line, then of every column: all have that of the first in the corner
            if size > 1:
                torch.distributed.broadcast(told, group=mesh.get_group(dim), group_src=0)
    return type(value)(told.item())
