"""The rows of a data set: a .jsonl, .json, .csv or .parquet file, or a hub data set, each row with one prompt.

The prompt is a text; a list of texts, of which the first is taken (the turns of Spec-Bench and MT-Bench); or a list of messages,
from which the answers at the end are dropped. Rows are numbered from 0 in the order of the file; blank lines do not count.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..bench.prompts import Prompt, data_set, json_lines
from ..hints import first_line, install

COLUMNS = ("prompt", "turns", "messages", "text")
KINDS = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(slots=True)
class Row:
    """index: the row's number in the data set. prompt: a text or a list of messages. problem: why it has no answer, or ""."""

    index: int
    prompt: str | list[dict[str, Any]]
    digest: str
    problem: str = ""

    def ids(self, tokenizer, raw: bool) -> list[int]:
        """The prompt's tokens; `raw` leaves the chat template out."""
        if isinstance(self.prompt, str):
            return Prompt("", "", self.prompt, chat=not raw).ids(tokenizer)
        if raw or not tokenizer.chat_template:
            raise ValueError("messages need a chat template" + (" and go without --raw" if raw else ", the tokenizer has none"))
        try:
            return tokenizer.apply_chat_template(self.prompt, add_generation_prompt=True, return_dict=True, tokenizer_kwargs={"verbose": False})["input_ids"]
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template does not take its messages ({first_line(error).rstrip('.')})") from error


def read_rows(source: str, column: str | None = None, limit: int | None = None) -> tuple[list[Row], str]:
    """The first `limit` rows and the column they are from: `column`, or the first of `COLUMNS` that the data set has.

    ValueError names a source that cannot be read or has no row, and the columns there are where the one asked for is missing.
    """
    rows, asked = [], column
    for index, record in enumerate(islice(_records(source), limit)):
        if not isinstance(record, dict):
            raise ValueError(f"{source}: row {index} is no JSON object, but {type(record).__name__}.")
        column = column or next((name for name in COLUMNS if name in record), None)
        if column not in record:
            wanted = "another" if asked else "the prompt's column"
            what = f"no column {column!r}" if column else f"no column of {', '.join(COLUMNS)}"
            raise ValueError(f"{source}: row {index} has {what}; its columns are {list(record)}. Name {wanted} with --column NAME.")
        rows.append(_row(index, record[column]))
    if not rows:
        raise ValueError(f"{source}: the data set is empty; there is nothing to do.")
    return rows, column


def fingerprint(rows: list[Row]) -> str:
    """One number for all the prompts, in their order."""
    return hashlib.sha256("".join(row.digest for row in rows).encode()).hexdigest()


def _row(index: int, value: Any) -> Row:
    prompt, problem = value, ""
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, dict) for part in value):
        prompt = list(value)
        while prompt and prompt[-1].get("role") == "assistant":
            prompt.pop()
        problem = "" if prompt else "its messages are all answers"
    elif isinstance(value, (list, tuple)):
        prompt = value[0] if value else ""
    if isinstance(prompt, str):
        problem = "" if prompt.strip() else "the prompt is empty"
    elif not isinstance(prompt, list) or not all(isinstance(part, dict) for part in prompt):
        problem = f"the prompt is neither text nor messages, but {'null' if prompt is None else type(prompt).__name__}"
    data = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    try:
        data = data.encode()
    except UnicodeEncodeError:
        data, problem = data.encode(errors="surrogatepass"), "the prompt is not valid Unicode"
    return Row(index, prompt, hashlib.sha256(data).hexdigest(), problem)


def _records(source: str) -> Iterable[Any]:
    if source.startswith("hub:"):
        return _hub(source)
    path = Path(source)
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise ValueError(f"--dataset {source}: give a file that ends in one of {', '.join(KINDS)}, or hub:NAME[:SPLIT].")
    if not path.is_file():
        raise ValueError(f"--dataset {source}: there is no such file.")
    return {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}[kind](path)


def _jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        yield from (record for _, record in json_lines(file, path))


def _json(path: Path) -> Iterator[Any]:
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}).") from None
    if not isinstance(records, list):
        raise ValueError(f"{path}: a .json file holds one array of objects; this one holds {type(records).__name__}.")
    return iter(records)


def _csv(path: Path) -> Iterator[Any]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from csv.DictReader(file, strict=True)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not CSV in UTF-8 ({error}).") from None


def _parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ImportError(f"{path}: .parquet files need the package datasets: {install('train')}") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(256):
                yield from batch.to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path}: not a whole Parquet file ({error}).") from None


def _hub(source: str) -> Iterator[Any]:
    datasets, name, split = data_set(source, "--dataset")
    if split:
        return iter(datasets.load_dataset(name, split=split))
    data = datasets.load_dataset(name)
    if len(data) > 1:
        raise ValueError(f"hub:{name} has the splits {list(data)}: name one, hub:{name}:SPLIT.")
    return iter(next(iter(data.values())))
