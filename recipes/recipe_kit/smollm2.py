"""The shape of the embedded model, SmolLM2-135M, and of the drafter that comes with the package."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig

HEAD = 8192  # tokens that the shipped drafter's head keeps


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
        max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def drafter(target):
    """As shipped: the target's first and last layer in MXINT8, a head of `HEAD` tokens; written and read, so that it is packed as that one is."""
    from hf_specdec.training.drafter import build, load, save

    with TemporaryDirectory() as folder:
        return load(save(build(target, [0, target.config.num_hidden_layers - 1], torch.arange(HEAD)), folder, "shape", "mxint8"), target)
