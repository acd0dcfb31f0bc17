"""Numbers on their way from the host to a device."""

from __future__ import annotations

import numpy as np
import torch


def upload(values, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`values` (numbers, lists of them, a NumPy array or a tensor on the CPU) as a tensor on `device`. On a GPU by way of pinned memory: a copy out of
    any other waits until the device has done all that it was told, which is then no longer ahead of the host."""
    if isinstance(values, torch.Tensor):
        made = values
    else:
        made = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype, device="cpu")
    if torch.device(device).type != "cuda":
        return made.to(device)
    return made.contiguous().pin_memory().to(device, non_blocking=True) if made.numel() else torch.empty_like(made, device=device)
