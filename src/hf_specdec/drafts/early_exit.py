"""Self-speculation: some of the target's own layers are the draft. Zhang et al. 2023 (Draft & Verify, arXiv 2309.08168), which skips
layers; Elhoushi et al. 2024 (LayerSkip, arXiv 2404.16710), which leaves after the first ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .. import compat, parts
from ..lockstep import in_stages
from ..theory import walltime_improvement
from .inner import refuse_encoder
from .progress import progress
from .target_cache import TargetCacheDraft


class EarlyExitDraft(TargetCacheDraft):
    """Drafts K tokens with some of the layers of `target`, its own norm and its own head. There is no second copy of anything: the
    weights are the target's, and so is the cache. A layer that is kept reads the keys and values that the target's last pass has
    left for the committed tokens, and what it writes for drafted ones is overwritten by the target's next pass. For the first n
    layers these are the very numbers the layer would have made itself. The draft needs no prompt pass of its own.

    layers: an int n for the first n layers, or the indices of those to keep, ascending.

    For a target whose layers are a list of `num_hidden_layers` blocks. A model that was not trained for it seldom agrees with
    itself after half its layers: `search` says what is to be had.
    """

    name = "early_exit"

    def __init__(self, target: PreTrainedModel, layers: int | Sequence[int]):
        refuse_encoder(target, "target")
        super().__init__(some_layers(compat.unwrap(target), layers), target)


def some_layers(model: PreTrainedModel, layers: int | Sequence[int]) -> PreTrainedModel:
    """A view of `model` that runs some of its layers, its modules and weights; `model` is left alone. With a cache of transformers, which
    counts layers, it does not run: pass ours, or use_cache=False.

    ValueError where `layers` is out of range, or the layers cannot be found."""
    config = model.config.get_text_config()
    for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if getattr(config, name, None):
            raise ValueError(f"target: {type(model).__name__} has {name}={getattr(config, name)}, so its layers do not run without the others; use another draft.")
    if compat.traits_of(model, "target").states:
        raise ValueError(f"target: {type(model).__name__} carries states from token to token, of which its first layers have some only; use another draft.")
    if in_stages(model):
        raise ValueError("target: its layers lie in several processes, one after the other (pipeline parallel), so some of them are no draft; use another one.")
    total = config.num_hidden_layers
    try:
        path, _ = parts.decoder_layers(model)
    except ValueError as error:
        raise ValueError(f"target: {type(model).__name__} has no list of its {total} layers; use another draft.") from error
    kept = list(range(layers)) if type(layers) is int and 1 <= layers <= total else list(layers) if isinstance(layers, (list, tuple)) else []
    if not kept or any(type(i) is not int or not 0 <= i < total for i in kept) or kept != sorted(set(kept)):
        raise ValueError(f"layers={layers!r} must be an int in 1..{total}, or ascending indices in 0..{total - 1}, each once.")
    fewer = copy.deepcopy(config)
    fewer.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        fewer.layer_types = [config.layer_types[i] for i in kept]
    *above, last = path.split(".")
    view = part = _view(model, config, fewer)
    for name in above:
        setattr(part, name, _view(getattr(part, name), config, fewer))
        part = getattr(part, name)
    setattr(part, last, torch.nn.ModuleList([getattr(part, last)[i] for i in kept]))
    return view


def _view(module: torch.nn.Module, config, fewer) -> torch.nn.Module:
    """A module with the same parts as `module`, which may then be exchanged one by one."""
    other = copy.copy(module)
    vars(other)["_modules"] = dict(vars(module)["_modules"])
    if getattr(module, "config", None) is config:
        other.config = fewer
    return other


@dataclass(frozen=True)
class Subset:
    """layers: the indices to keep. agreement: how often they and the whole target have the same argmax. cost: of a drafted token, in
    target steps, by weights read. k, speedup: the K with the highest predicted speed-up (Leviathan et al. 2023, Theorem 3.8), and it."""

    layers: tuple[int, ...]
    agreement: float
    cost: float
    k: int
    speedup: float


@torch.no_grad()
def search(target: PreTrainedModel, texts: Sequence[Sequence[int]], patience: int = 4, k_max: int = 16) -> Subset:
    """The best subset found by leaving out one layer after another, each time the one whose loss costs least agreement, until the
    predicted speed-up has not risen `patience` times in a row. At most L^2 / 2 passes over `texts`, token ids of prompts with
    answers, which are read with keys and values of the subset's own (in use, the draft reads the target's)."""
    model = compat.unwrap(target)
    if not texts or any(len(text) < 2 for text in texts):
        raise ValueError("texts: expected at least one list of at least two token ids.")
    ids = [torch.tensor([list(text)], device=model.device) for text in texts]
    if not all(0 <= int(row.min()) <= int(row.max()) < model.get_input_embeddings().num_embeddings for row in ids):
        raise ValueError("texts: ids outside the model's vocabulary; encode them with its own tokenizer.")
    wanted = [model(input_ids=row, use_cache=False).logits.argmax(-1) for row in ids]
    size = sum(p.nbytes for p in model.parameters())

    def judged(layers: tuple[int, ...]) -> Subset:
        view = some_layers(model, list(layers))
        same = [view(input_ids=row, use_cache=False).logits.argmax(-1) == best for row, best in zip(ids, wanted)]
        agreement = float(torch.cat(same, dim=1).float().mean())
        cost = sum(p.nbytes for p in view.parameters()) / size
        k = max(range(1, k_max + 1), key=lambda k: walltime_improvement(agreement, k, cost))
        return Subset(layers, agreement, cost, k, walltime_improvement(agreement, k, cost))

    best = now = judged(tuple(range(model.config.get_text_config().num_hidden_layers)))
    since = 0
    with progress("Leaving out layers", range(len(now.layers) - 1)) as steps:
        for _ in steps:
            now = max((judged(now.layers[:i] + now.layers[i + 1 :]) for i in range(len(now.layers))), key=lambda found: found.agreement)
            best, since = (now, 0) if now.speedup > best.speedup else (best, since + 1)
            if since >= patience:
                break
    return best
