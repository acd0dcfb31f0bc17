"""`hf-specdec compress`: a model with MX weights in a folder, and what that does to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .common import check_folder, has_parts, refuse_compressed, stored_config
from .leaving import as_typed

GENERATED = "generated"
LAYOUTS = ("mx", "compressed-tensors")
MARK = "\x1a"  # stands for a user's words
NOTE = 24  # characters that a layer's format and its note get at least, beside the layer's name


def compress(
    target: str,
    format: str,
    scale_rule: str,
    skip: list[str],
    lm_head: str | None,
    activations: str | None,
    dtype: str,
    out: Path | None,
    report: bool,
    text: Path | None,
    every_layer: bool,
    json_file: Path | None,
    calibrate: str | None = None,
    layer_format: Sequence[str] = (),
    bits: float | None = None,
    layout: str = "mx",
) -> None:
    """Print what was done, write the folder, then measure; arguments are checked before anything is loaded."""
    _check(out, report, text, json_file, calibrate)
    _check_bits(bits, format, layer_format, calibrate)
    _check_layout(layout, out, activations)
    from .. import mx
    from ..bench.arms import twin
    from ..bench.embedded import load_model
    from ..bench.report import save_json
    from ..mx.choose import larger

    configured = partial(mx.MXConfig, format, scale_rule, skip, lm_head, activations=activations)
    config = configured(layer_formats=map(_pair, layer_format))
    _check_formats([format, *([lm_head] if lm_head else []), *config.layer_formats.values()], calibrate, bits, layout)
    words = _words(text, "--text")
    lesson = None if calibrate == GENERATED else _words(calibrate, "--calibrate")
    refuse_compressed(target, stored_config(target), "name the original checkpoint", published=True)
    needed = "--report" if report else "--calibrate" if calibrate else None
    model, tokenizer = load_model(target, dtype, encoder_decoders=True), _tokenizer(target, needed)
    _check_loaded(target, model, layout)
    if report:
        _check_measured(target, model, tokenizer, words, text)
    before = _bytes(model)
    original = twin(model) if report else None
    sequences = calibration_text(model, tokenizer, lesson) if calibrate else None
    if bits is not None:
        config = configured(layer_formats=mx.choose_formats(model, bits, sequences, larger(format), scale_rule, skip, activations))
    mx.compress(model, format, skip, scale_rule, lm_head, activations=activations, calibration=sequences, layer_formats=config.layer_formats)
    after = _bytes(model)
    console = Console(highlight=False)
    if sequences is not None:
        _print_source(console, calibrate, sequences)
    _print_layers(console, model.mx_report, every_layer, (before, after))
    if out is not None:
        _save(console, out, model, tokenizer, layout)
    quality = mx.compare(original, model, tokenizer, words) if report else None
    if quality is not None:
        _print_quality(console, quality, text)
    if json_file is not None:
        result = {"model": target, "config": config.to_dict(), "calibration": calibrate, "bits": bits, "dtype": str(model.dtype).removeprefix("torch.")}
        result |= {"model_bytes_before": before, "model_bytes_after": after, "compression": model.mx_report.to_dict()}
        save_json({**result, "quality": quality and quality.to_dict()}, json_file)


def _check(out: Path | None, report: bool, text: Path | None, json_file: Path | None, calibrate: str | None) -> None:
    if out is None and not report:
        raise ValueError("give --out DIR to save the compressed model, --report to measure it, or both.")
    if text is not None and not report:
        raise ValueError("--text has no meaning without --report.")
    if text is not None and not text.is_file():
        raise ValueError(f"--text {text}: there is no such file.")
    if calibrate not in (None, GENERATED) and not Path(calibrate).is_file():
        raise ValueError(f"--calibrate {calibrate}: there is no such file; name a file of text, or {GENERATED}.")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ValueError(f"--json {json_file}: its folder does not exist.")
    if json_file is not None and json_file.is_dir():
        raise ValueError(f"--json {json_file} is a folder; name a file.")
    if json_file is not None and json_file.exists() and not has_parts(json_file, {"model", "config", "compression"}):
        raise ValueError(f"--json {json_file} exists and is no report of this command: name another file, or move it away.")
    check_folder(json_file and json_file.absolute().parent, "--json")
    if out is not None and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"--out {out} exists and is not an empty folder: name another one, or remove it first.")
    check_folder(out, "--out")


def _check_loaded(target: str, model: Any, layout: str) -> None:
    """ValueError for a model that is compressed already, or that the layout does not fit."""
    from ..mx.publish import check_dtype

    refuse_compressed(target, model.config, "name the original checkpoint")
    if layout != "mx":
        check_dtype(model)


def _check_measured(target: str, model: Any, tokenizer: Any, words: str | None, text: Path | None) -> None:
    """ValueError for what `compare` would refuse when all else is done."""
    if model.config.is_encoder_decoder:
        raise ValueError(f"--report: {target} is an encoder-decoder, and tokens are predicted there from those before them alone; give --out without it.")
    if words is not None and len(tokenizer(words, verbose=False)["input_ids"]) < 2:
        raise ValueError(f"--text {text}: at least 2 tokens are needed, so that one can be predicted; name another file.")


def _pair(text: str) -> tuple[str, str]:
    pattern, _, format = text.rpartition("=")
    if not pattern or not format:
        raise ValueError(f"--layer-format {text}: give PATTERN=FORMAT, such as down_proj=mxint8.")
    return pattern, format


def _check_bits(bits: float | None, format: str, layer_format: Sequence[str], calibrate: str | None) -> None:
    if bits is None:
        return
    from ..mx.choose import check_bits, larger

    if layer_format:
        raise ValueError("--bits chooses the layers' formats: leave --layer-format out, or name them all without --bits.")
    if calibrate is None:
        raise ValueError(f"--bits needs a text to choose by: give --calibrate FILE, or --calibrate {GENERATED}.")
    if len(larger(format)) < 2:
        raise ValueError(f"--bits has no meaning with --format {format}: there is no larger format to choose.")
    check_bits(bits, larger(format))


def _words(file: Path | str | None, option: str) -> str | None:
    from ..bench.prompts import read_text

    words = None if file is None else read_text(Path(file), option)
    if words is not None and not words.strip():
        raise ValueError(f"{option} {file}: there is no text in it; name another file.")
    return words


def calibration_text(model, tokenizer, words: str | None) -> list:
    """Token ids `[1, n]` of a text in pieces, or of text that the model writes itself: users' turns and answers if it chats."""
    from ..bench.terminal import working
    from ..mx.calibration import own_text, pieces

    if words is not None:
        return pieces(tokenizer(words, verbose=False)["input_ids"])
    start = None
    if tokenizer.chat_template:
        turn = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
        start = tokenizer(turn.partition(MARK)[0], add_special_tokens=False)["input_ids"]
    with working("The model writes text to calibrate on ..."):
        return own_text(model, start)


