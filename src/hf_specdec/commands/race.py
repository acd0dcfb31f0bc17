"""`hf-specdec demo --race`: plain generate against speculation, and against speculation with other weights, as a replay."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from rich.console import Console

from ..viz import races

MOST_PARAMETERS = 1_000_000_000  # above it no copies of the model are made for the arms with other weights
WEIGHTS = {"bf16": "bf16 kernels", "mxfp6_e2m3": "MXFP6"}


def race(console: Console, model, tokenizer, inputs: dict[str, Any], options: dict[str, Any], save: Path | None) -> races.Race:
    """options: of the speculative call. save: a GIF of the replay."""
    shared = {"do_sample": False, "max_new_tokens": options["max_new_tokens"]}
    if tokenizer.pad_token_id is not None:
        shared["pad_token_id"] = tokenizer.pad_token_id
    arms = [races.racer("plain", model, inputs, **shared), races.racer("speculative", model, inputs, **{**shared, **options})]
    for name, other in _other_weights(console, model):
        arms.append(races.racer(f"speculative, {name}", other, inputs, **{**shared, **options}))
    result = races.race(arms, tokenizer, console)
    if save is not None:
        result.save_gif(save)
        console.print(f"Written: {save}", markup=False)
    return result


def _other_weights(console: Console, model) -> list[tuple[str, Any]]:
    """Copies of the model with weights in other formats, where kernels for them run and the model is small enough to be copied."""
    if model.num_parameters() > MOST_PARAMETERS:
        return []
    try:
        from .. import mx

        info = mx.kernel_info()
        if model.device.type == "cpu" and info["path"] == "torch":
            raise ImportError(info["reason"] or "the kernels are not compiled")
        return [(name, mx.compress(copy.deepcopy(model), format, measure=False)) for format, name in WEIGHTS.items()]
    except (ImportError, ValueError) as error:
        console.print(f"Without arms with MX weights: {error}", style="dim", markup=False)
        return []
