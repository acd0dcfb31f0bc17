"""What the config of a published drafter says of rotary embeddings."""

from __future__ import annotations

from pathlib import Path


def of_one_kind(folder: Path, config: dict) -> dict:
    """The config with one set of `rope_parameters`: where each type of layers has its own, that of windows, which speculators takes for all of them.

    Raises ValueError for embeddings of a part of each head alone that transformers' layers would not take.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "sliding_attention" in rope:
        rope = rope["sliding_attention"]
        config = {**config, "rope_parameters": rope}
    part = rope.get("partial_rotary_factor", 1.0)
    if part not in (None, 1.0) and rope.get("rope_type", rope.get("type", "default")) != "default":  # the default type leaves it aside
        raise ValueError(f"{folder}: config.json says partial_rotary_factor={part}, which is not read.")
    return config
