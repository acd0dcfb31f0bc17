"""Text to calibrate on: what is given, checked; a text in pieces; and text that the model writes itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import torch
from transformers import GenerationConfig

TOKENS, LENGTH = 8192, 256  # of calibration text, and of a piece of it
READ = "a text is read by a tokenizer first: pieces(tokenizer(text).input_ids), from hf_specdec.mx.calibration."


def token_ids(calibration: Iterable) -> list[torch.Tensor]:
    """`calibration` as int64 tensors `[1, n]`. Raises TypeError for what is no iterable of sequences, ValueError for none and for sequences of anything
    but one or more integers."""
    if isinstance(calibration, str) or not isinstance(calibration, Iterable):
        raise TypeError(f"calibration must be sequences of token ids, not {type(calibration).__name__}; {READ}")
    sequences = [_sequence(number, ids) for number, ids in enumerate(calibration)]
    if not sequences:
        raise ValueError("calibration is empty: give at least one sequence of token ids.")
    return sequences


def sequences_of(model, calibration: Iterable) -> list[torch.Tensor]:
    """`token_ids`, and TypeError for a model that takes none, ValueError for sequences that are no token ids of this model or longer than its context."""
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "config") or not _reads_ids(model):
        raise TypeError(f"calibration runs the model on token ids, which {type(model).__name__} does not take: leave it out, or give a language model of transformers.")
    sequences, vocabulary, limit = token_ids(calibration), model.get_input_embeddings().weight.shape[0], _context(model)
    for number, ids in enumerate(sequences):
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise ValueError(f"calibration[{number}] has token ids from {int(ids.min())} to {int(ids.max())}; the model's go from 0 to {vocabulary - 1}.")
        if limit and ids.shape[1] > limit:
            raise ValueError(f"calibration[{number}] has {ids.shape[1]} tokens, more than the model's context of {limit}: cut it into shorter pieces.")
    return sequences


def _reads_ids(model) -> bool:
    """Whether the model can be given token ids (of an encoder-decoder, its encoder): one that hears, as Whisper does, cannot."""
    return getattr(model, "main_input_name", "input_ids") == "input_ids" or "input_ids" in inspect.signature(model.forward).parameters


def _sequence(number: int, ids) -> torch.Tensor:
    try:
        ids = torch.as_tensor(ids, device="cpu")  # by name: transformers builds models under another default device
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"calibration[{number}] is a {type(ids).__name__}, not a sequence of token ids; {READ}") from None
    ids = ids[0] if ids.dim() == 2 and len(ids) == 1 else ids
    if not ids.numel():
        raise ValueError(f"calibration[{number}] has no tokens: leave it out.")
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"calibration[{number}] must be integers [n] or [1, n], not {ids.dtype} {list(ids.shape)}.")
    return ids.long()[None]


def _context(model) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def pieces(ids: Sequence[int], tokens: int = TOKENS, length: int = LENGTH) -> list[torch.Tensor]:
    """The first `tokens` token ids of a text as int64 tensors `[1, length]`, the last one shorter; ValueError for none."""
    if not len(ids):
        raise ValueError("ids: there is no token in it.")
    return [part[None] for part in torch.as_tensor(ids[:tokens], dtype=torch.int64).split(length)]


def own_text(model, start: Sequence[int] | None = None, tokens: int = TOKENS, length: int = LENGTH, seed: int = 0) -> list[torch.Tensor]:
    """About `tokens` tokens that the model writes itself, as int64 tensors `[1, length]`, sampled at temperature 1 with that seed: calibration without data.

    start: token ids that each begins with, such as a chat template's up to the user's words; without it the model's BOS token, or EOS if it has
    no other. Ends of a text are gone beyond. Raises ValueError where there is nothing to begin with, TypeError for a model that reads no token ids. Source: LLM-QAT
    (Liu et al. 2023, arXiv 2305.17888).
    """
    if not _reads_ids(model):
        raise TypeError(f"model: own_text has it go on from token ids, which {type(model).__name__} does not take: compress it without calibration.")
    vocabulary = model.get_input_embeddings().weight.shape[0]  # an id that no token has
    start = _beginning(model.generation_config) if start is None else list(start)
    if not start:
        raise ValueError("start: there is no token to begin with, and the model has neither BOS nor EOS; give token ids.")
    length = min(length, _context(model) or length)
    first = torch.tensor([start], device=model.device).expand(max(1, tokens // length), -1)
    kept = model.generation_config  # which may have lengths and rules of chats
    begins = {name: getattr(kept, name, None) for name in ("bos_token_id", "decoder_start_token_id")}
    model.generation_config = GenerationConfig(eos_token_id=vocabulary, pad_token_id=0, **begins)
    try:
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            ids = model.generate(first, attention_mask=torch.ones_like(first), max_length=length, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    finally:
        model.generation_config = kept
    return list(ids.cpu().split(1))


def _beginning(config) -> list[int]:
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [token for token in (config.bos_token_id, *ends) if token is not None][:1]
