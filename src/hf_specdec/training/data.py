"""Making the training text: user turns, the target's answers, one shard at a time, resumable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from .answers import continue_texts, judge_texts
from .prompts import TURNS, chat_parts, openings
from .shards import Sample, Shard, check_target, probe, shard_files


def make_shard(model, tokenizer, number: int, rows: int, seed: int, new_tokens: int, prompts: list[str] | None = None) -> Shard:
    """Answers of `model` to `rows` prompts: the given ones, or user turns that it makes up itself from its chat template.
    Every other shard is answered greedily, the rest at temperature 0.7. Given prompts are texts to be gone on with where the tokenizer has no chat template."""
    raw = prompts is not None and not tokenizer.chat_template
    before, after = ([], []) if raw else chat_parts(tokenizer)
    seed = 1_000_003 * seed + 2 * number
    eos = [tokenizer.eos_token_id]
    kind, turns = "given", []
    if prompts is None:
        kind, limit, starts = openings(number, rows, seed)
        heads = [before + tokenizer(start, add_special_tokens=False).input_ids for start in starts]
        turns = continue_texts(model, heads, limit, seed, eos, do_sample=True, temperature=1.0, top_p=0.95)
        asked = [sample.tokens[len(before):-1 if sample.tokens[-1] in eos else None] for sample in turns]
    else:
        asked = [tokenizer(prompt, add_special_tokens=raw).input_ids for prompt in prompts]
    greedy = (number + number // len(TURNS)) % 2 == 0
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 0.7, "top_p": 1.0}
    answers = continue_texts(model, [before + turn + after for turn in asked], new_tokens, seed + 1, eos, **sampling)
    notes = {"kind": kind, "seed": seed, "greedy": greedy, "new_tokens": new_tokens,
             "target": probe(model.get_input_embeddings().weight)}
    return Shard.of([_joined(turn, answer) for turn, answer in zip(turns or answers, answers)], notes)


def _joined(turn: Sample, answer: Sample) -> Sample:
    """The answer with what the target thought of the user's words, too."""
    if turn is answer:
        return answer
    gap = answer.first - turn.first - len(turn.ids)
    if gap < 0:  # the end of the turn, which the answer's text spells in its own way
        turn = Sample(turn.tokens[:gap], turn.first, turn.ids[:gap], turn.logprobs[:gap])
        gap = 0
    blank = (gap, turn.ids.shape[1])
    ids = torch.cat([turn.ids, torch.zeros(blank, dtype=turn.ids.dtype), answer.ids])
    law = torch.cat([turn.logprobs, torch.full(blank, -torch.inf, dtype=turn.logprobs.dtype), answer.logprobs])
    return Sample(answer.tokens, turn.first, ids, law)


def make_data(folder: str | Path, model, tokenizer, tokens: int, rows: int = 48, new_tokens: int = 160, seed: int = 0,
              prompts: list[str] | None = None, progress: Callable[[int, int], None] | None = None) -> list[Path]:
    """Shards of at least `tokens` tokens in `folder`; what is there already counts, so a run that was stopped goes on.

    prompts: answered in order, as far as they reach. progress: called with (tokens so far, tokens).

    Raises ValueError for shards of another model or of other prompts, where more are to be made for shards of other settings, and for a prompt that leaves
    no room for its answer.
    """
    folder = Path(folder)
    check_target(folder, model)
    asked = "" if prompts is None else hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16]
    job = {"prompts": asked, "new_tokens": new_tokens, "seed": seed, "rows": rows}
    _check_lengths(model, tokenizer, prompts or [], new_tokens)
    shards = {path: Shard.load(path, model.config.vocab_size) for path in shard_files(folder)}
    done = sum(len(shard.tokens) for shard in shards.values())
    for path, shard in shards.items():
        _check_job(path, shard.notes.get("job"), job, done < tokens)
    number = 0
    while done < tokens and (prompts is None or number * rows < len(prompts)):
        path = folder / f"{number:06d}.safetensors"
        if path not in shards:
            part = None if prompts is None else prompts[number * rows : (number + 1) * rows]
            shard = make_shard(model, tokenizer, number, rows, seed, new_tokens, part)
            shard.notes["job"] = job
            shard.save(path)
            done += len(shard.tokens)
            if progress:
                progress(done, tokens)
        number += 1
    return shard_files(folder)


def _check_job(path: Path, known: dict | None, job: dict, more: bool) -> None:
    """ValueError for a shard of other given prompts; where `more` are to be made beside it, also for one of other settings. known: its job, of older ones None."""
    different = [] if known is None else [name for name in job if known.get(name) != job[name] and (more or name == "prompts" and job[name])]
    if different:
        name = different[0]
        says = "other prompts" if name == "prompts" else f"{name}={known.get(name)}, not {job[name]}"
        raise ValueError(f"{name}: {path.parent} holds shards made with {says}; go on with those, or name another folder.")


def _check_lengths(model, tokenizer, prompts: list[str], new_tokens: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    around = sum(map(len, chat_parts(tokenizer))) if prompts and tokenizer.chat_template else 0
    for number, prompt in enumerate(prompts, start=1):
        length = len(tokenizer(prompt, add_special_tokens=not tokenizer.chat_template).input_ids) + around
        if limit and length + new_tokens > limit:
            raise ValueError(f"prompts: number {number} has {length} tokens with the chat template, and new_tokens is {new_tokens}; the target's context holds {limit}. "
                             "Shorten it, leave it out, or ask for shorter answers.")


def make_on_policy(folder: str | Path, draft, target, files: list[Path], tokens: int, eos: list[int], rows: int = 16,
                   new_tokens: int = 96, seed: int = 0) -> list[Path]:
    """Shards of at least `tokens` tokens that `draft` wrote after prompts from `files` and `target` judged (DistillSpec,
    arXiv 2310.08461). What is in `folder` already counts."""
    folder = Path(folder)
    done = sum(len(Shard.load(path).tokens) for path in shard_files(folder))
    number = len(shard_files(folder))
    while done < tokens:
        generator = torch.Generator().manual_seed(1_000_003 * seed + number)  # by shard, so that a run that was stopped goes on as an unbroken one
        source = Shard.load(files[int(torch.randint(len(files), (), generator=generator))])
        heads = []
        for text in torch.randperm(len(source), generator=generator)[:rows].tolist():
            a, b = int(source.starts[text]), int(source.starts[text + 1])
            cut = int(torch.randint(a + 1, b + 1, (), generator=generator)) - a
            heads.append(source.tokens[a : a + cut].tolist())
        written = continue_texts(draft, heads, new_tokens, seed + number, eos, do_sample=True, top_k=0)
        shard = Shard.of(judge_texts(target, [text.tokens for text in written], [text.first for text in written]),
                         {"kind": "on_policy", "seed": seed + number})
        shard.save(folder / f"{number:06d}.safetensors")
        done, number = done + len(shard.tokens), number + 1
    return shard_files(folder)
