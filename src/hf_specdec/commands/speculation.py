"""`generate --config`: the options of a written speculative_config.json, under those that are given on the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .common import load_draft, parse_k


def speculation_of(config: Path | None, draft: str | None, k: str | None, lenience: float | None, seed: int | None):
    """The `SpeculativeConfig` in the folder (or file) `config`, the defaults without one, with what is not None in place of its own. A draft
    that is given takes the place of the config's, and of its options."""
    from .. import SpeculativeConfig

    base = SpeculativeConfig() if config is None else SpeculativeConfig.from_pretrained(config)
    given = {"num_assistant_tokens": None if k is None else parse_k(k), "lenience": lenience, "seed": seed}
    changed = {name: value for name, value in given.items() if value is not None}
    if draft is not None:
        changed |= {"draft": SpeculativeConfig.draft, "draft_options": {}, "draft_source": None, "predicted_speedup": None}
    return dataclasses.replace(base, **changed)


def beyond(speculation) -> dict[str, Any] | None:
    """The options of a config that differ from the defaults and have no option of the command line, None for none."""
    own, known = speculation.to_dict(), type(speculation)().to_dict()
    left = {name: value for name, value in own.items() if value != known[name] and name not in ("num_assistant_tokens", "lenience", "seed", "draft", "predicted_speedup")}
    return left or None


def draft_of(draft: str | None, speculation, dtype: str, model, tokenizer) -> tuple[Any, Any]:
    """What goes into `assistant_model`, None where the config names the draft; and the draft that it will be. Every call makes the config's
    own anew, around weights that are kept, so that none depends on the calls before."""
    from .. import SpeculativeDecoder

    if draft is not None:
        made = load_draft(draft, dtype, model, tokenizer)
        return made, made
    decoder = SpeculativeDecoder(config=speculation)
    decoder.load(model)
    return None, decoder.draft
