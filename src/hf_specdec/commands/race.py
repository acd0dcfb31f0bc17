"""`hf-specdec demo --race`: baseline, MX weights, MX weights with speculation, as a replay; where MX has no kernels, plain and speculative."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from ..viz import races

MOST_PARAMETERS = 1_000_000_000  # above it no copy of the model is made for the arms with MX weights


def race(console: Console, model, tokenizer, inputs: dict[str, Any], options: dict[str, Any], save: Path | None, made_for: Callable) -> races.Race:
    """options: of the speculative call. save: a GIF of the replay. made_for(model): the draft made again for that copy of the model, since it may read its states."""
    shared = {"do_sample": False, "num_beams": 1, "max_new_tokens": options["max_new_tokens"]}
    if tokenizer.pad_token_id is not None:
        shared["pad_token_id"] = tokenizer.pad_token_id
    packed, ours = _packed(console, model), {**shared, **options}
    arms = [races.racer("baseline", model, inputs, **shared)]
    if packed is None:
        arms.append(races.racer("speculation", model, inputs, **ours))
    else:
        ours["assistant_model"] = made_for(packed)
        arms += [races.racer("MXFP6", packed, inputs, **shared), races.racer("MXFP6 + speculation", packed, inputs, **ours)]
    result = races.race(arms, tokenizer, console)
    if save is not None:
        result.save_gif(save)
        console.print(f"Written: {save}", markup=False)
    return result


def _packed(console: Console, model):
    """A copy of the model with MXFP6 weights, or None where no kernels for them run or the model is too large to be copied."""
    if model.num_parameters() > MOST_PARAMETERS:
        return None
    try:
        from .. import mx

        info = mx.kernel_info()
        if model.device.type == "cpu" and info["path"] == "torch":
            raise ImportError(info["reason"] or "the kernels are not compiled")
        return mx.compress(copy.deepcopy(model), measure=False)
    except (ImportError, ValueError) as error:
        console.print(f"Without MX weights: {error}", style="dim", markup=False)
        return None