def _tokenizer(target: str, needed: str | None):
    """The model's tokenizer; None if it has none and no option needs it."""
    from transformers import AutoTokenizer

    from ..bench.embedded import EMBEDDED, embedded_folder

    try:
        return AutoTokenizer.from_pretrained(str(embedded_folder()) if target == EMBEDDED else target)
    except (ValueError, OSError) as error:
        if needed:
            raise ValueError(f"{needed} needs a tokenizer, and {target} has none that can be loaded: {error}") from error
        return None


def _bytes(model) -> int:
    """Bytes of all weights, shared ones once; an MX layer's as they are stored."""
    from ..mx.linear import MXMatrix

    layers = [module for module in model.modules() if isinstance(module, MXMatrix)]
    own = {id(tensor) for layer in layers for tensor in (layer.weight, layer.weight_scale)}
    dense = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in own)
    return dense + sum(int(layer.out_features * layer.in_features * layer.format.bits_per_weight) // 8 for layer in layers)


# ---- what is printed ----


def _print_source(console: Console, calibrate: str, sequences: list) -> None:
    source, tokens = "text of its own" if calibrate == GENERATED else calibrate, sum(ids.numel() for ids in sequences)
    console.print(f"Calibrated on {source}: {tokens} tokens.", markup=False, soft_wrap=True)


def _print_layers(console: Console, report, every_layer: bool, whole: tuple[int, int]) -> None:
    from ..mx.report import COLUMNS, mebibytes

    rows = [COLUMNS, *(tuple(as_typed(cell, {"lm_head": "--lm-head"}) for cell in row) for row in report.rows(every_layer))]
    widths = [max(map(len, column)) + 1 for column in zip(*rows)]
    if sum(widths) - max(widths[2] - NOTE, 0) <= console.width:
        table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0))
        for number, name in enumerate(COLUMNS):
            table.add_column(name, justify="left" if number < 3 else "right", no_wrap=number != 2)
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    else:
        _print_in_pairs(console, rows, widths)
    bits = 8 * sum(layer.bytes_after for layer in report.compressed) / sum(math.prod(layer.shape) for layer in report.compressed)
    console.print(f"{report}; {bits:.2f} bits per compressed weight", markup=False, soft_wrap=True)
    before, after = whole
    text = f"Whole model: {mebibytes(before)} MiB to {mebibytes(after)} MiB ({after / before:.1%} of the size)"
    console.print(text, style="bold", markup=False, soft_wrap=True)


