"""Arrays in one safetensors file that is read through a memory map, and checked before it is. Knows no model and no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np


def save(path: str | Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> Path:
    """Write a safetensors file: a neighbour first, which then takes the name, so that `path` is never half a file."""
    from safetensors.numpy import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial, metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def format_of(path: str | Path) -> str | None:
    """The format in a safetensors file's metadata; None where there is none, or the file is no such one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return (file.metadata() or {}).get("format")
    except (SafetensorError, OSError):
        return None


class Mapped:
    """A file that `save` has written. what: "a datastore", for messages; made_by: the draft whose from_texts builds it; format, version:
    as they stand in the metadata, up to which version it is read.

    ValueError, with the file's name and the remedy, if it is damaged, something else, or from a later version.
    """

    def __init__(self, path: str | Path, what: str, made_by: str, format: str, version: int):
        self.path, self.made_by = Path(path), made_by
        if self.path.is_dir():
            raise self.wrong(f"is a folder, not {what}")
        self.header, self.start = self._header()
        self.metadata = self.header.pop("__metadata__", None) or {}
        if self.metadata.get("format") != format:
            raise self.wrong(f"is a safetensors file, but not {what}")
        if self.number("version") > version:
            raise ValueError(f"{self.path}: written in version {self.number('version')} of the format, this package reads up to {version}; "
                             f"upgrade hf-specdec, or build it again.")
        self.data = np.asarray(np.memmap(self.path, np.uint8, "r"))

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"{self.path} {what}; build it again with {self.made_by}.from_texts or from_tokens and save it.")

    def _header(self) -> tuple[dict, int]:
        """The file's JSON header, once safetensors itself has accepted it (sizes, bounds, nothing missing), and where data starts."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "numpy"):
                pass
        except SafetensorError as error:
            raise self.wrong(f"is truncated, damaged or not a safetensors file ({error})") from None
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(length)), 8 + length

    def number(self, key: str) -> int:
        text = self.metadata.get(key, "")
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise self.wrong(f"names {key} {text!r}")
        return int(text)

    def array(self, name: str, stored: str, dtype: str) -> np.ndarray:
        """The array `name`, one row of `stored` (safetensors' name), as a view of the mapped file in numpy's `dtype`."""
        entry = self.header[name]
        if entry["dtype"] != stored or len(entry["shape"]) != 1:
            raise self.wrong(f"holds {name} as {entry['dtype']} {entry['shape']}, not as one row of {stored}")
        begin, end = entry["data_offsets"]
        return self.data[self.start + begin : self.start + end].view(dtype)
