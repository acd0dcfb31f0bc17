"""Which layers of a model are compressed, and why the others are not."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from ..parts import read_once
from .experts import Experts, ExpertWeights, expert_projections
from .formats import BLOCK, Format, get_format
from .kernels.cpu import ROWS
from .linear import MXMatrix
from .readers import looks_at_ties, weights_read_by

READ = "the model reads its weight itself"
SHARED = "its weight is another layer's, too"
SEES = "it reads images or sounds, once a prompt"
HEAD = "the output head: pass lm_head=FORMAT to compress it"
ON_GPU = "experts have kernels on a CPU alone"
RESCALED = "the model halves its weight in place (not with rescale_every = 0 in its config from the start)"
TIED = "the model computes something else where its head is not the embedding"


@dataclass(frozen=True)
class Choice:
    """One weight matrix (of experts, those of all of them): the format it gets, or None and the reason why it stays dense."""

    name: str
    module: nn.Module | ExpertWeights
    format: Format | None
    reason: str = ""


def plan(
    model: nn.Module,
    format: str | Format,
    skip: Iterable[str],
    lm_head: str | Format | None,
    stored: bool = False,
    layer_formats: Mapping[str, str | Format] | None = None,
    experts: bool = True,
) -> list[Choice]:
    """A choice for every Linear layer, and for other modules that hold large matrices, in the model's own order.

    `skip` has module names: whole ones, parts of them (`down_proj`, `mlp`, `layers.0`: all that is inside, too) or patterns (`*.layers.0.*`);
    a warning names those that no module has. `layer_formats` has such names, too, with a format for what they name instead of `format`: of those that fit
    a layer the last one counts, and ValueError refuses a name of the head alone. The output head (a classifier's, too) is left dense unless `lm_head` names a
    format for it, and so is a layer whose weight the model reads itself, or that reads images or sounds. stored: the model is that of a compressed checkpoint, whose `skip` has all of these by
    name (`recorded`); with the names of the class that was saved, whose base model or headed model this one may be. experts: without, they stay dense.
    """
    fmt, head_format = get_format(format), None if lm_head is None else get_format(lm_head, "lm_head")
    patterns, own_formats, modules, heads = check_skip(skip), check_layer_formats(layer_formats), dict(model.named_modules()), heads_of(model)
    if stored:
        head_format = None if _has_new_head(model) else head_format
        patterns = [each for name in patterns for each in _as_saved(name, model)]
        own_formats = _in_order((each, own) for name, own in own_formats.items() for each in _as_saved(name, model))
    else:
        experts_of = {own: part for name, module in modules.items() for own, part in projections(name, module).items()}
        _check_names(patterns, own_formats, modules | experts_of, heads)
    bound = {} if stored else _bound(model, heads)
    weighing = {own: part for name, module in modules.items() if _weighs(module) for own, part in (projections(name, module) if experts else {}).items() or [(name, module)]}
    return [_choose(name, part, _last(name, own_formats, fmt), patterns, heads, head_format, bound) for name, part in weighing.items()]


def projections(name: str, module: nn.Module) -> dict[str, ExpertWeights]:
    """The matrices of a module of experts, by name."""
    return {f"{name}.{part.name}" if name else part.name: part for part in expert_projections(module)}


def _check_names(patterns: Iterable[str], own_formats: dict[str, Format], modules: dict[str, nn.Module | ExpertWeights], heads: set[int]) -> None:
    """A warning for names that no module has, ValueError for a format of the head alone."""
    found = {pattern: [name for name in modules if _matches(name, (pattern,))] for pattern in (*patterns, *own_formats)}
    for argument, names, effect in (("skip", patterns, "nothing is left out for it"), ("layer_formats", own_formats, "nothing gets its format")):
        unknown = ", ".join(repr(name) for name in names if not found[name])
        if unknown:
            warnings.warn(f"{argument}: the model has no module {unknown}; {effect}.", stacklevel=4)
    for pattern, own in own_formats.items():
        if found[pattern] and all(id(modules[name]) in heads for name in found[pattern]):
            raise ValueError(f"layer_formats: {pattern!r} is the output head, which has an argument of its own: pass lm_head={own.name!r}.")


def _last(name: str, own_formats: dict[str, Format], otherwise: Format) -> Format:
    return next((own for pattern, own in reversed(own_formats.items()) if _matches(name, (pattern,))), otherwise)


def _as_saved(pattern: str, model: nn.Module) -> tuple[str, ...]:
    """The pattern as it is, with the prefix that a headed model's names have, and without it."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    return (pattern, prefix + pattern, pattern.removeprefix(prefix)) if prefix != "." else (pattern,)


def _has_new_head(model: nn.Module) -> bool:
    """Whether the model is a classifier on a checkpoint of something else: its head is not the one that was stored."""
    saved = getattr(getattr(model, "config", None), "architectures", None)
    return bool(saved) and type(model).__name__ not in saved and _output_head(model) is None


def _bound(model: nn.Module, heads: set[int]) -> dict[int, str]:
    """Layers, by id, that are more to the model than something to call, and what."""
    bound, modules = {}, dict(model.named_modules())
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        layers = [modules.get(name.removesuffix(".weight")) for name in pair]
        if all(isinstance(layer, nn.Linear) for layer in layers):
            bound |= dict.fromkeys(map(id, layers), SHARED)
    bound |= {id(owner._modules.get(name)): READ for owner in model.modules() for name in weights_read_by(type(owner))}
    if getattr(getattr(model, "config", None), "rescale_every", 0):  # RWKV
        bound |= {id(module): RESCALED for name, module in modules.items() if name.endswith((".attention.output", ".feed_forward.value"))}
    if looks_at_ties(type(model)) and getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        bound |= dict.fromkeys(heads, TIED)
    return bound | dict.fromkeys(read_once(model), SEES)


def recorded(choices: Iterable[Choice], skip: Iterable[str]) -> list[str]:
    """`skip` as far as it fits layers, with the layers that stay dense because the model reads their weights, or for where they are: another version of the
    model, elsewhere, may not."""
    return [*fitting(choices, skip), *(choice.name for choice in choices if choice.reason in (READ, RESCALED, SHARED, TIED, SEES, ON_GPU)
                                       and isinstance(choice.module, (nn.Linear, ExpertWeights)) and choice.name not in skip)]


def fitting(choices: Iterable[Choice], patterns: Iterable[str]) -> list[str]:
    """The patterns that fit a layer: others might fit one by the name that it has in another class of the model (`_as_saved`)."""
    return [pattern for pattern in patterns if any(_matches(choice.name, (pattern,)) for choice in choices)]


def _choose(name, module, fmt, patterns, heads, head_format, bound) -> Choice:
    if isinstance(module, MXMatrix):
        return Choice(name, module, None, f"already {module.format.name}")
    experts = isinstance(module, ExpertWeights)
    if bound.get(id(module.owner if experts else module)) == SEES:
        return Choice(name, module, None, SEES)
    if experts:
        return _choose_experts(name, module, fmt, patterns)
    if not isinstance(module, nn.Linear):
        return Choice(name, module, None, f"{type(module).__name__} is no nn.Linear")
    if type(module) is not nn.Linear:
        return Choice(name, module, None, f"{type(module).__module__}.{type(module).__name__} is a Linear of its own kind")
    if id(module) in bound:
        return Choice(name, module, None, bound[id(module)])
    if name in patterns:
        return Choice(name, module, None, "skipped on request")
    if id(module) in heads:
        if head_format is None:
            return Choice(name, module, None, HEAD)
        fmt = head_format
    elif _matches(name, patterns):
        return Choice(name, module, None, "skipped on request")
    if not module.weight.numel():
        return Choice(name, module, None, "it has no numbers")
    if module.in_features % BLOCK:
        return Choice(name, module, None, f"{module.in_features} inputs are no multiple of {BLOCK}")
    return Choice(name, module, fmt)


def _choose_experts(name: str, module: ExpertWeights, fmt: Format, patterns: Iterable[str]) -> Choice:
    _, n, k = module.shape
    if _matches(name, patterns):
        return Choice(name, module, None, "skipped on request")
    if k % BLOCK:
        return Choice(name, module, None, f"{k} inputs are no multiple of {BLOCK}")
    if n % ROWS:
        return Choice(name, module, None, f"{n} outputs of an expert are no multiple of {ROWS}")
    if module.device not in ("cpu", "meta"):
        return Choice(name, module, None, ON_GPU)
    return Choice(name, module, fmt)


def _weighs(module: nn.Module) -> bool:
    """Linear layers, and modules with weight matrices of their own (experts, convolutions, what another library has quantised), but no embeddings, and no experts of
    which nothing is dense."""
    if isinstance(module, (nn.Linear, MXMatrix)):
        return True
    if isinstance(module, nn.Embedding) or isinstance(module, Experts) and not expert_projections(module):
        return False
    return any(p.dim() >= 2 and p.numel() >= 32 * BLOCK for p in module._parameters.values() if p is not None)


def _output_head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    try:
        return find() if find is not None else None
    except (AttributeError, NotImplementedError):
        return None


def heads_of(model: nn.Module) -> set[int]:
    """The output head; of a model without one (a classifier), what is not part of its base model."""
    head = _output_head(model)
    if head is not None:
        return {id(head)}
    base = set(map(id, getattr(model, "base_model", model).modules()))
    return {id(module) for name, module in model.named_modules() if id(module) not in base or name.rpartition(".")[2] == "lm_head"}


def check_skip(skip: Iterable[str]) -> tuple[str, ...]:
    """`skip` as a tuple. Raises TypeError for a lone string and for what holds no names."""
    names = tuple(skip) if isinstance(skip, Iterable) and not isinstance(skip, str) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f'skip must be a sequence of module names, such as ("down_proj",), not {skip!r}.')
    return names


