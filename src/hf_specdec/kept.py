"""What objects keep at one moment, and how it is put back: in place, so that what two attributes, two processors or the caller share stays shared."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from functools import lru_cache, partial
from operator import is_
from types import CellType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from . import compat

LARGE, MANY = 1 << 22, 10_000  # bytes, entries; what is larger is taken for a table, which calls do not change
ATOMS = frozenset({int, float, bool, complex, str, bytes, type(None)})
_MISSING = object()


class Kept:
    """What `roots`, processors, keep now, and whatever they lead to: containers, tensors, arrays, random generators, closures.

    before:  an earlier one of the same roots; tensors that have not been written since are not copied again.
    skipped: what is left as it is.
    held:    (object, how it is put back, its contents), the roots first; `seen`: by its id, all that was looked at.
    forks:   by the id of a matcher, its copy.
    """

    def __init__(self, roots: Sequence[Any], before: Kept | None = None, skipped: Iterable[Any] = ()):
        self.held: list[tuple[Any, Callable, Any]] = []
        self.seen = {id(value): value for value in skipped}
        self.forks: dict[int, Any] = {}
        self.tensors: dict[int, _Written] = {}
        self.older = {} if before is None else before.tensors
        for root in roots:
            self._look(root, True)
        self.older = {}

    def _look(self, value: Any, root: bool = False) -> None:
        if type(value) in ATOMS or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._look_at_tensor(value)
        elif (fork := _fork_of(type(value))) is not None and not root:
            self.forks[id(value)] = fork(value)
        elif isinstance(value, (tuple, partial, MethodType, FunctionType)):
            self._look(_called_by(value), root)
            for part in _parts(value):
                self._look(part)
        elif (way := _WAYS_OF_OBJECTS if root else _way_of(type(value))) is not None and _may_change(value):
            contents = way.read(value)
            self.held.append((value, way.write, contents))
            for part in _inside(contents):
                self._look(part)
            if root:
                for part in _of_classes(type(value)):
                    self._look(part)

    def _look_at_tensor(self, value: torch.Tensor) -> None:
        if value.layout is torch.strided and value.nbytes > LARGE or value.is_inference() and not torch.is_inference_mode_enabled():
            return
        before = self.older.get(id(value))
        own = before if before is not None and before.of is value and before.is_current() else _Written(value)
        self.tensors[id(value)] = own
        self.held.append((value, _write_tensor, own))

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore all contents. What has not changed is not written: another thread may be reading it."""
        forks = {key: _fork_of(type(value))(value) for key, value in self.forks.items()}
        for value, write, contents in self.held:
            write(value, _exchanged(contents, forks) if forks else contents)

    def shares_with(self, other: Kept) -> bool:
        """Whether one of them changes what the other sees."""
        return any({*map(id, (value for value, *_ in one.held)), *one.forks} & two.seen.keys() for one, two in ((self, other), (other, self)))


class _Written:
    """What is written in a tensor; `version`: torch's count of what has changed it, None where it does not count."""

    def __init__(self, of: torch.Tensor):
        self.of, self.copy = of, of.detach().clone()
        self.version = _version(of)

    def is_current(self) -> bool:
        return self.version is not None and _version(self.of) == self.version


def _version(value: torch.Tensor) -> int | None:
    return None if value.is_inference() else value._version


def _write_tensor(value: torch.Tensor, own: _Written) -> None:
    if not own.is_current():
        value.copy_(own.copy)
        own.version = _version(value)


def _inside(contents: Any) -> Iterable[Any]:
    """What containers and objects lead to."""
    if isinstance(contents, dict):
        contents = contents.values()
    elif not isinstance(contents, (list, set)):
        return ()
    return () if ATOMS.issuperset(map(type, contents)) else list(contents)


def _exchanged(contents: Any, forks: dict[int, Any]) -> Any:
    """`contents` with copies of the matchers in the place of these."""
    if type(contents) is dict:
        return {name: _exchanged(item, forks) if type(item) is tuple else forks.get(id(item), item) for name, item in contents.items()}
    if type(contents) in (list, tuple):
        return type(contents)(_exchanged(item, forks) if type(item) is tuple else forks.get(id(item), item) for item in contents)
    return contents


def _called_by(value: Any) -> Any:
    """The object of a bound method, or the function of a partial one; where these are a processor, it is looked at as one."""
    return value.__self__ if isinstance(value, MethodType) else value.func if isinstance(value, partial) else None


def _parts(value: Any) -> Iterable[Any]:
    """What tuples and functions, which do not change themselves, lead to: of functions, the cells of their closures."""
    if isinstance(value, partial):
        return value.args, value.keywords
    if isinstance(value, FunctionType):
        return *(value.__closure__ or ()), vars(value), value.__defaults__, value.__kwdefaults__
    return value if isinstance(value, tuple) else ()


@lru_cache
def _fork_of(kind: type) -> Callable[[Any], Any] | None:
    """The method by which a matcher of this class copies itself; None for other classes."""
    fork = getattr(kind, "fork", None) or getattr(kind, "deep_copy", None)
    return fork if callable(fork) and not issubclass(kind, type) else None