def _print_in_pairs(console: Console, rows: list[tuple[str, ...]], widths: list[int]) -> None:
    """Where the table is wider than the console: a layer's name, and below it the rest, the format with its note last."""
    for number, (name, shape, kind, *figures) in enumerate(rows):
        cells = [shape.ljust(widths[1]), *(figure.rjust(width) for figure, width in zip(figures, widths[3:])), f" {kind}"]
        console.print(f"{name}\n  {''.join(cells)}", style="" if number else "bold", markup=False, soft_wrap=True)


def _print_quality(console: Console, quality, text: Path | None) -> None:
    console.print(f"Predictions on {'the shipped text' if text is None else text}:", style="bold", markup=False, soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    table.add_column(), table.add_column(justify="right", no_wrap=True)
    for row in quality.rows():
        table.add_row(*row)
    console.print(table)


# ---- what is written ----


def _check_formats(formats: list[str], calibrate: str | None, bits: float | None, layout: str) -> None:
    """formats: --format, the head's, if it has one, and those by layer."""
    from ..mx.choose import larger
    from ..mx.formats import get_format
    from ..mx.publish import check_formats

    if calibrate and all(get_format(name).is_dense for name in formats):
        raise ValueError(f"--calibrate has no meaning with --format {formats[0]}: nothing is rounded.")
    if layout != "mx":
        check_formats([*formats, *([] if bits is None else larger(formats[0]))])


def _check_layout(layout: str, out: Path | None, activations: str | None) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"--layout {layout}: take {' or '.join(LAYOUTS)}.")
    if layout != "mx" and out is None:
        raise ValueError("--layout says how --out is written: give --out DIR, too.")
    if layout != "mx" and activations is not None:
        raise ValueError(f"--activations {activations}: compressed-tensors has no such layers; leave it out, or --layout.")


def _save(console: Console, out: Path, model: Any, tokenizer: Any, layout: str) -> None:
    from ..bench.terminal import working
    from ..folders import written_whole
    from ..mx.publish import publish

    with written_whole(out) as partial, working(f"Saving to {out.absolute()} ..."):
        model.save_pretrained(partial) if layout == "mx" else publish(model, partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
    how = "Import hf_specdec.mx before from_pretrained." if layout == "mx" else "mx.load reads it, and what reads compressed-tensors."
    console.print(f"Saved to {out}. {how}", markup=False, soft_wrap=True)