def check_layer_formats(given: Mapping[str, str | Format] | Iterable | None) -> dict[str, Format]:
    """Patterns and formats in their order; None is none. Also takes pairs, as a saved config has them: JSON with sorted keys keeps no order.

    Raises TypeError for what holds no names with formats, ValueError for an unknown format.
    """
    pairs = given.items() if isinstance(given, Mapping) else () if given is None else given
    pairs = list(pairs) if isinstance(pairs, Iterable) and not isinstance(pairs, str) else [None]
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise TypeError(f'layer_formats must be a dict of module names and formats, such as {{"down_proj": "mxint8"}}, not {given!r}.')
    return _in_order((name, get_format(own, f"layer_formats[{name!r}]")) for name, own in pairs)


def _in_order(pairs: Iterable[tuple[str, Format]]) -> dict[str, Format]:
    """A dict in which a name that comes again stands where it came last."""
    found: dict[str, Format] = {}
    for name, own in pairs:
        found.pop(name, None)
        found[name] = own
    return found


def check_some(choices: list[Choice]) -> None:
    """ValueError with the reasons, if nothing would be compressed; that of the head alone is said where there is no other."""
    if any(choice.format for choice in choices):
        return
    known = nn.Linear, MXMatrix, ExpertWeights
    others = sorted({type(choice.module).__name__ for choice in choices if not isinstance(choice.module, known)})
    reasons = {choice.reason for choice in choices if isinstance(choice.module, known)}
    parts = [f"its layers are {' and '.join(others)}, which is not supported (nn.Linear is)"] if others else []
    parts += sorted(reasons - {HEAD} if others or len(reasons) > 1 else reasons)
    raise ValueError(f"model has no layer that can be compressed: {', '.join(parts) or 'it has no nn.Linear layers'}.")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(f".{p}." in f".{name}." or fnmatch.fnmatchcase(name, p) for p in patterns)
