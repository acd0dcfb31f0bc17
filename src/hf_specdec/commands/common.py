"""What the commands share: how arguments are read."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer

from .leaving import PROGRAM

# --option: the range that it has to be in, and whether the lower end belongs to it
RANGES = {"temperature": (0, math.inf, False), "top_k": (0, math.inf, True), "top_p": (0, 1, True), "min_p": (0, 1, True), "repetition_penalty": (0, math.inf, False)}


def dtype_name(value: str) -> str:
    """`--dtype` as the parser takes it."""
    from ..bench.embedded import check_dtype

    try:
        check_dtype(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return value


def draft_name(value: str | list[str] | None) -> str | list[str] | None:
    """`--draft` as the parser takes it: no folder of a speculative_config.json alone, which is no draft."""
    from ..config import CONFIG_NAME

    for name in [value] if isinstance(value, str) else value or []:
        path = Path(name)
        if not name.strip():
            raise typer.BadParameter("a name is missing; prompt_lookup is what goes without any.")
        if path.name == CONFIG_NAME and path.is_file() or (path / CONFIG_NAME).is_file() and not any((path / own).is_file() for own in ("config.json", "drafter.json")):
            raise typer.BadParameter(f"{name} holds a {CONFIG_NAME}, not a model: pass it as --config (generate and bench take it).")
    return value


def parse_k(value: str) -> int | str:
    """K as it goes into `num_assistant_tokens`: a whole number or "auto"; the range is the config's to check."""
    if value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"--k {value}: must be an int in 1..64 or auto.") from None


def check_sampling(values: dict[str, Any]) -> None:
    """ValueError for a number with which sampling means nothing, or which transformers would silently leave aside."""
    for name, value in values.items():
        low, high, closed = RANGES[name]
        if not (low < value or closed and value == low) or not value <= high or value == math.inf:
            wanted = f"in {low}..{high}" if high < math.inf else f"at least {low}" if closed else f"a finite number above {low}"
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be {wanted}.")


def apply_mx(model, format: str | None, target: str):
    """`--mx`: the weights of the model loaded from `target` in that MX format, in place; nothing to do for None."""
    if format is None:
        return
    from ..mx import compress

    refuse_compressed(target, model.config, "leave --mx out, or name the original checkpoint")
    compress(model, format)


def refuse_compressed(target: str, config: Any, remedy: str, published: bool = False) -> None:
    """ValueError where a model's config, or what its config.json says, has the weights of `target` in an MX format already. published: or experts in MXFP4 of transformers'
    own kind, of which vLLM, say, knows; those that a loaded model has are refused anyway."""
    from ..mx.blocks import BLOCKS, BlocksConfig

    method = config.get("quantization_config") if isinstance(config, dict) else getattr(config, "quantization_config", None)
    experts, method = isinstance(method, BlocksConfig), method.to_dict() if hasattr(method, "to_dict") else method
    kind = method.get("quant_method") if isinstance(method, dict) else None
    if experts or published and kind == BLOCKS:
        raise ValueError(f"{target}: its experts were published in MXFP4, and generate and bench read them as they are; for other formats save a dense copy "
                         "(from_pretrained with quantization_config=Mxfp4Config(dequantize=True)), and name that.")
    if kind == "mx":
        raise ValueError(f"{target} is compressed already ({method.get('format')}): {remedy}.")


def stored_config(target: str) -> dict | None:
    """The config.json of a folder; of what is none, or a broken one, loading has to speak."""
    try:
        found = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def check_draft(name: str | None) -> None:
    """ValueError for a --draft that stands for nothing, as far as it can be told before anything is loaded; a hub may still have no model of that name."""
    from ..bench.embedded import EMBEDDED, near
    from ..config import ALONE, OF_TARGET
    from ..registry import DRAFTS, shipped
    from ..training.drafter import is_drafter

    table = name is not None and name.endswith(".safetensors")
    if name is None or Path(name).is_dir() or table and Path(name).is_file() or name in (*ALONE, *OF_TARGET, EMBEDDED) or is_drafter(name):
        return
    if len(parts := name.split("+")) > 1:
        if not all(parts) or len(set(parts)) < len(parts):
            raise ValueError(f"--draft {name}: A+B takes the names of two drafts or more, each once.")
        for part in parts:
            check_draft(part)
        return
    names = f"the names are {', '.join([*ALONE, *OF_TARGET, *shipped()])}"
    slip = None if name in DRAFTS else near(name, [*DRAFTS, *shipped(), EMBEDDED])
    if slip not in (None, name):
        raise ValueError(f"--draft {name}: did you mean {slip}?")
    if name in DRAFTS:
        raise ValueError(f"--draft {name}: a draft of that name is made of weights; name their folder or file, or a draft without any: {names}.")
    if not Path(name).is_file() and (table or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"--draft {name}: no such {'file' if table else 'folder'} and no draft of that name; {names}.")


