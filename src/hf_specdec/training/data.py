"""Making the training text: user turns, the target's answers, one shard at a time, resumable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from .answers import continue_texts, judge_texts
from .prompts import TURNS, chat_parts, openings
from .shards import Sample, Shard, check_target, probe, shard_files


def make_shard(model, tokenizer, number: int, rows: int, seed: int, new_tokens: int, prompts: list[str] | None = None) -> Shard:
    """Answers of `model` to `rows` prompts: the given ones, or user turns that it makes up itself from its chat template.
    Every other shard is answered greedily, the rest at temperature 0.7."""
    before, after = chat_parts(tokenizer)
    seed = 1_000_003 * seed + 2 * number
    eos = [tokenizer.eos_token_id]
    kind, turns = "given", []
    if prompts is None:
        kind, limit, starts = openings(number, rows, seed)
        heads = [before + tokenizer(start, add_special_tokens=False).input_ids for start in starts]
        turns = continue_texts(model, heads, limit, seed, eos, do_sample=True, temperature=1.0, top_p=0.95)
        asked = [sample.tokens[len(before):-1 if sample.tokens[-1] in eos else None] for sample in turns]
    else:
        asked = [tokenizer(prompt, add_special_tokens=False).input_ids for prompt in prompts]
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

    prompts: answered in order, as far as they reach. progress: called with (tokens so far, tokens). ValueError for shards of another model.
    """
    folder, done, made = Path(folder), 0, set()
    check_target(folder, model)
    for path in shard_files(folder):
        done += len(Shard.load(path, model.config.vocab_size).tokens)
        made.add(path.name)
    number = 0
    while done < tokens and (prompts is None or number * rows < len(prompts)):
        path = folder / f"{number:06d}.safetensors"
        if path.name not in made:
            part = None if prompts is None else prompts[number * rows : (number + 1) * rows]
            shard = make_shard(model, tokenizer, number, rows, seed, new_tokens, part)
            shard.save(path)
            done += len(shard.tokens)
            if progress:
                progress(done, tokens)
        number += 1
    return shard_files(folder)


def make_on_policy(folder: str | Path, draft, target, files: list[Path], tokens: int, eos: list[int], rows: int = 16,
                   new_tokens: int = 96, seed: int = 0) -> list[Path]:
    """Shards of at least `tokens` tokens that `draft` wrote after prompts from `files` and `target` judged (DistillSpec,
    arXiv 2310.08461). What is in `folder` already counts."""
    folder, generator = Path(folder), torch.Generator().manual_seed(seed)
    done = sum(len(Shard.load(path).tokens) for path in shard_files(folder))
    number = len(shard_files(folder))
    while done < tokens:
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
