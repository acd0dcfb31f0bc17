"""What a run finds in its folder: its own checkpoint, whole and of the same run, or files of others, which it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .shards import digest, shard_files

DRAFTER = ("README.md", "config.json", "drafter.json", "model.safetensors")  # what a run writes beside its checkpoint
RESULTS = "results.json"
PARTS = {"config", "progress", "target", "data"}


def refuse_foreign(folder: Path, names: Iterable[str], owners: Iterable[Path]) -> None:
    """ValueError for a folder that holds one of the files `names`, but none of `owners`, by which a run knows its own folder."""
    there = [name for name in names if (folder / name).exists()]
    if there and not any(path.is_file() for path in owners):
        raise ValueError(f"out: {folder} holds {there[0]}, which the run would overwrite, and neither checkpoint nor drafter.json of a run; "
                         f"name another --out.")


def check(path: Path, config, data: Path) -> dict | None:
    """What the checkpoint says of its run, None if there is none.

    Raises ValueError if it is damaged, and where its run had another config, is past the config's steps, or was trained on other
    shards than those in `data`. What a checkpoint of an earlier version does not say is taken to agree.
    """
    if not path.is_file():
        return None
    about = _about(path)
    mine = json.loads(json.dumps(asdict(config)))
    known = {option.name: option.default for option in fields(config)} | {"on_policy": mine["on_policy"]} | about["config"]
    different = sorted(name for name in mine if known.get(name) != mine[name] and name != "steps")
    if different:
        raise ValueError(f"out: {path.parent} holds a run with {different[0]}={known.get(different[0])!r}, not {mine[different[0]]!r}; "
                         f"go on with that, or name another folder.")
    if about["progress"].get("step", 0) > config.steps:
        raise ValueError(f"steps={config.steps}: the run in {path.parent} is at step {about['progress']['step']} already; "
                         f"ask for more steps, or name another --out.")
    _check_data(about.get("data", {}), shard_files(data), path.parent)
    return about


def tensors(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint; ValueError if those that `like` names are not there in the same shapes."""
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
    wrong = [name for name, tensor in like.items() if name not in found or found[name].shape != tensor.shape]
    if wrong:
        raise _not_one(path, f"{wrong[0]} does not fit the draft")
    return found


def _about(path: Path) -> dict:
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
        found = {name: json.loads(about[name]) for name in PARTS & about.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        raise _not_one(path, str(error)) from error
    if not all(isinstance(found.get(name), dict) for name in ("config", "progress")):
        raise _not_one(path, "it describes no run")
    return found


def _not_one(path: Path, why: str) -> ValueError:
    return ValueError(f"{path}: damaged, or not the checkpoint of a run ({why}); move it away, or name another --out.")


def _check_data(known: dict[str, str], files: list[Path], out: Path) -> None:
    """More shards than the checkpoint knows are as well; those that it knows have to be the same."""
    shared = [path for path in files if path.name in known]
    other = [path for path in shared if digest(path) != known[path.name]] or (files if known and not shared else [])
    if other:
        raise ValueError(f"data: {other[0]} is not what the run in {out} was trained on; name the data that it was (--data), or another --out.")