def entries(value: Any, seen: set[int] | None = None) -> int:
    """How many entries a container and the containers inside it have together; 0 for anything else."""
    seen = set() if seen is None else seen
    if not isinstance(value, (dict, list, deque, set)) or id(value) in seen:
        return 0
    seen.add(id(value))
    items = value.values() if isinstance(value, dict) else value
    if len(value) > MANY or ATOMS.issuperset(map(type, items)):
        return len(value)
    return len(value) + sum(entries(item, seen) for item in items)


# --- how each kind is read and written ----------------------------------------------------------------------------------


class _Way(NamedTuple):
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


@lru_cache
def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    """The attributes of a class that are in no __dict__."""
    return {f"{base.__qualname__}.{name}": slot for base in kind.__mro__ if "__slots__" in vars(base) for name, slot in vars(base).items() if isinstance(slot, MemberDescriptorType)}


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, by name, without its properties being called."""
    found = dict(getattr(value, "__dict__", ()))
    for name, slot in _slots(type(value)).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # has not been set
            pass
    return found


def names(processor: Any) -> dict[str, Any]:
    """What a processor holds, by name: its attributes, or the arguments and free variables of a function."""
    if isinstance(processor, MethodType):
        return attributes(processor.__self__)
    if isinstance(processor, partial):
        return {**names(processor.func), **{f"argument {i}": value for i, value in enumerate(processor.args)}, **processor.keywords}
    if isinstance(processor, FunctionType):
        return {name: item for name, cell in zip(processor.__code__.co_freevars, processor.__closure__ or ()) for item in _read_cell(cell)}
    return attributes(processor)


def _write_attributes(value: Any, contents: dict[str, Any]) -> None:
    own, slots = getattr(value, "__dict__", {}), _slots(type(value))
    now = attributes(value)
    for name in now.keys() - contents.keys():
        slots[name].__delete__(value) if name in slots else own.pop(name)
    for name, item in contents.items():
        if now.get(name, _MISSING) is item:
            continue
        if name in slots:
            slots[name].__set__(value, item)
        else:
            own[name] = item


def _of_classes(kind: type) -> list[Any]:
    """The containers that instances of a class of the user's share."""
    return [value for base in kind.__mro__ if not base.__module__.startswith(("transformers.", "torch.", "builtins")) for name, value in vars(base).items()
            if not name.startswith("__") and isinstance(value, (list, dict, deque, set, np.ndarray, torch.Tensor)) and entries(value) <= MANY]


def _same(now: Iterable[Any], before: Iterable[Any]) -> bool:
    now, before = list(now), list(before)
    return len(now) == len(before) and all(map(is_, now, before))


def _write_dict(value: dict, contents: dict) -> None:
    if not (list(value) == list(contents) and _same(value.values(), contents.values())):
        value.clear()
        value.update(contents)


def _write_list(value: list, contents: list) -> None:
    if not _same(value, contents):
        value[:] = contents


def _write_numbers(value: array | bytearray, contents: array | bytearray) -> None:
    if value != contents:
        value[:] = contents


def _write_deque(value: deque, contents: list) -> None:
    if not _same(value, contents):
        value.clear()
        value.extend(contents)


def _write_set(value: set, contents: set) -> None:
    if value != contents:
        value.clear()
        value.update(contents)


def _write_array(value: np.ndarray, contents: np.ndarray) -> None:
    value[...] = contents


def _read_cell(value: CellType) -> list[Any]:
    try:
        return [value.cell_contents]
    except ValueError:  # it is empty
        return []


def _write_cell(value: CellType, contents: list[Any]) -> None:
    if _same(_read_cell(value), contents):
        return
    if contents:
        value.cell_contents = contents[0]
    else:
        del value.cell_contents


_WAYS_OF_OBJECTS = _Way(attributes, _write_attributes)
_WAYS = {
    dict: _Way(dict, _write_dict), list: _Way(list, _write_list), deque: _Way(list, _write_deque), set: _Way(set, _write_set),
    (array, bytearray): _Way(lambda value: value[:], _write_numbers), np.ndarray: _Way(np.copy, _write_array), CellType: _Way(_read_cell, _write_cell),
    torch.Generator: _Way(torch.Generator.get_state, torch.Generator.set_state), random.Random: _Way(random.Random.getstate, random.Random.setstate),
    np.random.Generator: _Way(lambda value: value.bit_generator.state, lambda value, state: setattr(value.bit_generator, "state", state)),
    np.random.RandomState: _Way(np.random.RandomState.get_state, np.random.RandomState.set_state),
    (compat.SYNTHID_STATE, SimpleNamespace): _WAYS_OF_OBJECTS,
}


@lru_cache
def _way_of(kind: type) -> _Way | None:
    """How objects of this class are read and written; None for those that are taken not to change."""
    if issubclass(kind, (random.SystemRandom, type)):
        return None
    return next((way for kinds, way in _WAYS.items() if issubclass(kind, kinds)), _WAYS_OF_OBJECTS if is_dataclass(kind) and not kind.__module__.startswith("transformers.") else None)


def _may_change(value: Any) -> bool:
    return not isinstance(value, np.ndarray) or value.flags.writeable and value.nbytes <= LARGE
