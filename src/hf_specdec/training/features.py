"""The target's hidden states on training text, kept beside the shards: what a feature drafter reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.utils.rnn import pad_sequence

from ..drafts.features import hidden_states
from .shards import Part, Shard, digest, probe, same, save_whole


@torch.no_grad()
def feature_file(path: Path, target, layers: tuple[int, ...], folder: Path, rows: int = 8, half: bool = False) -> Path:
    """The file with the hidden states bfloat16 [n, len(layers) * H] of a shard's n tokens after those layers; made if absent, or if it is
    of other layers, another shard or another target, with the target in bfloat16 arithmetic where `half`."""
    made = folder / path.name
    about = {"layers": list(layers), "shard": digest(path), "target": probe(target.get_input_embeddings().weight)}
    if _is_of(made, about):
        return made
    shard = Shard.load(path, target.config.get_text_config().vocab_size)
    spans = sorted(Part(path).spans(shard), key=lambda span: span[1] - span[0])
    out = None
    for first in range(0, len(spans), rows):
        part = spans[first : first + rows]
        tokens = pad_sequence([shard.tokens[a:b].long() for a, b in part], batch_first=True)
        with hidden_states(target, layers) as seen, torch.autocast(target.device.type, torch.bfloat16, enabled=half):
            target.base_model(input_ids=tokens.to(target.device), use_cache=False)
        states = seen().to("cpu", torch.bfloat16)
        out = torch.empty((len(shard.tokens), states.shape[-1]), dtype=torch.bfloat16) if out is None else out
        for row, (a, b) in enumerate(part):
            out[a:b] = states[row, : b - a]
    folder.mkdir(parents=True, exist_ok=True)
    save_whole({"states": out}, made, {name: json.dumps(value) for name, value in about.items()})
    return made


def _is_of(made: Path, about: dict) -> bool:
    """Whether the file is there, whole, and says all this of itself."""
    try:
        with safe_open(made, "pt") as file:
            known = {name: json.loads(value) for name, value in (file.metadata() or {}).items() if name in about}
    except (FileNotFoundError, SafetensorError):
        return False
    return known.keys() == about.keys() and all(same(known[name], value) if name == "target" else known[name] == value for name, value in about.items())


def make_features(files: list[Path], target, layers: tuple[int, ...], folder: Path,
                  progress: Callable[[int, int], None] | None = None, half: bool = False) -> None:
    """`feature_file` of every shard; what is there stays."""
    for number, path in enumerate(files, start=1):
        feature_file(path, target, layers, folder, half=half)
        if progress:
            progress(number, len(files))


def read_features(path: Path) -> torch.Tensor:
    """bfloat16 [n, F]."""
    with safe_open(path, "pt") as file:
        return file.get_tensor("states")
