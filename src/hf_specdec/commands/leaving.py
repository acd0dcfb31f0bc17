"""How a command ends early: a mistake in one line that names the option, a reader that has gone in silence, Ctrl-C at whatever time it comes."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import typer
from typer.models import OptionInfo

from ..config import CONFIG_NAME
from .interrupts import interrupted_at_any_time

PROGRAM = "hf-specdec"
GONE = 141  # what a shell calls a program that wrote to a closed pipe
# option, by its name in the command: what Python calls it, where that is another name
CALLED = {"k": "num_assistant_tokens", "mx": "format", "layer_format": "layer_formats", "draft": ("draft", "draft_source"), "calibrate": "calibration"}


def guarded(command: Callable) -> Callable:
    """Bad arguments and unusable files or models end in one clear line on standard error and exit code 2."""

    @functools.wraps(command)
    def run(*args, **kwargs):
        if hasattr(sys.stdout, "reconfigure"):  # a character that the stream does not have costs no answer
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            try:
                with interrupted_at_any_time():
                    return command(*args, **kwargs)
            finally:
                sys.stdout.flush()  # here, where a reader that has gone is no surprise
        except BrokenPipeError as error:
            _write_nowhere()
            raise typer.Exit(GONE) from error
        except (ValueError, TypeError, OSError, ImportError, _damaged_or_full()) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            text = " ".join(line.strip() for line in lines) if lines[0].rstrip().endswith(":") else lines[0]
            text = text if CONFIG_NAME in text else as_typed(text, _names(command, kwargs))  # what a file says is not said on the command line
            typer.echo(f"{PROGRAM}: error: {text}", err=True)
            raise typer.Exit(2) from error

    return run


def _write_nowhere() -> None:
    """What is still in the buffers of standard output is dropped when the program ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _damaged_or_full() -> type[Exception]:
    """What reading and writing weights raises, a full disk's error among them; imported when something has gone wrong."""
    from safetensors import SafetensorError

    return SafetensorError


def _names(command: Callable, given: dict[str, Any]) -> dict[str, str]:
    """{Python's name of an argument: the option that sets it}. With `--config`, of the options alone that were given: the others come from its file."""
    hints, found = get_type_hints(command, include_extras=True), {}
    for name, parameter in inspect.signature(command).parameters.items():
        told = next((part for part in getattr(hints.get(name), "__metadata__", ()) if isinstance(part, OptionInfo)), None)
        if told is None or given.get("config") is not None and given.get(name) == parameter.default:
            continue
        option = next((each for each in told.param_decls or () if each.startswith("--")), f"--{name.replace('_', '-')}")
        called = CALLED.get(name, name)
        found |= dict.fromkeys([called] if isinstance(called, str) else called, option)
    return found


def as_typed(text: str, options: dict[str, str]) -> str:
    """`text` with `argument=value`, and an `argument:` that it begins with, as the command line has them."""
    if not options:
        return text
    names, value = "|".join(options), r"""(?:'([^']*)'|"([^"]*)"|([^\s,;:()"']*[^\s,;:.()"']))"""
    text = re.sub(rf"^({names}):", lambda found: f"{options[found[1]]}:", text)
    return re.sub(rf"(?<![\w.\"'/-])({names})={value}", lambda found: f"{options[found[1]]} {found[2] or found[3] or found[4] or repr('')}", text)
