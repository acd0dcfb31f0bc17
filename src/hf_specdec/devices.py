"""What a device can do."""

from __future__ import annotations

from functools import lru_cache

import torch

NAMED = ("cpu", "cuda", "meta")  # kinds of devices with numbers of float64


def has_float64(device: torch.device) -> bool:
    """Whether the device has numbers of float64: Apple's GPUs ("mps") have none, of Intel's ("xpu") some."""
    return device.type in NAMED or _has_float64(device.type, device.index)


@lru_cache(maxsize=None)
def _has_float64(kind: str, index: int | None) -> bool:
    if kind == "xpu":
        return bool(getattr(torch.xpu.get_device_properties(index or 0), "has_fp64", False))
    return kind != "mps"


def seat_of(laws: torch.device) -> torch.device:
    """Where laws that are computed on a device are judged and drawn from: there, or on the host where the device has no float64."""
    return laws if has_float64(laws) else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type not in ("cpu", "meta"):
        getattr(torch, device.type).synchronize(device)
