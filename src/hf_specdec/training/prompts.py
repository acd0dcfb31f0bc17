"""Prompts to train on: the target's own idea of what users write (Magpie, arXiv 2406.08464), a file, or a data set."""

from __future__ import annotations

import random
from pathlib import Path

from ..bench.prompts import data_set, json_lines, read_text

MARK = "\x00here\x00"

# How user turns begin; the target writes the rest. kind -> (tokens at most, openings).
OPENINGS: dict[str, tuple[int, list[str]]] = {
    "chat": (56, ["", "", "", "How do I", "How can", "What is", "What are the", "Can you explain", "Write a", "Write a short story about",
                  "Give me", "I want to", "I am", "Why", "Tell me about", "Imagine", "Who", "List", "Compare", "Describe", "Help me write",
                  "Draft an email", "Suggest", "Discuss", "Create a", "Explain how", "Should I", "Act as", "Rewrite", "Edit", "Plan"]),
    "code": (72, ["Write a Python function", "Write a function that", "Implement", "Fix this code:\n\n```python\ndef", "How do I",
                  "Explain this code:\n\n```python\n", "Write a SQL query", "Write a JavaScript function", "Write a program",
                  "Complete the following function.\n\n```python\ndef ", "Add type hints to this function:\n\n```python\ndef "]),
    "summary": (200, ["Summarize:\n", "Summarize the following text:\n\n", "Summarize this article in a few sentences.\n\n",
                      "Give a summary of this news story:\n", "Shorten this text:\n\n", "What are the key points of this text?\n\n"]),
    "passage": (200, ["Answer the question from the passage.\n\nPassage: ", "Context: ", "Read the text and answer the question.\n\nText: ",
                      "Here are some documents.\n\nDocument 1: ", "Use the following information to answer. "]),
    "question": (32, ["who", "what", "when did", "where is", "how many", "which", "what year", "who wrote", "what does", "Who was the",
                      "Where did", "In which", "how long", "What is the name of", "what is the difference between"]),
    "math": (72, ["A store sells", "If", "There are", "Solve", "Calculate", "A train", "How many", "Tom has", "A farmer", "Find", "Maria buys",
                  "What is the value of", "A rectangle", "In a class of", "Each"]),
    "translation": (48, ["Translate German to English: ", "Translate this sentence to English: ", "Translate to French: ",
                         "Translate the following German text into English: Die", "Translate into English: Der", "Translate into English: Es"]),
}


def chat_parts(tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of the chat template before a user's words, and from their end to the answer.

    Raises ValueError if the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("data: the target's tokenizer has no chat template, so it cannot make up prompts; give prompts in a file.")
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True)
    before, after = text.split(MARK)
    return tuple(tokenizer(part, add_special_tokens=False).input_ids for part in (before, after))


def prompt_ids(tokenizer, prompts: list[str]) -> list[list[int]]:
    """Token ids of what users say, in the chat template and up to the answer; of a tokenizer without one, as it spells any text."""
    if not tokenizer.chat_template:
        return [tokenizer(prompt).input_ids for prompt in prompts]
    before, after = chat_parts(tokenizer)
    return [before + tokenizer(prompt, add_special_tokens=False).input_ids + after for prompt in prompts]


TURNS = ("chat", "passage", "chat", "code", "chat", "summary", "question", "chat", "passage", "math", "chat", "translation")


def openings(number: int, count: int, seed: int) -> tuple[str, int, list[str]]:
    """The kind of the shard `number`, how long its user turns may get, and `count` openings of it."""
    random_, kind = random.Random(seed), TURNS[number % len(TURNS)]
    limit, texts = OPENINGS[kind]
    return kind, limit, [random_.choice(texts) for _ in range(count)]


def find_prompts(source: str, column: str | None = None) -> dict[str, str]:
    """The prompts of a .txt file (one a line), a .jsonl file (`column`, else prompt, text, instruction or the first of turns), a folder that `datasets`
    wrote, or hub:NAME[:SPLIT]; each by its place, such as "asked.txt, line 3".

    Raises ValueError or OSError naming what is missing.
    """
    if source.startswith("hub:") or Path(source).is_dir():
        return _of_dataset(source, column)
    return _of_file(Path(source), column)


def _of_file(path: Path, column: str | None) -> dict[str, str]:
    if not path.is_file():
        raise ValueError(f"prompts: {path} is not a file; name one that there is, a folder that `datasets` wrote, or hub:NAME.")
    text = read_text(path, "prompts")
    if not text.strip():
        raise ValueError(f"prompts: {path} is empty; write one prompt a line, or leave prompts out.")
    if path.suffix == ".txt" and column:
        raise ValueError(f"column: {path} has none, its lines are the prompts; leave column={column!r} out.")
    lines = text.split("\n")
    if path.suffix == ".txt":
        return {f"{path}, line {number}": line for number, line in enumerate(lines, start=1) if line.strip()}
    records = {f"{path}, line {number}": record for number, record in json_lines(lines, path)}
    return {place: _prompt(record, column, place) for place, record in records.items()}


def _prompt(row: object, column: str | None, source) -> str:
    if not isinstance(row, dict):
        raise ValueError(f"prompts: {source} is no JSON object, but {type(row).__name__}; write {{\"prompt\": TEXT}}.")
    names = [column] if column else ["prompt", "text", "instruction", "turns"]
    for name in names:
        if name in row:
            value = row[name]
            value = value[0] if isinstance(value, list) and value else value
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"prompts: {source} has no text in {name!r}, but {row[name]!r:.60}; write a text, or a list that begins with one.")
            if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError(f"prompts: {source} is not valid Unicode (half of a surrogate pair); mend it, or leave it out.")
            return value
    raise ValueError(f"prompts: {source} has no column {names[0] if column else ' or '.join(names)}; it has {sorted(row)}. "
                     f"Name one with --column.")


def _of_dataset(source: str, column: str | None) -> dict[str, str]:
    """The prompts of a data set of the hub, or of a folder that `datasets` wrote; of its split "train", or of its only one, unless one is named."""
    datasets, name, split = data_set(source, "prompts")
    on_disk = Path(name).is_dir() and any((Path(name) / kept).is_file() for kept in ("dataset_dict.json", "state.json"))  # what save_to_disk leaves
    try:
        data = datasets.load_from_disk(name) if on_disk else datasets.load_dataset(name, split=split or "train")
        split = split if on_disk else ""
    except ValueError:  # no such split, which the others would tell
        data = datasets.load_dataset(name)
    if isinstance(data, dict):
        data = _split(name, data, split)
    elif split:
        raise ValueError(f"prompts: {name} has no splits; leave {split!r} out.")
    if not len(data):
        raise ValueError(f"prompts: {name} is empty; name another data set.")
    return {f"{name}, row {i}": _prompt(data[i], column, f"{name}, row {i}") for i in range(len(data))}


def _split(name: str, data: dict, split: str):
    """The split asked for, else "train", else the only one."""
    asked = split or ("train" if "train" in data or len(data) != 1 else next(iter(data)))
    if asked not in data:
        raise ValueError(f"prompts: {name} has no split {asked!r}, but {list(data)}; name one of them, hub:{name}:SPLIT.")
    return data[asked]
