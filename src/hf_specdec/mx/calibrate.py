"""What a model's layers are given on calibration text, measured stage by stage, so that rounding can make up for its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import nn

from .codec import round_to_integers
from .experts import ExpertWeights
from .gptq import Inputs
from .plan import Choice
from .quality import evaluating

MEMORY = 4.0  # GiB of Gram matrices in a stage, at most
CALIBRATED = "calibrated"
UNSEEN = "no calibration text reached it: rounded to nearest"
EXPERTS = "experts are rounded to nearest"


class _Enough(Exception):
    """The rest of a pass has nothing more to tell."""


def calibrated(
    model: nn.Module,
    choices: list[Choice],
    sequences: list[torch.Tensor],
    activations: str | None = None,
    progress: Callable[[list, str], Iterable] = lambda sequences, text: sequences,
) -> Iterator[tuple[Choice, Inputs | None, str]]:
    """All of `choices`, each with its inputs on `sequences` (int64 `[1, n]` each), None without, and a note for the report.

    Layers come in the order in which the model calls them, as many in a stage as have room for their Gram matrices in `MEMORY`. A
    stage is measured when its first layer is asked for, with the layers of earlier stages as the caller has left them. activations: of
    layers whose format goes with them, the inputs are rounded before they count.
    """
    yield from ((choice, None, "") for choice in choices if not loses(choice))
    calls, source = _trace(model, choices, sequences[0], activations)
    experts = [choice for choice in choices if loses(choice) and isinstance(choice.module, ExpertWeights)]
    stages = _stages(_in_order([choice for choice in choices if loses(choice) and choice not in experts], calls, source), source)
    choices.clear()  # who compresses a layer is the last to hold it
    for number, stage in enumerate(stages, 1):
        grams, known = _measure(model, stage, source, calls, progress(sequences, f"Calibrating, stage {number} of {len(stages)}"), activations), {}
        while stage:
            name = source.get(stage[0].name, stage[0].name)
            if name in grams:
                known[name] = Inputs.of(grams.pop(name))
            yield stage.pop(0), known.get(name), CALIBRATED if name in known else UNSEEN
    while experts:
        yield experts.pop(0), None, EXPERTS


def loses(choice: Choice) -> bool:
    """Whether the layer is rounded to an MX format."""
    return choice.format is not None and not choice.format.is_dense


def _trace(model: nn.Module, choices: list[Choice], ids: torch.Tensor, activations: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Names of the Linear layers as a pass calls them; and of those that lose, the first one that is given the same tensor and rounds it, or not,
    as it does (none at all, if a pass calls a layer twice)."""
    calls, source, last = [], {}, {}
    rounded = {choice.name: bool(activations and choice.format.fits_int8) for choice in choices if loses(choice)}

    def note(name: str, x: torch.Tensor) -> None:
        calls.append(name)
        if name in rounded:
            if x is not last.get(rounded[name], (None,))[0]:
                last[rounded[name]] = x, name
            source[name] = last[rounded[name]][1]

    _run(model, {choice.name: choice.module for choice in choices if isinstance(choice.module, nn.Linear)}, note, [ids])
    return calls, source if len(set(calls)) == len(calls) else {}


def _in_order(choices: list[Choice], calls: list[str], source: dict[str, str]) -> list[Choice]:
    """In the order of their first calls; what that pass has not called (an expert) stays behind what is before it in the model."""
    first, keys, at = {name: i for i, name in reversed(list(enumerate(calls)))}, {}, -1
    for choice in choices:
        at = first.get(source.get(choice.name, choice.name), at)
        keys[choice.name] = at, choice.name not in first
    return sorted(choices, key=lambda choice: keys[choice.name])


def _stages(choices: list[Choice], source: dict[str, str]) -> list[list[Choice]]:
    """In parts whose Gram matrices take `MEMORY` at most, or are alone."""
    stages: list[list[Choice]] = []
    room = 0.0
    for choice in choices:
        own = source.get(choice.name, choice.name) == choice.name
        size = choice.module.in_features**2 * 4 / 2**30 if own else 0.0
        if own and size > room or not stages:
            stages.append([])
            room = MEMORY
        stages[-1].append(choice)
        room -= size
    return stages


def _measure(model, stage: list[Choice], source: dict[str, str], calls: list[str], sequences: Iterable[torch.Tensor], activations: str | None):
    """The Gram matrices, float32 `[K, K]`, of those layers of the stage that are the first ones with their inputs, by name."""
    grams: dict[str, torch.Tensor] = {}
    own = {choice.name: choice for choice in stage if source.get(choice.name, choice.name) == choice.name}

    def add(name: str, x: torch.Tensor) -> None:
        if name not in own:
            raise _Enough
        if not x.numel():
            return
        x = round_to_integers(x) if activations and own[name].format.fits_int8 else x
        x = x.reshape(-1, x.shape[-1]).float()
        grams[name] = grams[name].addmm_(x.T, x) if name in grams else x.T @ x

    last = max((calls.index(name) for name in own if name in calls), default=len(calls))
    after = calls[last + 1 : last + 2] if source else []
    _run(model, {name: choice.module for name, choice in own.items()} | {name: model.get_submodule(name) for name in after}, add, sequences)
    for name, gram in grams.items():
        if not bool(gram.isfinite().all()):
            raise ValueError(f"calibration: inputs of {name} hold a NaN or an infinity: run the model in a wider dtype.")
    return grams


def _run(model: nn.Module, layers: dict[str, nn.Module], hook: Callable[[str, torch.Tensor], None], sequences: Iterable[torch.Tensor]) -> None:
    """The model on each sequence, and `hook` on each layer's name and input."""
    with ExitStack() as stack, torch.no_grad(), evaluating(model):
        for name, layer in layers.items():
            call = partial(_call, hook, name)
            stack.callback(layer.register_forward_pre_hook(call, with_kwargs=True).remove)
        for ids in sequences:
            with suppress(_Enough):
                read(model, ids)


def read(model: nn.Module, ids: torch.Tensor):
    """What the model returns for token ids `[1, n]`; an encoder-decoder has them on both sides."""
    sides = ("input_ids", "decoder_input_ids") if getattr(model.config, "is_encoder_decoder", False) else ("input_ids",)
    return model(**dict.fromkeys(sides, ids.to(model.get_input_embeddings().weight.device)), use_cache=False)


def _call(hook, name: str, layer: nn.Module, args: tuple, kwargs: dict) -> None:
    hook(name, args[0] if args else kwargs["input"])
