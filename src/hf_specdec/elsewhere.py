"""Where a cache that is not simply on the device has its keys and values: in the host's memory, or quantised."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, QuantizedCache

from . import compat
from .caches import offloads, reaches
from .offloaded_cache import Host
from .quantised_cache import Quantised

Elsewhere = Host | Quantised


def elsewhere(cache: Any, model: PreTrainedModel) -> Elsewhere | None:
    """Where the passes of `model` are to have what a call with this `cache` of transformers keeps there."""
    model = compat.unwrap(model)
    if isinstance(cache, QuantizedCache):
        return Quantised(cache)
    device = compat.device_of(model)
    if not offloads(cache) or device.type == "cpu":
        return None
    return Host(device, {} if model.config.is_encoder_decoder else reaches(model.config))
