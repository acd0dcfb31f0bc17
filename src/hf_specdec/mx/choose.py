"""`choose_formats`: which layers get more bits than others, by what rounding each of them does to the model's predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn import functional as F

from ..hints import what
from .calibrate import calibrated, read
from .calibration import sequences_of
from .compress import check_model
from .formats import DEFAULT_RULE, Format, check_activations, check_rule, get_format
from .experts import ExpertMatrix, ExpertWeights, expert_projections, watched
from .gptq import compensated
from .linear import MXLinear, MXMatrix
from .packed import quantize
from .plan import Choice, plan, projections
from .quality import evaluating

CHOICES = ("mxfp4_e2m1", "mxfp6_e2m3", "mxint8")


def choose_formats(
    model: nn.Module,
    bits: float,
    calibration: Iterable,
    formats: Sequence[str | Format] = CHOICES,
    scale_rule: str = DEFAULT_RULE,
    skip: Iterable[str] = (),
    activations: str | None = None,
) -> dict[str, str]:
    """A format for each layer that `compress` would compress but the head, for its `layer_formats`: at most `bits` per weight on average, scales included,
    with as little expected loss as may be.

    calibration, scale_rule, skip, activations: as in `compress`, which is to be called with the same ones. formats: what there is to choose from. The model, dense,
    is left as it is; beside it, its layers are held in all of the formats, packed.

    What a format costs a layer is estimated as the KL divergence per token, in nats, to second order in the change of its weights (`costs`); costs of several
    layers add up. From the smallest format on, the step that gains most per bit is taken as long as one fits: steps along the lower convex hull of a layer's
    costs, which is optimal up to the last step (Shoham and Gersho 1988, Efficient bit allocation for an arbitrary set of quantizers, IEEE Trans. ASSP 36(9)).

    Raises ValueError for bits that are fewer than the smallest format's or more than the largest one's, fewer than two formats or two of one size, calibration that
    is empty or not token ids of this model, a model in which nothing can be compressed or that is compressed already; TypeError for a model without logits.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a model, got {what(model)}; load one with from_pretrained.")
    check_rule(scale_rule)
    options = check_bits(bits, formats)
    check_activations(activations, options[0])
    choices = plan(model, options[0], skip, None)
    check_model(model, choices)
    sequences = sequences_of(model, calibration)
    with torch.no_grad(), evaluating(model):
        _logits(model, sequences[0][:, :1])
    found = costs(model, rounded(model, choices, options, sequences, scale_rule, activations), sequences)
    experts = _experts(model)
    sizes = {name: math.prod(experts[name].shape) if name in experts else model.get_submodule(name).weight.numel() for name in found}
    return {name: options[at].name for name, at in allot(found, sizes, [each.bits_per_weight for each in options], bits).items()}


def check_bits(bits: float, formats: Sequence[str | Format]) -> list[Format]:
    """The formats, the smallest one first. Raises ValueError for bits outside of theirs and for formats that leave no choice, TypeError for no sequence."""
    if isinstance(formats, str) or not isinstance(formats, Sequence):
        raise TypeError(f"formats must be a sequence of formats to choose from, such as {CHOICES}, not {formats!r}.")
    options = sorted((get_format(each, "formats") for each in formats), key=lambda each: each.bits_per_weight)
    sizes = [each.bits_per_weight for each in options]
    if len(options) < 2 or len(set(sizes)) < len(options):
        raise ValueError(f"formats={[each.name for each in options]} leaves no choice: give two or more of different sizes.")
    if isinstance(bits, bool) or not isinstance(bits, (int, float)) or not sizes[0] <= bits <= sizes[-1]:
        raise ValueError(f"bits={bits!r} must be a number from {sizes[0]} to {sizes[-1]}, the bits per weight of {options[0].name} and {options[-1].name}.")
    return options


def larger(format: str | Format) -> list[str]:
    """The format, and those of `CHOICES` that take more bits."""
    first = get_format(format)
    return [first.name, *(name for name in CHOICES if get_format(name).bits_per_weight > first.bits_per_weight)]


def allot(costs: dict[str, list[float]], sizes: dict[str, int], bits: Sequence[float], budget: float) -> dict[str, int]:
    """For each layer the place of its format in `bits` (ascending), so that the mean over all `sizes` weights is at most `budget`."""
    chosen = dict.fromkeys(costs, 0)
    left = (budget - bits[0]) * sum(sizes.values())
    steps = [(gain, name, to) for name, own in costs.items() for gain, to in _hull(own, bits, sizes[name])]
    for _, name, to in sorted(steps, key=lambda step: -step[0]):  # stable, and of one layer the gains fall: its steps come in order
        price = (bits[to] - bits[chosen[name]]) * sizes[name]
        if price <= left + 1e-6:
            chosen[name], left = to, left - price
    return chosen


def _hull(costs: Sequence[float], bits: Sequence[float], size: int) -> Iterator[tuple[float, int]]:
    """Steps from each corner of the lower convex hull to the next one: what a bit gains, and where to. Steps that gain nothing are none."""
    at = 0
    while at + 1 < len(bits):
        gains = [(costs[at] - costs[to]) / ((bits[to] - bits[at]) * size) for to in range(at + 1, len(bits))]
        best = max(gains)
        if best <= 0:
            return
        at += 1 + gains.index(best)
        yield best, at