def load_draft(name: str | None, dtype: str, model, tokenizer):
    """What goes into `assistant_model`: None for prompt lookup (the default), else a draft or a model by path or name, a folder before a draft
    of its name; a model with another tokenizer as a draft that translates, and an assistant that a family ships as its draft; several, with + between them, as
    the mixture that chooses one a round."""
    from ..assistants import kind_of
    from ..bench.embedded import load_model
    from ..config import ALONE, OF_TARGET, SpeculativeConfig
    from ..drafts.datastore import FORMAT
    from ..drafts.mapped import format_of
    from ..loading import as_draft, loaded
    from ..registry import DRAFTS, load as registered, shipped
    from ..training.drafter import is_drafter, load

    folder = name is not None and Path(name).is_dir()
    if name is None or name == "prompt_lookup" and not folder:
        return None
    if name in ALONE and not folder:
        return registered(DRAFTS, name, "--draft")()
    if name in OF_TARGET and not folder:
        return loaded(SpeculativeConfig(draft=name), model)
    if name.endswith(".safetensors") and Path(name).is_file():
        return registered(DRAFTS, "retrieval" if format_of(name) == FORMAT else "ngram", "--draft").load(name, tokenizer)
    if is_drafter(name):
        return load(name, model)
    check_draft(name)
    if len(parts := name.split("+")) > 1 and not folder:
        made = [as_draft(load_draft(part, dtype, model, tokenizer), SpeculativeConfig()) for part in parts]
        return registered(DRAFTS, "mixture", "--draft")(made, mode="choose")
    try:
        draft = load_model(name, dtype, model.device, encoder_decoders=model.config.is_encoder_decoder)
    except OSError as error:
        if folder:
            raise
        names = ", ".join([*ALONE, *OF_TARGET, *shipped()])
        raise ValueError(f"--draft {name}: no such folder and no draft of that name; the names are {names}. As a hub id: {error.__cause__ or error}") from error
    return as_draft(draft, SpeculativeConfig()) if kind_of(draft) else _translated(name, draft, tokenizer)


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
    from ..bench.prompts import read_text

    text = prompt if prompt is not None else read_text(file, "--file") if file else sys.stdin.read().removeprefix("\ufeff")
    if not text.strip():
        raise ValueError("the prompt is empty; give --prompt TEXT, --file PATH, or text on standard input.")
    return text


def check_folder(path: Path | None, option: str) -> None:
    """Before any work: that `path` is a folder, or can become one, and that files can be written there."""
    if path is None:
        return
    there = next(own for own in (path, *path.absolute().parents) if os.path.lexists(own))
    if not there.is_dir():
        raise ValueError(f"{option} {path}: {there} is a {'file' if there.exists() else 'link to nothing'}; name a folder.")
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(f"{option} {path}: nothing can be written in {there} ({error.strerror}); name another folder.") from None


def check_overwrite(folder: Path | None, report: str, others: tuple[str, ...], parts: set[str]) -> None:
    """`check_folder` of `--out`, and that it holds no file that the command would overwrite and did not write. It knows its own former output by
    `report`, a JSON file with `parts` in it; `others` lie beside that one."""
    check_folder(folder, "--out")
    if folder is None:
        return
    there = next((name for name in (report, *others) if (folder / name).exists()), None)
    if there is not None and not has_parts(folder / report, parts):
        raise ValueError(f"--out {folder} holds {there}, which would be overwritten, and no {report} of this command: name another folder, or move it away.")


def has_parts(file: Path, parts: set[str]) -> bool:
    """Whether it is a JSON file of an object with these keys: a former report of a command that writes them."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and parts <= found.keys()


def check_length(model, ids: list[int], max_new_tokens: int, prompt: str = "the prompt") -> None:
    """ValueError unless prompt and answer fit into the target's context; prompt: what the message calls it."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    needed = max(len(ids), 1 + max_new_tokens) if model.config.is_encoder_decoder else len(ids) + max_new_tokens  # the encoder's, and the decoder's
    if limit and needed > limit:
        raise ValueError(
            f"{prompt} has {len(ids)} tokens and --max-new-tokens is {max_new_tokens}; the target's context holds {limit}."
        )
