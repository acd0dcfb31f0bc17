"""The output folder of a data set's run: a job file, one shard of whole lines per process, and locks on both.

A line is finished when it ends in a newline and is JSON; whatever a killed process left behind the last such line is cut off
by the process that opens the folder next. What is finished is read from the shards themselves, so that there is no second
account which could disagree with them.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

try:
    import fcntl
except ImportError:  # not a Unix: the folder goes unlocked
    fcntl = None

JOB, LOCK, SHARD = "job.json", ".lock", "rows-{:05d}.jsonl"
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # file systems without locks


class Place(NamedTuple):
    """Which of how many processes this one is, and its number on this machine."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls) -> Place:
        """As `accelerate launch` and `torchrun` say; alone without them."""
        if "RANK" not in os.environ:
            return cls()
        try:
            rank, world = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
            local = int(os.environ.get("LOCAL_RANK", rank))
        except ValueError:
            raise ValueError("RANK, WORLD_SIZE and LOCAL_RANK in the environment must be whole numbers.") from None
        if not 0 <= rank < world or local < 0:
            raise ValueError(f"RANK={rank} and WORLD_SIZE={world} in the environment: the first has to be in 0..{world - 1}.")
        return cls(rank, world, local)


class Shards:
    """Use as a context manager: entering locks the folder, checks or writes the job, mends the shards, and fills `done`."""

    def __init__(self, folder: Path, job: dict[str, Any], place: Place, batch: int):
        self.folder, self.job, self.place = folder, job, place
        self.run = f"{place.world} process(es), --batch {batch}"  # what all processes of one launch agree on
        self.lock = self.file = None
        self.done: set[int] = set()

    @property
    def path(self) -> Path:
        return self.folder / SHARD.format(self.place.rank)

    def refuse_other(self, strict: bool = False) -> None:
        """ValueError if the folder is somebody else's or the output of another job; values that `job` does not have yet are not
        compared. A job without a finished row gives way to another one, unless `strict`."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"--output {self.folder} is a file; name a folder.")
        if not (self.folder / JOB).exists():
            if self.folder.is_dir() and any(not entry.name.startswith(".") for entry in self.folder.iterdir()):
                raise ValueError(f"--output {self.folder} holds files, but no {JOB}: name an empty or a new folder.")
            return
        differing = _differences(self._stored(), self.job)
        if differing and (strict or self.any_row()):
            raise ValueError(
                f"--output {self.folder} is the output of another job: {'; '.join(differing)}. "
                f"Name another folder, or repeat its settings."
            )

    def any_row(self) -> bool:
        return any(finished(path)[0] for path in self._shards())

    def count(self) -> int:
        """Lines finished in all shards."""
        return sum(len(finished(path)[0]) for path in self._shards())

    def __enter__(self) -> Shards:
        new = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        if new:
            _sync_folder(self.folder.parent)
        try:
            self._join()
            self.refuse_other(strict=True)
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            if not _locked(self.file, "LOCK_EX"):
                raise ValueError(f"--output {self.folder}: another process is writing {self.path.name}; wait for it, or stop it.")
            self._read_and_mend()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in ("file", "lock"):
            if getattr(self, name) is not None:
                os.close(getattr(self, name))
                setattr(self, name, None)

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Whole lines, on disk when this returns."""
        data = memoryview("".join(json.dumps(record) + "\n" for record in records).encode())
        while data:
            data = data[os.write(self.file, data):]
        os.fsync(self.file)

    def _join(self) -> None:
        """Take part in the folder's only launch. The first of its processes finds nobody there and writes the job; the lock is
        shared by all of them, and read again once it is held, because changing its kind lets others in for a moment."""
        self.lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        while True:
            if _locked(self.lock, "LOCK_EX"):
                os.ftruncate(self.lock, 0)
                os.pwrite(self.lock, self.run.encode(), 0)
                self._write_job()
            _locked(self.lock, "LOCK_SH", wait=True)
            run = os.pread(self.lock, 1000, 0).decode()
            if run and (self.folder / JOB).exists():
                break
        if run != self.run:
            raise ValueError(f"--output {self.folder}: another run is at work there ({run}); wait for it, or stop it.")

    def _write_job(self) -> None:
        self.refuse_other()
        if (self.folder / JOB).exists() and not _differences(self._stored(), self.job):
            return
        partial = self.folder / f".{JOB}.{os.getpid()}"
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(self.job, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.folder / JOB)
        _sync_folder(self.folder)

    def _stored(self) -> dict[str, Any]:
        try:
            job = json.loads((self.folder / JOB).read_text(encoding="utf-8"))
            return {"settings": dict(job["settings"]), "data": dict(job["data"])}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.folder / JOB} is not a job file of this program: name another folder.") from None

    def _shards(self) -> list[Path]:
        return sorted(self.folder.glob("rows-*.jsonl"))

    def _read_and_mend(self) -> None:
        """Fill `done`, and cut off what comes after the last finished line: in the own shard, and in those of processes that this
        launch lacks."""
        rows = self.job["data"]["rows"]
        for path in self._shards():
            found, end = finished(path)
            for index in found:
                if index in self.done or not 0 <= index < rows:
                    what = "is there twice" if index in self.done else f"is none of the {rows} rows"
                    raise ValueError(f"{path}: row {index} {what}: the folder has been changed by something else.")
                self.done.add(index)
            number = path.stem.removeprefix("rows-")
            mine = number.isdecimal() and int(number) % self.place.world == self.place.rank
            if mine and end < path.stat().st_size:
                with path.open("r+b") as file:
                    file.truncate(end)
                    os.fsync(file.fileno())
        _sync_folder(self.folder)


def finished(path: Path) -> tuple[list[int], int]:
    """The rows of the finished lines, and where the last of them ends. ValueError if damage has finished lines behind it.

    Another process may be appending: only what was there at the start is read.
    """
    rows, end, damaged = [], 0, 0
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        number = 0
        while line := file.readline(left):
            left, number = left - len(line), number + 1
            row = _row_of(line)
            if row is None:
                damaged = damaged or number
            elif damaged:
                raise ValueError(f"{path}:{damaged} is damaged, with whole lines behind it: remove that line, its row is done again.")
            else:
                rows.append(row)
                end += len(line)
    return rows, end


def _row_of(line: bytes) -> int | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)["index"]
    except (ValueError, KeyError, TypeError):
        return None
    return row if isinstance(row, int) else None


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs, in words, over the values that `new` has."""
    return [
        f"{_name(part, name)} was {old[part].get(name)!r}, is {value!r}"
        for part in ("settings", "data")
        for name, value in new[part].items()
        if old[part].get(name) != value
    ]


def _name(part: str, name: str) -> str:
    if part == "data":
        return f"the data set's {name}"
    return "TARGET" if name == "target" else name.replace("_", " ") if name.endswith("weights") else "--" + name.replace("_", "-")


def _locked(file: int, kind: str, wait: bool = False) -> bool:
    """Whether the lock is held now; True as well where there are no locks. A process that ends, however it ends, lets go."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, getattr(fcntl, kind) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return error.errno in NO_LOCKS
    return True


def _sync_folder(folder: Path) -> None:
    """A new name in a folder lasts only once the folder is on disk, too."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # not every system opens folders
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
