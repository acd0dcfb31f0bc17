"""Training text on disk: token ids and the target's law after every token, in safetensors shards that are complete or absent."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT = "hf_specdec training shard 1"
TOP = 16  # successors of every position that a shard keeps
STATES = "states"  # the folder beside the shards for the target's hidden states
PROBES = 8  # embedding entries by which a target is known again


@dataclass
class Sample:
    """One text.

    tokens: token ids, prompt included.
    ids, logprobs: of the positions from `first` on, the target's `TOP` likeliest next tokens, int32 [m, TOP], and their log
        probabilities, float16 [m, TOP]; entry j belongs to the token after tokens[first + j].
    """

    tokens: list[int]
    first: int
    ids: torch.Tensor
    logprobs: torch.Tensor


@dataclass
class Shard:
    """Samples laid end to end: tokens int32 [n], starts int64 [S + 1], ids int32 [n, TOP], logprobs float16 [n, TOP], minus
    infinity where the target was not asked."""

    tokens: torch.Tensor
    starts: torch.Tensor
    ids: torch.Tensor
    logprobs: torch.Tensor
    notes: dict = field(default_factory=dict)

    @classmethod
    def of(cls, samples: list[Sample], notes: dict) -> Shard:
        lengths = [len(sample.tokens) for sample in samples]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        tokens = torch.tensor([token for sample in samples for token in sample.tokens], dtype=torch.int32)
        ids = torch.zeros((len(tokens), TOP), dtype=torch.int32)
        logprobs = torch.full((len(tokens), TOP), -torch.inf, dtype=torch.float16)
        for sample, start in zip(samples, starts.tolist()):
            place = slice(start + sample.first, start + sample.first + len(sample.ids))
            ids[place], logprobs[place] = sample.ids, sample.logprobs
        return cls(tokens, starts, ids, logprobs, notes)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"tokens": self.tokens, "starts": self.starts, "ids": self.ids, "logprobs": self.logprobs}
        save_whole(tensors, path, {"format": FORMAT, "notes": json.dumps(self.notes)})

    @classmethod
    def load(cls, path: Path, vocab_size: int | None = None) -> Shard:
        """Raises ValueError naming the file if it is not a whole shard of this format, or holds ids beyond `vocab_size`."""
        try:
            with safe_open(path, "pt") as file:
                notes = file.metadata() or {}
                if notes.get("format") != FORMAT:
                    raise ValueError(f"{path}: not a training shard of this version; make it again with `hf-specdec train --data`.")
                parts = {name: file.get_tensor(name) for name in ("tokens", "starts", "ids", "logprobs")}
        except SafetensorError as error:
            raise ValueError(f"{path}: damaged or cut short ({error}); delete it, and the run will make it again.") from error
        shard = cls(**parts, notes=json.loads(notes["notes"]))
        starts, n = shard.starts, len(shard.tokens)
        if int(starts[0]) or int(starts[-1]) != n or bool((starts.diff() <= 0).any()) or len(shard.ids) != n or len(shard.logprobs) != n:
            raise ValueError(f"{path}: its texts do not fit its offsets; delete it, and the run will make it again.")
        largest = max(int(shard.tokens.max()), int(shard.ids.max()))
        if min(int(shard.tokens.min()), int(shard.ids.min())) < 0 or vocab_size is not None and largest >= vocab_size:
            raise ValueError(f"{path}: token ids beyond the target's vocabulary ({largest}); it was made with another target.")
        return shard


@dataclass(frozen=True)
class Part:
    """Texts of a shard: those of the numbers `texts`, all of them without it."""

    path: Path
    texts: tuple[int, ...] | None = None

    def spans(self, shard: Shard) -> list[tuple[int, int]]:
        """Where each of the texts begins and ends in the loaded shard."""
        every = list(zip(shard.starts.tolist(), shard.starts[1:].tolist()))
        return every if self.texts is None else [every[text] for text in self.texts]


def save_whole(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file beside `path` and rename it, so that a kill leaves no half of a file."""
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=metadata)
    os.replace(partial, path)


def digest(path: Path) -> str:
    """Of a shard's tokens. Raises ValueError as `Shard.load` does."""
    shard = Shard.load(path)
    return hashlib.blake2b(shard.tokens.numpy().tobytes() + shard.starts.numpy().tobytes(), digest_size=8).hexdigest()


def probe(embedding: torch.Tensor) -> list[float]:
    """A few entries of a target's embedding [V, width], by which it is known again."""
    embedding = embedding.full_tensor() if hasattr(embedding, "full_tensor") else embedding  # of a model that several processes run together
    rows = torch.linspace(0, embedding.shape[0] - 1, PROBES).long()
    return [round(value, 6) for value in embedding.detach()[rows, rows % embedding.shape[1]].tolist()]


def same(one: list[float], other: list[float]) -> bool:
    """Whether two probes are of one embedding, in whatever dtypes it was loaded."""
    return torch.allclose(torch.tensor(one), torch.tensor(other), rtol=0.02, atol=1e-3)


def notes_of(path: Path) -> dict:
    """A shard's notes alone; none of a damaged one: `Shard.load` says what is wrong."""
    try:
        with safe_open(path, "pt") as file:
            return json.loads((file.metadata() or {}).get("notes", "{}"))
    except SafetensorError:
        return {}


def refuse_foreign(folder: Path) -> None:
    """ValueError for a folder of something else: with a tensor file that is no training shard, or with files, and no shard among them."""
    there = sorted(path for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else []
    others = [path for path in there if path.suffix not in (".safetensors", ".partial") and path.name != STATES]
    wrong = next((path for path in shard_files(folder) if not _may_be_one(path)), None) or (others[0] if others and not shard_files(folder) else None)
    if wrong is not None:
        raise ValueError(f"data: {folder} holds {wrong.name}, which is no training shard: it is a folder of something else; name an empty or a new one.")


def _may_be_one(path: Path) -> bool:
    """Whether the file says that it is a shard, of whatever version; a damaged one may be: `Shard.load` says what is wrong."""
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("format", "").startswith(FORMAT.rstrip("0123456789"))
    except SafetensorError:
        return True


def check_target(folder: Path, target) -> None:
    """ValueError naming the first shard of the folder that another target wrote; of those without a probe nothing is known."""
    for path in shard_files(folder):
        known = notes_of(path).get("target")
        if known is not None and not same(known, probe(target.get_input_embeddings().weight)):
            raise ValueError(f"{path}: written by another target, whose laws it holds; name another folder, or delete this one to make it anew.")


def shard_files(folder: Path) -> list[Path]:
    """The complete shards of a folder, in order."""
    return sorted(Path(folder).glob("*.safetensors"))
