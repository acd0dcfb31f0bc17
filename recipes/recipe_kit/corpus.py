"""Text to train on: files, a `datasets` source, or the text shipped with the package; a tokenizer trained on it; token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from shutil import rmtree
from zipfile import BadZipFile

import numpy as np

from hf_specdec.hints import first_line

from .recipe import RecipeError

END, UNKNOWN = "[SEP]", "[UNK]"
SOURCE = "source.json"  # beside a tokenizer: what it was trained on
HELD_OUT = 50  # every fiftieth document is kept from training, for the prompts


@dataclass(frozen=True)
class Corpus:
    """train, held_out: int64 arrays of token ids, documents one after another, each closed by END."""

    tokenizer: object
    train: np.ndarray
    held_out: np.ndarray

    def prompts(self, names: list[str], length: int) -> dict[str, list[int]]:
        """A stretch of held-out text for every name, spread over all of it."""
        room = len(self.held_out) - length
        if room < len(names):
            raise RecipeError(f"the held-out text has {len(self.held_out)} tokens, too few for {len(names)} prompts of {length}: give more text.")
        return {name: self.held_out[i * room // len(names):][:length].tolist() for i, name in enumerate(names)}


def documents(files: list[Path] | None = None, dataset: str | None = None, column: str = "text", limit: int | None = None) -> Iterator[str]:
    """The lines of UTF-8 files, or a column of "NAME[:SPLIT]", streamed; with neither, the lines of the text shipped with the package.
    RecipeError names what is missing."""
    if files and dataset:
        raise RecipeError("--text and --dataset: give one of them.")
    source = _of_dataset(dataset, column) if dataset else _of_files(files) if files else _shipped()
    return islice((text for text in source if text.strip()), limit)


def _of_files(files: list[Path]) -> Iterator[str]:
    for path in files:
        if not path.is_file():
            raise RecipeError(f"--text {path}: there is no such file.")
    for path in files:
        try:
            with open(path, encoding="utf-8") as lines:
                yield from lines
        except UnicodeDecodeError as error:
            raise RecipeError(f"--text {path}: not a UTF-8 text file ({error}).") from error


def _of_dataset(name: str, column: str) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise RecipeError("--dataset needs the package datasets: pip install '.[train]' in the checkout") from None
    name, _, split = name.partition(":")
    local = Path(name).suffix.lstrip(".")
    try:
        if Path(name).is_file():
            data = load_dataset({"jsonl": "json"}.get(local, local), data_files=name, split="train", streaming=True)
        else:
            data = load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # whatever the hub client raises: a missing name, a gated set, no connection
        raise RecipeError(f"--dataset {name}: cannot be read ({first_line(error)}). It needs a connection to huggingface.co and, if it is gated, `hf auth "
                          f"login`; or give text files with --text.") from error
    for record in data:
        if not isinstance(record.get(column), str):
            raise RecipeError(f"--dataset {name}: there is no text in a column {column!r}; its columns are {sorted(record)}. Name one with --column.")
        yield record[column]


def _shipped() -> Iterator[str]:
    from hf_specdec.bench.prompts import load_prompts
    from hf_specdec.mx.quality import sample_text

    yield from sample_text().splitlines()
    for prompt in load_prompts():
        yield from prompt.text.splitlines()


def build_tokenizer(texts: Iterator[str], vocabulary: int):
    """A WordPiece tokenizer as BERT's, lower case, of at most `vocabulary` tokens, trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    core.normalizer, core.pre_tokenizer, core.decoder = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    core.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=[UNKNOWN, END], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token=UNKNOWN, sep_token=END)


def shipped_corpus() -> Corpus:
    """The text shipped with the package, with a tokenizer of 384 tokens trained on it: for toys."""
    return build_corpus(documents, build_tokenizer(documents(), 384))


def kept_tokenizer(texts, vocabulary: int, folder: Path, source: dict):
    """`build_tokenizer` of the documents texts() gives, kept in the folder (whole or not at all) with `source`, and read again for the same one."""
    from transformers import AutoTokenizer

    kept, partial = folder / "tokenizer", folder / "tokenizer.partial"
    if kept.exists():
        try:
            _check_source(kept, (kept / SOURCE).read_text(encoding="utf-8"), source)
            return AutoTokenizer.from_pretrained(kept)
        except RecipeError:
            raise
        except Exception as error:  # the library of tokenizers raises nothing narrower for a file that is cut short
            raise RecipeError(f"{kept} holds no whole tokenizer of this recipe: move it away, or take another --work.") from error
    tokenizer = build_tokenizer(texts(), vocabulary)
    rmtree(partial, ignore_errors=True)
    tokenizer.save_pretrained(partial)
    (partial / SOURCE).write_text(json.dumps(source), encoding="utf-8")
    partial.rename(kept)
    return tokenizer


def _check_source(kept: Path, stored: str, source: dict | None) -> None:
    if json.loads(stored) != source:
        raise RecipeError(f"{kept} was made of other text: {stored}, this call has {json.dumps(source)}. Take another --work.")


def build_corpus(texts, tokenizer, folder: Path | None = None, source: dict | None = None) -> Corpus:
    """Token ids of the documents texts() gives. With a folder, they are kept there as `tokens.npz` and read again if `source` (what
    the texts are) is the same; RecipeError if the folder holds other ones."""
    kept = folder / "tokens.npz" if folder else None
    if kept and kept.exists():
        try:
            with np.load(kept, allow_pickle=False) as stored:
                _check_source(kept, str(stored["source"]), source)
                return Corpus(tokenizer, stored["train"], stored["held_out"])
        except RecipeError:
            raise
        except (OSError, ValueError, TypeError, KeyError, EOFError, BadZipFile) as error:
            raise RecipeError(f"{kept} is damaged or not of this recipe: move it away, or take another --work.") from error
    end = tokenizer.convert_tokens_to_ids(END if END in tokenizer.get_vocab() else tokenizer.eos_token or END)
    parts: tuple[list, list] = ([], [])
    iterator, number = texts(), 0
    while batch := list(islice(iterator, 4096)):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            parts[number % HELD_OUT == HELD_OUT // 2].append(np.array([*ids, end], np.int64))
            number += 1
    if not all(parts):
        raise RecipeError(f"the text has {number} documents (lines that are not empty): at least {HELD_OUT} are needed, some to train on, some held out.")
    train, held_out = map(np.concatenate, parts)
    if kept:
        folder.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(".partial.npz")
        np.savez(partial, train=train, held_out=held_out, source=np.array(json.dumps(source)))
        partial.replace(kept)
    return Corpus(tokenizer, train, held_out)
