"""Making the training text: user turns, the target's answers, one shard at a time, resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from .. import compat
from .answers import continue_texts, judge_texts, room, stops
from .prompts import TURNS, chat_parts, openings, prompt_ids
from .shards import Part, Sample, Shard, check_target, notes_of, probe, refuse_foreign, shard_files


def make_shard(model, tokenizer, number: int, rows: int, seed: int, new_tokens: int, prompts: list[str] | None = None,
               wrote: Callable[[int], None] | None = None) -> Shard:
    """Answers of `model` to `rows` prompts: the given ones, or user turns that it makes up itself from its chat template.
    Every other shard is answered greedily, the rest at temperature 0.7. wrote: called with the number of new tokens, time and again."""
    about = job(number, rows, seed, new_tokens, prompts)
    seed = 1_000_003 * seed + 2 * number
    eos = stops(model, tokenizer)
    kind, turns = "given", []
    if prompts is None:
        before, after = chat_parts(tokenizer)
        kind, limit, starts = openings(number, rows, seed)
        heads = [before + tokenizer(start, add_special_tokens=False).input_ids for start in starts]
        turns = continue_texts(model, heads, _turn(model, heads, after, limit, new_tokens), seed, eos, wrote, do_sample=True, temperature=1.0, top_p=0.95)
        asked = [[*sample.tokens[: -1 if sample.tokens[-1] in eos else None], *after] for sample in turns]
    else:
        asked = prompt_ids(tokenizer, prompts)
    greedy = (number + number // len(TURNS)) % 2 == 0
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 0.7, "top_p": 1.0}
    answers = continue_texts(model, asked, new_tokens, seed + 1, eos, wrote, **sampling)
    notes = {"kind": kind, "seed": seed, "greedy": greedy, "new_tokens": new_tokens, "job": about,
             "target": probe(model.get_input_embeddings().weight)}
    return Shard.of([_joined(turn, answer) for turn, answer in zip(turns or answers, answers)], notes)


def _turn(model, heads: list[list[int]], after: list[int], limit: int, new_tokens: int) -> int:
    """How long user turns may get: `limit`, or in a short context what leaves room for the answer, or half of what there is for both."""
    most = room(model)
    if most is None:
        return limit
    left = most - max(map(len, heads)) - len(after)
    if left < 2:
        raise ValueError(f"data: the target's context of {most} tokens has no room for its chat template, a user's turn and an answer; give short prompts in a file.")
    return min(limit, max(left - new_tokens, left // 2))


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


def job(number: int, rows: int, seed: int, new_tokens: int, prompts: Sequence[str] | None) -> dict:
    """What decides the shard `number`, whose own part of the prompts `prompts` is."""
    asked = None if prompts is None else hashlib.blake2b(json.dumps(list(prompts)).encode(), digest_size=8).hexdigest()
    return {"number": number, "rows": rows, "seed": seed, "new_tokens": new_tokens, "prompts": asked}


def check_job(folder: Path, seed: int, new_tokens: int, prompts: Sequence[str] | None, rows: int | None) -> None:
    """ValueError for the first shard of the folder that is of another job; of those that do not say nothing is known. rows: of the
    shards that are still to be made, None where there are none: then only prompts that are given have to be theirs."""
    for path in shard_files(folder):
        made = notes_of(path).get("job")
        if made is None:
            continue
        first = made["number"] * made["rows"]
        asked = job(made["number"], rows or made["rows"], seed, new_tokens, None if prompts is None else prompts[first : first + made["rows"]])
        for name in asked if rows else ["prompts"] if prompts is not None else []:
            if made[name] != asked[name]:
                what = "has the answers to other prompts" if name == "prompts" else f"was made with {name}={made[name]!r}, not {asked[name]!r}"
                raise ValueError(f"{name}: {path} {what}; give what it was made with, or name another folder (--out, --data).")


def check_lengths(places: Mapping[str, str], model, tokenizer, tokens: int, rows: int) -> None:
    """ValueError for the first prompt that leaves no room for an answer in the target's context, among those that `tokens` tokens of text can take."""
    limit = room(model)
    for number, (place, prompt) in enumerate(places.items() if limit else ()):
        if tokens <= 0 and number % rows == 0:
            return
        (ids,) = prompt_ids(tokenizer, [prompt])
        if len(ids) >= limit:
            raise ValueError(f"prompts: {place} has {len(ids)} tokens, and the target's context holds {limit} with the answer; shorten it, or leave it out.")
        tokens -= len(ids)


