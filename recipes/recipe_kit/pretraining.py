"""Training a small causal model from scratch on token ids: enough for a recipe whose weights nobody has published. Resumable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn import functional as F

from hf_specdec.bench.terminal import counting
from hf_specdec.training.interrupts import ctrl_c_waits

from .recipe import RecipeError
from .store import replacing

CHECKPOINT = "training.safetensors"


@dataclass(frozen=True)
class Plan:
    """steps of `batch` stretches of `length` tokens; AdamW at `rate`, warmed up over a tenth and let down to a tenth of it (cosine)."""

    steps: int
    batch: int = 32
    length: int = 128
    rate: float = 6e-4
    seed: int = 0
    save_every: int = 500


def pretrain(name: str, config, train: np.ndarray, plan: Plan, device: torch.device, folder: Path | None = None):
    """A model of that config after `plan`, in float32 and eval mode. With a folder, a checkpoint is kept in it (one file, replaced at
    once), also on Ctrl-C, and training goes on from there; RecipeError if it is of another config, plan or text."""
    from transformers import AutoModelForCausalLM

    if len(train) <= plan.length + 1:
        raise RecipeError(f"the text has {len(train)} tokens, too few to train on stretches of {plan.length}: give more text.")
    torch.manual_seed(plan.seed)
    model = AutoModelForCausalLM.from_config(config).float().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), plan.rate, betas=(0.9, 0.95), weight_decay=0.1)
    kept = _Checkpoint(folder, {"config": _plain(config), "plan": asdict(plan), "tokens": len(train), "sum": int(train.sum())}) if folder else None
    done = kept.load(model, optimizer) if kept else 0
    model.train()
    try:
        if done < plan.steps:
            with counting(f"training {name}", plan.steps - done) as bar:
                while done < plan.steps:
                    with ctrl_c_waits():
                        loss = _step(model, optimizer, train, plan, done, device)
                        done += 1
                    if kept and (done % plan.save_every == 0 or done == plan.steps):
                        kept.save(model, optimizer, done)
                    bar(f"loss {loss:.2f}" if done % 10 == 0 or done == plan.steps else "")
    except KeyboardInterrupt:
        if kept:
            kept.save(model, optimizer, done)
        raise
    return model.requires_grad_(False).eval()


def _step(model, optimizer, train: np.ndarray, plan: Plan, step: int, device: torch.device) -> float:
    """The stretches of a step depend on its number alone, so that a training that was stopped sees what it would have seen."""
    starts = np.random.default_rng((plan.seed, step)).integers(0, len(train) - plan.length - 1, plan.batch)
    ids = torch.from_numpy(np.stack([train[start : start + plan.length + 1] for start in starts])).to(device)
    warm = max(plan.steps // 10, 1)
    rise = min((step + 1) / warm, 1.0)
    fall = 0.55 + 0.45 * float(np.cos(np.pi * max(step - warm, 0) / max(plan.steps - warm, 1)))
    for group in optimizer.param_groups:
        group["lr"] = plan.rate * rise * fall
    loss = F.cross_entropy(model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    if not torch.isfinite(loss):
        raise RecipeError(f"the loss is not finite at step {step + 1}: take a lower rate.")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _plain(config) -> dict:
    """A config without what says nothing of the model."""
    values = json.loads(config.to_json_string(use_diff=True))
    return {key: value for key, value in values.items() if key not in ("transformers_version", "dtype", "_name_or_path")}


class _Checkpoint:
    """Weights, moments of the optimizer and what they belong to, in one safetensors file."""

    def __init__(self, folder: Path, belongs: dict):
        self.path, self.belongs = folder / CHECKPOINT, belongs

    def save(self, model, optimizer, done: int) -> None:
        tensors = {f"model.{name}": tensor.detach().cpu().contiguous().clone() for name, tensor in model.named_parameters()}
        for number, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{key}": torch.as_tensor(value).detach().cpu().clone() for key, value in state.items()}
        with replacing(self.path) as partial:
            save_file(tensors, partial, {"done": str(done), "belongs": json.dumps(self.belongs)})

    def load(self, model, optimizer) -> int:
        """Steps done; 0 without a checkpoint."""
        if not self.path.exists():
            return 0
        try:
            with safe_open(self.path, "pt") as file:
                about = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}
            done, belongs = int(about["done"]), json.loads(about["belongs"])
        except (SafetensorError, KeyError, ValueError) as error:
            raise RecipeError(f"{self.path} is not a checkpoint of this recipe, or damaged: move it away, or take another --work.") from error
        for part, before in belongs.items():
            if before != self.belongs.get(part):
                raise RecipeError(f"{self.path} is of another training: {_difference(part, before, self.belongs.get(part))}. Take another --work, or "
                                  "the same settings.")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
        state: dict[int, dict] = {}
        for key, tensor in tensors.items():
            kind, _, rest = key.partition(".")
            if kind == "optimizer":
                number, _, field = rest.partition(".")
                state.setdefault(int(number), {})[field] = tensor
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        return done


def _difference(part: str, before, now) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        key = next(key for key in [*before, *now] if before.get(key) != now.get(key))
        return f"{part} has {key} = {before.get(key)!r}, here it is {now.get(key)!r}"
    return f"{part} = {before!r}, here {now!r}"