def rounded(
    model: nn.Module, choices: list[Choice], options: Sequence[Format], sequences: list[torch.Tensor], rule: str, activations: str | None = None
) -> dict[str, list[MXMatrix]]:
    """Each layer in each format, by name, as `compress` rounds it with this calibration where it measures all layers in one stage."""
    forms = {}
    for choice, inputs, _ in calibrated(model, choices, sequences, activations, _shown):
        if choice.format is None:
            continue
        weight, kind = choice.module.weight.detach(), ExpertMatrix if isinstance(choice.module, ExpertWeights) else MXLinear
        packed = (quantize(weight.clone(), each, rule) if inputs is None or each.is_dense else compensated(weight, each, rule, inputs) for each in options)
        forms[choice.name] = [kind.from_packed(each, choice.module) for each in packed]
    return forms


def costs(model: nn.Module, forms: dict[str, list[MXMatrix]], sequences: list[torch.Tensor]) -> dict[str, list[float]]:
    """What each layer costs in each form it is given in, by name: nats per token of `sequences` (int64 `[1, n]` each), with all the other layers dense.

    1/2 sum over the rows of (sum over the columns of G E)^2, with E the weight's error and G the gradient, with respect to the weight, of the loss of labels
    sampled from the model's own predictions for a sequence, float32 `[N, K]` both. The mean of the whole sum's square is the Fisher information in that direction,
    the second derivative of the KL divergence (Martens 2020, New insights and perspectives on the natural gradient method, arXiv 1412.1193). The rows of a weight
    are rounded independently of one another, so that the products of different rows are zero in the mean: without them, few sequences do.
    """
    sums, experts = {name: torch.zeros(len(own), dtype=torch.float64) for name, own in forms.items()}, _experts(model)
    changes: dict[tuple[str, int | None], torch.Tensor] = {}

    def add(name: str, x: torch.Tensor, gradient: torch.Tensor, number: int | None = None) -> None:
        weight = (model.get_submodule(name).weight.detach() if number is None else experts[name].expert(number)).float()
        whole = gradient.float().flatten(0, -2).T @ x.float().flatten(0, -2)
        rounded = (each.dequantize() if number is None else each.expert(number, torch.float32) for each in forms[name])
        own = torch.stack([(whole * (weight - each)).sum(1, dtype=torch.float64) for each in rounded])
        changes[name, number] = changes.get((name, number), 0) + own

    for _ in _gradients(model, list(forms), add, _shown(sequences, "Measuring")):
        for (name, _), change in changes.items():
            sums[name] += change.square().sum(1).cpu()
        changes.clear()
    tokens = sum(ids.numel() for ids in sequences)
    return {name: (total / (2 * tokens)).tolist() for name, total in sums.items()}


def _gradients(
    model: nn.Module, names: list[str], hook: Callable[..., None], sequences: Iterable[torch.Tensor]
) -> Iterator[None]:
    """For each sequence `hook` on each layer's name, input and gradient of the loss with respect to its output; of experts on those of each one's tokens, and its number."""
    generator, start = torch.Generator().manual_seed(0), []  # start: where gradients may end, all that comes from token ids
    embeddings = {model.get_input_embeddings(), *(module for module in model.modules() if isinstance(module, nn.Embedding))}
    with ExitStack() as stack, torch.enable_grad(), evaluating(model):
        for embedding in embeddings:
            stack.callback(embedding.register_forward_hook(lambda module, args, out: start.append(out.requires_grad_())).remove)
        experts = _experts(model).keys() & set(names)
        for path, module in model.named_modules():
            if any(f"{path}.{part.name}" in experts for part in expert_projections(module)):
                stack.enter_context(watched(module, partial(_tell, hook, path, experts)))
        for name in [name for name in names if name not in experts]:
            stack.callback(model.get_submodule(name).register_forward_hook(partial(_watch, hook, name), with_kwargs=True).remove)
        for ids in sequences:
            start.clear()
            logits = _logits(model, ids).flatten(0, -2).float()
            labels = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
            torch.autograd.grad(F.cross_entropy(logits, labels.to(logits.device), reduction="sum"), start, allow_unused=True)
            yield


def _experts(model: nn.Module) -> dict[str, ExpertWeights]:
    return {own: part for name, module in model.named_modules() for own, part in projections(name, module).items()}


def _tell(hook, path: str, experts, name: str, number: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
    if f"{path}.{name}" in experts:
        hook(f"{path}.{name}", x, gradient, number)


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = getattr(read(model, ids), "logits", None)
    if logits is None:
        raise TypeError(f"model: {type(model).__name__} predicts nothing (it has no logits): give the model with its head.")
    return logits


def _watch(hook, name: str, layer: nn.Module, args: tuple, kwargs: dict, out: torch.Tensor) -> None:
    if out.requires_grad:
        out.register_hook(partial(hook, name, (args[0] if args else kwargs["input"]).detach().float()))


def _shown(sequences: Iterable, text: str) -> Iterable:
    console = Console(stderr=True)
    return track(sequences, text, console=console, transient=True, disable=not console.is_terminal)