def make_data(folder: str | Path, model, tokenizer, tokens: int, rows: int = 48, new_tokens: int = 160, seed: int = 0,
              prompts: Sequence[str] | Mapping[str, str] | None = None, progress: Callable[[int, int], None] | None = None) -> list[Path]:
    """Shards of at least `tokens` tokens in `folder`; what is there already counts, so a run that was stopped goes on.

    prompts: answered in order, as far as they reach; a dict has them by their places, such as "asked.txt, line 3". progress: called
    with (tokens so far, tokens), first with what was there. ValueError for a folder of something else, for shards of another model
    or job, and for a prompt that is too long.
    """
    folder, model, done, made = Path(folder), compat.unwrap(model), 0, set()
    places = prompts if prompts is None or isinstance(prompts, Mapping) else {f"prompt {i}": prompt for i, prompt in enumerate(prompts, 1)}
    prompts = None if places is None else list(places.values())
    refuse_foreign(folder)
    check_target(folder, model)
    for path in shard_files(folder):
        done += len(Shard.load(path, model.config.get_text_config().vocab_size).tokens)
        made.add(path.name)
    check_job(folder, seed, new_tokens, prompts, rows if done < tokens else None)
    if places and done < tokens:
        check_lengths(places, model, tokenizer, tokens, rows)
    progress = progress or (lambda done, tokens: None)
    progress(done, tokens)
    number = 0
    while done < tokens and (prompts is None or number * rows < len(prompts)):
        path = folder / f"{number:06d}.safetensors"
        if path.name not in made:
            part = None if prompts is None else prompts[number * rows : (number + 1) * rows]
            shard = make_shard(model, tokenizer, number, rows, seed, new_tokens, part, _within(progress, done, tokens))
            shard.save(path)
            done += len(shard.tokens)
            progress(done, tokens)
        number += 1
    return shard_files(folder)


def _within(progress: Callable[[int, int], None], done: int, tokens: int) -> Callable[[int], None]:
    """The progress inside a shard, which is not done before it is saved."""

    def wrote(new: int) -> None:
        nonlocal done
        before, done = done, done + new
        if before < tokens - 1:  # a shard is made whole, with more tokens than were asked for
            progress(min(done, tokens - 1), tokens)

    return wrote


def make_on_policy(folder: str | Path, draft, target, parts: list[Part], tokens: int, eos: list[int], rows: int = 16,
                   new_tokens: int = 96, seed: int = 0) -> list[Path]:
    """Shards of at least `tokens` tokens that `draft` wrote after beginnings of the texts in `parts` and `target` judged (DistillSpec,
    arXiv 2310.08461). What is in `folder` already counts."""
    folder = Path(folder)
    done, most = sum(len(Shard.load(path).tokens) for path in shard_files(folder)), room(draft, target)
    number = len(shard_files(folder))
    while done < tokens:
        own = 1_000_003 * seed + number
        generator = torch.Generator().manual_seed(own)
        part = parts[int(torch.randint(len(parts), (), generator=generator))]
        source = Shard.load(part.path)
        spans, heads = part.spans(source), []
        for text in torch.randperm(len(spans), generator=generator)[:rows].tolist():
            a, b = spans[text]
            cut = int(torch.randint(a + 1, b + 1, (), generator=generator)) - a
            heads.append(source.tokens[a : a + (cut if most is None else min(cut, most - 1))].tolist())
        new = new_tokens if most is None else min(new_tokens, most - max(map(len, heads)))
        written = continue_texts(draft, heads, new, own, eos, do_sample=True, top_k=0)
        shard = Shard.of(judge_texts(target, [text.tokens for text in written], [text.first for text in written]),
                         {"kind": "on_policy", "seed": own})
        shard.save(folder / f"{number:06d}.safetensors")
        done, number = done + len(shard.tokens), number + 1
    return shard_files(folder)
