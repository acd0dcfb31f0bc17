"""Prompt sets: those shipped with the package, a JSONL file, or a hub data set through `datasets`.

Accepted records: `turns` (Spec-Bench, MT-Bench, ours; the first turn is used), `prompt` (HumanEval: raw text that is
continued, or MT-Bench on the hub: a list of turns), or `text`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..hints import install

SHIPPED = ("code_edit", "summary", "chat")


@dataclass(frozen=True)
class Prompt:
    """One prompt. chat: whether it is a user's turn, for which the tokenizer's chat template is applied if it has one."""

    id: str
    category: str
    text: str
    chat: bool = True

    def ids(self, tokenizer) -> list[int]:
        if self.chat and tokenizer.chat_template:
            turns = [{"role": "user", "content": self.text}]
            return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, tokenizer_kwargs={"verbose": False})["input_ids"]
        return tokenizer(self.text, verbose=False)["input_ids"]  # a text that is too long is refused with its own words


def load_prompts(source: str = "shipped", limit: int | None = None) -> list[Prompt]:
    """The prompts of `source`: "shipped", one of its sets, the path of a .jsonl file, or "hub:NAME[:SPLIT]".

    limit: at most this many of each category. ValueError names what is wrong with a source or a record.
    """
    if source == "shipped" or source in SHIPPED:
        lines = files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8").splitlines()
        prompts = [prompt for prompt in _read(lines, "shipped") if source in ("shipped", prompt.category)]
    elif source.startswith("hub:"):
        prompts = _from_hub(source)
    elif Path(source).is_file():
        prompts = _read(read_text(Path(source), "prompts").split("\n"), source)
    else:
        raise ValueError(f"prompts={source!r} is neither a file nor one of {['shipped', *SHIPPED]}, nor 'hub:NAME[:SPLIT]'.")
    if not prompts:
        raise ValueError(f"prompts={source!r} holds no prompt.")
    return prompts if limit is None else list(_first_of_each(prompts, limit))


def read_text(path: Path, argument: str) -> str:
    """A text file's words, without a byte order mark; ValueError, which names `argument`, if they are not in UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{argument} {path}: cannot be read ({error.strerror}); name a text file.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{argument} {path}: not text in UTF-8 ({error}); store it in UTF-8.") from None


def json_lines(lines: Iterable[str | bytes], source: str | Path) -> Iterator[tuple[int, Any]]:
    """(number, record) of every line that is not blank; lines of bytes are in UTF-8. ValueError, which names `source` and line, without JSON."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                record = json.loads(line if isinstance(line, str) else line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{source}:{number}: not JSON ({error}); a .jsonl file has one object per line.") from None
            yield number, record


def data_set(source: str, argument: str) -> tuple[Any, str, str]:
    """The package `datasets`, and name and split, "" for none, of hub:NAME[:SPLIT], or of a folder. ValueError or ImportError, which name `argument`."""
    name, _, split = source.removeprefix("hub:").partition(":") if source.startswith("hub:") else (source, "", "")
    if not name:
        raise ValueError(f"{argument} {source}: the data set's name is missing; give hub:NAME[:SPLIT].")
    try:
        import datasets
    except ImportError:
        raise ImportError(f"{argument} {source}: data sets need the package datasets: {install('train')}") from None
    return datasets, name, split


def by_category(prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return groups


def _first_of_each(prompts: list[Prompt], limit: int) -> Iterable[Prompt]:
    for group in by_category(prompts).values():
        yield from group[:limit]


def _read(lines: list[str], source: str) -> list[Prompt]:
    return [_prompt(record, f"{source}:{number}", Path(source).stem) for number, record in json_lines(lines, source)]


def _from_hub(source: str) -> list[Prompt]:
    datasets, name, split = data_set(source, "prompts")
    data = datasets.load_dataset(name)
    split = split or ("test" if "test" in data else next(iter(data)))
    return [_prompt(record, f"{name}:{split}:{i}", name.rsplit("/", 1)[-1]) for i, record in enumerate(data[split])]


def _prompt(record: Any, place: str, category: str) -> Prompt:
    """The prompt in one record of any of the accepted kinds."""
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected a JSON object with 'turns', 'prompt' or 'text'.")
    field, value = next(((name, record[name]) for name in ("turns", "prompt", "text") if record.get(name)), (None, None))
    chat = isinstance(value, (list, tuple)) or field == "text"
    text = value[0] if isinstance(value, (list, tuple)) else value
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place}: no prompt found; expected 'turns', 'prompt' or 'text' with some text.")
    name = next((record[key] for key in ("id", "question_id", "task_id") if key in record), place)
    return Prompt(str(name), str(record.get("category") or category), text, chat)
