"""A model's folder: what is wrong with it, said before transformers reads it, and how one is written, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
METHODS = {"quant_method", "load_in_4bit", "load_in_8bit"}  # the latter in files of old
AGAIN = "copy the checkpoint again"


def check_model_folder(folder: str | os.PathLike) -> dict[str, Any]:
    """What its config.json says, {} where there is none: an adapter has none, and what is no folder is left to the loader.

    Raises ValueError naming the file: a config.json or an index of weights that is damaged, a quantization_config that is none, a file of weights that the
    index names and the folder lacks."""
    folder = Path(folder)
    config = json_object(folder / "config.json")
    quantised = config.get("quantization_config")
    if quantised is not None and not (isinstance(quantised, dict) and quantised.keys() & METHODS):
        found = "has no quant_method" if isinstance(quantised, dict) else f"is {_kind(quantised)}, where an object with a quant_method belongs"
        raise ValueError(f"{folder / 'config.json'}: its quantization_config {found}; {AGAIN}, or take the entry out if the weights are dense.")
    if not (folder / WEIGHTS).is_file() and not config.get("transformers_weights"):  # these are read in the place of what an index names
        _check_index(folder)
    return config


def _check_index(folder: Path) -> None:
    index = folder / INDEX
    places = json_object(index).get("weight_map", {} if not index.is_file() else None)
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index} is damaged: its weight_map does not say which file each weight is in; {AGAIN}.")
    for name in sorted(set(places.values())):
        check_file(folder / name, INDEX)


def check_file(file: str | os.PathLike, index: str = INDEX) -> None:
    """ValueError for a file of weights that an index names and that is not there."""
    if not Path(file).is_file():
        raise ValueError(f"{file} is missing, which {index} names: {AGAIN}, with all of its files.")


class WeightsError(ValueError):
    """A checkpoint's weights are damaged, missing, or another model's; the message begins with what names them."""


def from_whole(name: str, auto_class: Any, folder: str, **kwargs: Any) -> PreTrainedModel:
    """`auto_class.from_pretrained(folder, **kwargs)`, for a checkpoint that holds each of the weights: transformers makes the others up.

    Raises WeightsError that begins with `name` for a damaged file of weights, weights that are not those of the config, and weights that are missing."""
    with _naming_weights(name, folder):
        model, report = auto_class.from_pretrained(folder, **kwargs | {"output_loading_info": True})
    missing = sorted(report["missing_keys"])
    if missing:
        raise WeightsError(f"{name}: the checkpoint lacks {len(missing)} of the weights of {type(model).__name__} ({', '.join(missing[:3])}{', ..' if missing[3:] else ''}), which "
                         "would be random numbers: name a checkpoint of the whole model.")
    return (model, report) if kwargs.get("output_loading_info") else model


@contextmanager
def _naming_weights(name: str, folder: str | os.PathLike) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise WeightsError(f"{name}: a file of weights is damaged or cut short ({error}): copy it again.") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise WeightsError(f"{name}: the weights do not have the sizes that {Path(folder) / 'config.json'} says, or are quantised and it does not say so: {AGAIN}, with "
                         "the config.json that was saved with it.") from error


def json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no such file; ValueError for a damaged one."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged or cut short ({error}): {AGAIN}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds {_kind(found)}, where an object belongs; {AGAIN}.")
    return found


def _kind(value: Any) -> str:
    """What JSON calls it."""
    return {list: "a list", str: "a string", bool: "true or false", type(None): "null"}.get(type(value), "a number")


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """A temporary neighbour to write into, which becomes the new or empty folder `out` at the end of the block; after an error or Ctrl-C, `out` is as it was."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp's is for its owner alone
        os.replace(partial, out)  # fails if something has come to lie there
    finally:
        shutil.rmtree(partial, ignore_errors=True)
