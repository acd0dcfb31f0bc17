"""What messages about arguments say: what an unknown name was probably meant to be, how a value is shown, and which numbers are taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import Any

# words for the same thing, here and in other libraries
ALIKE = (
    ("num_assistant_tokens", "k", "gamma", "num_speculative_tokens", "num_draft_tokens", "speculative_tokens", "draft_tokens"),
    ("assistant_model", "draft", "draft_model", "drafter", "assistant", "speculative_model"),
    ("max_new_tokens", "max_tokens"),
    ("mxfp4_e2m1", "mxfp4", "fp4"),
    ("mxfp6_e2m3", "mxfp6", "fp6"),
    ("mxfp8_e4m3", "mxfp8", "fp8"),
    ("mxint8", "int8"),
    ("bf16", "bfloat16"),
    ("fp32", "float32"),
)


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be."""
    known, word = list(known), str(name).lower().replace("-", "_")
    group = next((group for group in ALIKE if word in group and word not in known), None)
    near = get_close_matches(word, known, 1, 0.7) if group is None else [other for other in group if other in known]
    return near[0] if near else None


def meant(name: Any, known: Iterable[str]) -> str:
    """" (did you mean 'x'?)", or "" where no known name is near."""
    found = nearest(name, known)
    return f" (did you mean {found!r}?)" if found else ""


def short(value: Any) -> str:
    """repr(value), or the name of its type where that is long."""
    text = repr(value)
    return text if len(text) <= 120 and "\n" not in text else type(value).__name__


def what(value: Any) -> str:
    """Its type in a message, or "the class X" where it is a class itself."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def many(count: int, thing: str) -> str:
    """1 row, 2 rows, 2 passes."""
    return f"{count} {thing}{'' if count == 1 else 'es' if thing.endswith('s') else 's'}"


def first_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def install(extra: str) -> str:
    """How to install what the extra of that name holds: from an index if the package came from one, else from its source."""
    try:
        source = metadata.distribution("hf-specdec").read_text("direct_url.json")  # what pip notes of a folder or a repository
    except metadata.PackageNotFoundError:
        source = "on the path"
    return f"pip install 'hf-specdec[{extra}]'" if source is None else f"pip install '.[{extra}]' in a checkout of hf_specdec"


def check_int(name: str, value: Any, least: int, most: int, also: str = "") -> None:
    """ValueError naming the argument unless `value` is an int in least..most; also: what the message says of that range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be an int in {least}..{most}{also}.")


def check_bool(name: str, value: Any) -> None:
    """ValueError naming the argument for what is neither True nor False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={short(value)} must be True or False.")


def check_path(name: str, value: Any) -> Path:
    """`value` as a path; TypeError naming the argument for what is none."""
    if not isinstance(value, (str, PathLike)):
        raise TypeError(f"{name}: expected a path, a str or a Path, got {what(value)}.")
    return Path(value)


def by_name(function: Callable, remedy: Callable[[Any, list[str]], str] = meant) -> Callable:
    """`function`, whose TypeError for a keyword that it does not take, or for one value too many, says what was meant: remedy(keyword or value, the
    names that it takes)."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function
    known = [name for name in parameters if name != "self"]
    places = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters.values())
    many = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())

    @wraps(function)
    def checked(*args, **given):
        unknown = [name for name in given if name not in known] or ([] if many else args[places:])
        if unknown:
            title = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{title}() has no place for {short(unknown[0])}{remedy(unknown[0], known)}; it takes {', '.join(known) or 'nothing'}.")
        return function(*args, **given)

    return checked
