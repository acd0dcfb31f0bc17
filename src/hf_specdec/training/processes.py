"""Runs of several processes (torchrun, accelerate launch): one of them writes, the others wait for its files."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch

from ..hints import install

PATIENCE = timedelta(days=7)  # for what the main process makes, such as all of the training text


def need_accelerate():
    """The package accelerate, which only training needs; ImportError with the remedy."""
    try:
        import accelerate
    except ImportError:
        raise ImportError(f"training needs the package accelerate: {install('train')}") from None
    return accelerate


def join(device: torch.device | str | None = None):
    """This process among those that were started together, as accelerate sees it; None if it is alone. `device`: of the models,
    without it the GPU if there is one, which is this process's own from here on."""
    if int(os.environ.get("WORLD_SIZE") or 1) < 2:
        return None
    cpu = not torch.cuda.is_available() if device is None else torch.device(device).type == "cpu"
    return need_accelerate().PartialState(cpu=cpu, timeout=PATIENCE)


def is_main(device: torch.device | str | None = None) -> bool:
    """Whether this process is the one that writes."""
    state = join(device)
    return state is None or state.is_main_process


def main_first(device: torch.device | str | None = None) -> AbstractContextManager:
    """The main process runs the block, then the others, which find what it has made."""
    state = join(device)
    return nullcontext() if state is None else state.main_process_first()
