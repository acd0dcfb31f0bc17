"""What the commands share: how arguments are read and how mistakes are reported."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import typer

PROGRAM = "hf-specdec"


def guarded(command: Callable) -> Callable:
    """Bad arguments and unusable files or models end in one clear line on standard error and exit code 2."""

    @functools.wraps(command)
    def run(*args, **kwargs):
        try:
            return command(*args, **kwargs)
        except (ValueError, TypeError, OSError, ImportError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            typer.echo(f"{PROGRAM}: error: {lines[0]}", err=True)
            raise typer.Exit(2) from error

    return run


def parse_k(value: str) -> int | str:
    """K as it goes into `num_assistant_tokens`: a whole number or "auto"; the range is the config's to check."""
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"--k {value}: must be an int in 1..64 or auto.") from None


def apply_mx(model, format: str | None):
    """`--mx`: the loaded model's weights in that MX format, in place; nothing to do for None."""
    if format is None:
        return
    from ..mx import compress

    compress(model, format)


def load_draft(name: str | None, dtype: str, model, tokenizer):
    """What goes into `assistant_model`: None for prompt lookup (the default), else a draft or a model by name or path; a model with another
    tokenizer as a draft that translates."""
    if name is None or name == "prompt_lookup":
        return None
    from ..bench.embedded import load_model
    from ..drafts import NGramDraft, UniformDraft

    if name == "uniform":
        return UniformDraft()
    if name.endswith(".safetensors") and Path(name).is_file():
        return NGramDraft.load(name)
    from ..training.drafter import is_drafter, load

    if is_drafter(name):
        return load(name, model)
    return _translated(name, load_model(name, dtype, model.device), tokenizer)


def _translated(name: str, draft, tokenizer):
    """The draft model, or a `TranslatedDraft` if it comes with a tokenizer that is not the target's; many drafts come without one."""
    from transformers import AutoTokenizer

    from .. import SpeculativeDecoder

    try:
        own = AutoTokenizer.from_pretrained(name)
    except (ValueError, OSError):
        return draft
    made = SpeculativeDecoder(draft, tokenizer=tokenizer, assistant_tokenizer=own).draft
    if made.name != "translated":
        return draft
    typer.echo(f"{PROGRAM}: --draft {name}: its tokenizer is not the target's, so that what it writes is translated.", err=True)
    return made


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt given, or the file's text, or standard input."""
    if prompt is not None and file is not None:
        raise ValueError("--prompt and --file: give one of them.")
    text = prompt if prompt is not None else file.read_text(encoding="utf-8") if file else sys.stdin.read()
    if not text.strip():
        raise ValueError("the prompt is empty; give --prompt TEXT, --file PATH, or text on standard input.")
    return text


def check_folder(path: Path | None, option: str) -> None:
    """Before any work: that `path` is a folder, or can become one."""
    there = next((own for own in (path, *path.absolute().parents) if own.exists()), None) if path else None
    if there is not None and not there.is_dir():
        raise ValueError(f"{option} {path}: {there} is a file; name a folder.")


def check_length(model, ids: list[int], max_new_tokens: int) -> None:
    """Prompt and answer have to fit into the target's context."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and len(ids) + max_new_tokens > limit:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and --max-new-tokens is {max_new_tokens}; the target's context holds {limit}."
        )
