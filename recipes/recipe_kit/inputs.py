"""What a recipe reads, told apart by its content, and where it writes: checked before any work is done."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from hf_specdec.commands import common
from hf_specdec.config import MAX_ASSISTANT_TOKENS

from .recipe import RecipeError

LARGE = (".safetensors", ".bin", ".parquet", ".arrow", ".csv", ".jsonl")  # in a folder: told apart by size and time
SMALL = ("config.json", "generation_config.json", "drafter.json", "*token*.json", "vocab*", "merges.txt", "*.jinja", "*.model")
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def contents(**given: str | Path | list[Path] | None) -> dict[str, str | list[str]]:
    """"NAME_sha256" -> digest, for each of these options that names files or folders of this machine; for the settings in the JSON."""
    found: dict[str, str | list[str]] = {}
    for name, value in given.items():
        paths = [Path(one) for one in (value if isinstance(value, list) else [value]) if one and Path(one).exists()]
        if paths:
            digests = [digest(path, name) for path in paths]
            found[f"{name}_sha256"] = digests if isinstance(value, list) else digests[0]
    return found


def digest(path: Path, option: str) -> str:
    """Of a file: the SHA-256 of its content. Of a folder: that of the content of its small files and the size and time of its large ones."""
    try:
        if not path.is_dir():
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        found = hashlib.sha256()
        for file in sorted(path.rglob("*")):
            if file.suffix in LARGE and file.is_file():
                found.update(f"{file.relative_to(path)} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
            elif any(map(file.match, SMALL)) and file.is_file():
                found.update(f"{file.relative_to(path)} {digest(file, option)}\n".encode())
        return found.hexdigest()
    except OSError as error:
        raise RecipeError(f"--{option.replace('_', '-')} {path}: cannot be read ({error.strerror}). Name one that can.") from error


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """RecipeError for a number below 1, and for a K that the package does not draft."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise RecipeError(f"--{name.replace('_', '-')} {value}: must be 1 or more.")
    if options.k is not None and options.k > MAX_ASSISTANT_TOKENS:
        raise RecipeError(f"--k {options.k}: at most {MAX_ASSISTANT_TOKENS} tokens are drafted per round.")


def check_folder(option: str, folder: Path) -> None:
    """RecipeError unless files can be written into this folder, or the folder be made."""
    try:
        common.check_folder(folder, f"--{option}")
    except ValueError as error:
        raise RecipeError(str(error)) from None


def check_map(options: argparse.Namespace) -> None:
    """RecipeError for a --device-map that would be ignored or not understood."""
    if options.device_map is None:
        return
    allowed = f"its values are {', '.join(MAPS)} and a GPU such as cuda:0"
    if options.device.type == "cpu":
        raise RecipeError(f"--device-map {options.device_map}: only on GPUs, and this run is on the CPU; {allowed}. Leave it out, or pass --device cuda.")
    if options.device_map not in MAPS and not options.device_map.startswith(options.device.type):
        raise RecipeError(f"--device-map {options.device_map}: {allowed}.")


def check_vocabulary(name: str, draft, target) -> None:
    """RecipeError for a draft model `name` whose config has another vocabulary than the target's, but for padding."""
    own, wanted = draft.get_text_config().vocab_size, target.get_text_config().vocab_size
    if min(own, wanted) < 0.9 * max(own, wanted):
        raise RecipeError(f"--draft {name}: a vocabulary of {own} against the target's {wanted}: the draft needs the target's tokenizer.")


def check_context(config, prompts: dict[str, list[int]], new_tokens: int) -> None:
    """RecipeError if the longest prompt and the new tokens do not fit into the target's positions."""
    room, longest = getattr(config.get_text_config(), "max_position_embeddings", None), max(map(len, prompts.values()))
    if room and longest + new_tokens > room:
        raise RecipeError(f"--new-tokens {new_tokens}: the target has {room} positions, and its longest prompt takes {longest}: at most {room - longest}.")
