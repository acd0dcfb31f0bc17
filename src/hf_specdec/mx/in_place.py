"""The layers of a loaded model, compressed in place: what `compress` does, and what loading with calibration ends with."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn
from transformers import PreTrainedModel

from ..lockstep import shared_by_processes
from .beside import use_kernels
from .calibrate import calibrated, loses
from .calibration import sequences_of
from .experts import ExpertWeights
from .plan import ON_GPU, Choice
from .report import CompressionReport
from .swap import FLOAT64, NOT_FINITE, compress_layer, own_config
from .ties import untie

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
ON_META = "{}.weight is on the meta device: load the model's weights, and offload none, before compressing it."
OFFLOADED = "{} would be offloaded, which MX layers cannot be: pass a device_map with devices alone."


def compress_in_place(
    model: nn.Module,
    choices: list[Choice],
    scale_rule: str,
    activations: str | None = None,
    sequences: list[torch.Tensor] | None = None,
    measure: bool = True,
    fill: Callable[[Choice], Choice] | None = None,
) -> None:
    """Compress the layers of `choices`, which is empty afterwards; `model.mx_report` says what was done. sequences: calibration, int64 `[1, n]` each.
    fill: gives a layer its numbers as its turn comes, and says what is then chosen."""
    names, reports, console = [choice.name for choice in choices], {}, Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        rest = _plain(choices, fill) if sequences is None else calibrated(model, choices, sequences, activations, progress=partial(_watch, bar))
        for choice, inputs, note in bar.track(rest, len(names), description="Compressing"):
            reports[choice.name] = compress_layer(model, choice, scale_rule, measure, activations, inputs, note)
    own_config(model)
    untie(model)
    use_kernels(model)
    model.mx_report = CompressionReport([reports[name] for name in names])


def _plain(choices: list[Choice], fill: Callable[[Choice], Choice] | None) -> Iterator[tuple[Choice, None, str]]:
    while choices:
        if fill is not None:
            choices[0] = fill(choices[0])
        yield choices.pop(0), None, ""  # nothing else holds the dense layer


def _watch(bar: Progress, sequences: list[torch.Tensor], text: str) -> Iterator[torch.Tensor]:
    task = bar.add_task(text)
    yield from bar.track(sequences, task_id=task)
    bar.remove_task(task)


def calibration_for(model: nn.Module, calibration: Iterable, choices: list[Choice]) -> list[torch.Tensor]:
    """`sequences_of`, and ValueError where no layer is rounded."""
    if not any(map(loses, choices)):
        raise ValueError("calibration has no meaning where nothing is rounded: bf16 and fp32 keep the numbers as they are.")
    return sequences_of(model, calibration)


def check_whole(model: nn.Module) -> None:
    """ValueError for a model of which this process has a share alone."""
    if isinstance(model, PreTrainedModel) and shared_by_processes(model):
        raise ValueError(f"model: several processes run this {type(model).__name__} together (tensor, expert or pipeline parallel), and MX weights are for one that has it "
                         "whole: load it without distributed_config.")


def check_devices(choices: list[Choice], device_map) -> None:
    """ValueError for layers that a `device_map` of names sends to disk; of others, such as "auto", nothing is known yet."""
    for choice in choices:
        if choice.format is not None and isinstance(device_map, dict) and _place(choice.name, device_map) in ("disk", "meta"):
            raise ValueError(OFFLOADED.format(choice.name))


def leave_experts_dense(choices: list[Choice], device_map, held: Container[str] = ()) -> list[Choice]:
    """The choices, but that experts stay dense which a `device_map` sends to a GPU, if they are not those of `held`."""
    return [replace(choice, format=None, reason=ON_GPU) if isinstance(choice.module, ExpertWeights) and choice.format is not None and choice.name not in held
            and on_gpu(choice.name, device_map) else choice for choice in choices]


def _place(name: str, device_map) -> str | None:
    if isinstance(device_map, dict):
        device_map = next((device for place, device in reversed(device_map.items()) if not place or f"{name}.".startswith(f"{place}.")), None)
    return None if device_map is None else str(device_map)


def on_gpu(name: str, device_map) -> bool:
    """Whether a `device_map` sends the layer of that name to a GPU."""
    place = _place(name, device_map)
    return torch.cuda.is_available() if place in AUTOMATIC else place not in (None, "cpu", "disk", "meta")


def check_weights(choices: list[Choice], on_meta: str = ON_META) -> None:
    """ValueError for weights that cannot be compressed, by name: of another kind of tensor, on the meta device, of float64, and with numbers that are not finite."""
    for choice in choices:
        if choice.format is None:
            continue
        weight, name = choice.module.weight, choice.name if isinstance(choice.module, ExpertWeights) else f"{choice.name}.weight"
        if type(weight.data) is not torch.Tensor:
            raise ValueError(f"{name} is a {type(weight.data).__name__}, which another library has made of it: compress the model as it was loaded.")
        if weight.is_meta:
            raise ValueError(on_meta.format(choice.name))
        if weight.dtype == torch.float64:
            raise ValueError(FLOAT64.format(f"{name} is {weight.dtype}"))
        if not bool(weight.isfinite().all()):
            raise ValueError(NOT_FINITE.format(name))
