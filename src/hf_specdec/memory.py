"""How much memory is free, and whether the logits of a pass fit into it."""

from __future__ import annotations

from pathlib import Path

import torch

LARGE = 2**30  # bytes up to which nobody looks


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated: on the GPU, what torch keeps for reuse included, or in this machine and this container; None where it is not told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    if free is None:  # not every kernel counts it
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        return free if limit == "max" else min(free, int(limit) - used)
    except (OSError, ValueError):
        return free


def check_logits(rows: int, nodes: int, vocab: int, itemsize: int, device: torch.device, argument: str) -> None:
    """ValueError if the logits after `nodes` drafted tokens and the root of every row do not fit. argument: what says how many are drafted."""
    row = vocab * itemsize
    needed = rows * (nodes + 1) * row
    free = free_bytes(device) if needed > LARGE else None
    if free is None or needed <= free:
        return
    fits = free // (rows * row) - 1
    smaller = f"{argument} ({fits} would fit)" if fits > 0 else argument
    raise ValueError(f"a pass over {rows} rows with {nodes} drafted tokens each takes {needed / 2**30:.1f} GiB for the logits of {vocab} tokens alone, and "
                     f"{max(free, 0) / 2**30:.1f} GiB are free on {device}. Generate fewer rows at a time, or take a smaller {smaller}.")
