"""Batches of a data set's rows turned into lines: the models, the loop over batches, and what a line says."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..hints import many
from .common import apply_mx, check_length
from .rows import Row
from .shards import Place, Shards
from .speculation import Work

ROWS_APART = ("jump_forward", "model", "ngram", "prompt_lookup", "recycling", "suffix_automaton", "uniform")  # drafts that propose chains, to each row as if it were alone


def row_seed(seed: int, index: int) -> int:
    """The seed of one row's random stream."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:8], "big") >> 1


class Writer:
    """The models, and the loop that turns batches into lines."""

    def __init__(self, work: Work, place: Place):
        from .. import enable
        from ..bench.embedded import load_target
        from ..loading import source_of

        self.work, self.place = work, place
        self.model, self.tokenizer = load_target(work.target, work.dtype, _device(place), encoder_decoders=True)
        self.weights = {"target_weights": weights_of(self.model)}
        apply_mx(self.model, work.mx, work.target)
        enable(self.model)
        self.draft, made = work.load_draft(self.model, self.tokenizer)
        self.weights["draft_weights"] = draft_weights(work.draft or source_of(work.speculation), made)
        self.draft_name = "prompt_lookup" if made is None else getattr(made, "name", "model")
        self.totals, self.seconds = Counter(), 0.0

    def settings(self, batch: int) -> dict[str, Any]:
        """More of `Work.settings`. The batch size is part of it where texts are sampled and a row's depends on those that it is decoded with: they share
        a K that follows from what was accepted, or a draft that learns from all rows, or lays out one tree for all."""
        chosen = self.work.speculation
        apart = chosen.num_assistant_tokens != "auto" and chosen.draft_stop == "constant" and self.draft_name in ROWS_APART and not chosen.draft_options
        return self.weights | {"batch": batch if self.work.sampling["do_sample"] and not apart else None}

    def check(self, rows: list[Row], source: str, skip_invalid: bool) -> None:
        """Find the rows that have no answer. ValueError names the first and says how many there are, unless they are skipped."""
        from ..bench.terminal import working

        with working(f"Checking {many(len(rows), 'prompt')} ..."):
            for row in rows:
                row.problem = row.problem or self._problem(row)
        bad = [row for row in rows if row.problem]
        if bad and not skip_invalid:
            more = f" ({len(bad)} such rows in all)" if len(bad) > 1 else ""
            raise ValueError(
                f"{source}: row {bad[0].index}: {bad[0].problem}{more}. "
                f"Mend the data set, or record such rows as skipped with --skip-invalid."
            )

    def _problem(self, row: Row) -> str:
        try:
            ids = row.ids(self.tokenizer, self.work.raw)
            check_length(self.model, ids, self.work.max_new_tokens)
        except Exception as error:  # a chat template may raise anything
            return str(error).strip().rstrip(".") or type(error).__name__
        return "" if ids else "the prompt has no tokens"

    def write(self, rows: list[Row], shards: Shards, batch: int) -> None:
        """Append the lines that are missing of this process's batches; a batch is decoded as a whole even if one line is missing."""
        from ..bench.terminal import counting

        batches = [rows[start : start + batch] for start in range(0, len(rows), batch)]
        left = [part for part in batches[self.place.rank :: self.place.world] if any(row.index not in shards.done for row in part)]
        total = sum(row.index not in shards.done for part in left for row in part)
        if shards.done:
            say(f"Resuming: {len(shards.done)} of {len(rows)} rows are done.", self.place)
        if not left:
            return
        begin = time.perf_counter()
        quiet = self.place.rank > 0 and sys.stderr.isatty()  # two bars would write over each other
        with nullcontext(lambda *_: None) if quiet else counting("Rows", total) as step:
            for part in left:
                lines = [line for line in self.answer(part) if line["index"] not in shards.done]
                shards.append(lines)
                self.totals["rows"] += len(lines)
                self.seconds = time.perf_counter() - begin
                step(self._pace(), len(lines))

    def _pace(self) -> str:
        process = f"process {self.place.rank}, " if self.place.world > 1 else ""
        return f"{process}{self.totals['rows'] / self.seconds:.2f} rows/s, {self.totals['committed'] / self.seconds:.1f} tokens/s"

    def answer(self, part: list[Row]) -> list[dict[str, Any]]:
        """The lines of one batch, in its order."""
        going = [row for row in part if not row.problem]
        answers = iter(self._decode(going) if going else [])
        lines = []
        for row in part:
            head = {"index": row.index, "prompt_sha256": row.digest}
            lines.append({**head, "skipped": row.problem} if row.problem else {**head, **next(answers)})
        self.totals["skipped"] += len(part) - len(going)
        return lines

    def _decode(self, rows: list[Row]) -> list[dict[str, Any]]:
        import torch

        from ..bench.arms import pad_token, padded

        work, seeds = self.work, [row_seed(self.work.seed, row.index) for row in rows]
        inputs = padded(self.model, [row.ids(self.tokenizer, work.raw) for row in rows])
        try:
            out = self.model.generate(
                **inputs,
                max_new_tokens=work.max_new_tokens,
                pad_token_id=pad_token(self.model),
                assistant_model=self.draft,
                tokenizer=self.tokenizer,  # for stop strings of the model's own generation config
                speculative=replace(work.speculation, seed=tuple(seeds)),
                return_dict_in_generate=True,
                **work.sampling,
            )
        except torch.OutOfMemoryError:
            raise ValueError(
                f"rows {rows[0].index} to {rows[-1].index} do not fit into the device's memory: take a smaller --batch."
            ) from None
        return [self._line(tokens, counts, seed) for tokens, counts, seed in zip(*self._answers(out, inputs), seeds)]

    def _answers(self, out, inputs) -> tuple[list[list[int]], list[Counter]]:
        """The new tokens of every row, and its counts, which the rounds of a beam search, of all rows together, do not tell."""
        from ..bench.arms import columns_before, new_tokens

        trace, width = out.speculation, columns_before(self.model, inputs)
        if not trace.new_tokens:
            answers = new_tokens(self.model, out.sequences, width)
            return answers, [Counter(committed=len(tokens)) for tokens in answers]
        return [tokens[:length] for tokens, length in zip(out.sequences[:, width:].tolist(), trace.new_tokens)], _per_row(trace)

    def _line(self, tokens: list[int], counts: Counter, seed: int) -> dict[str, Any]:
        self.totals.update(counts)
        line = {"text": self.tokenizer.decode(tokens, skip_special_tokens=True)}
        if self.work.tokens:
            line["tokens"] = tokens
        return {**line, "new_tokens": len(tokens), "truncated": self._truncated(tokens), **_ratios(counts), "seed": seed}

    def _truncated(self, tokens: list[int]) -> bool:
        """Whether the answer ends because of its length, without an end-of-sequence token."""
        from ..bench.arms import eos_tokens

        return len(tokens) == self.work.max_new_tokens and tokens[-1] not in eos_tokens(self.model)

    def summary(self) -> str:
        """What this process has done, in a sentence; "" for nothing."""
        totals, ratios = self.totals, _ratios(self.totals)
        if not totals["rows"]:
            return ""
        parts = [f"{many(totals['rows'], 'row')}, {many(totals['committed'], 'token')} in {self.seconds:.1f} s"]
        parts += [f"{totals['committed'] / self.seconds:.1f} tokens/s"]
        parts += [f"block efficiency {ratios['block_efficiency']:.2f}"] if totals["forwards"] else []
        parts += [f"acceptance rate {ratios['acceptance_rate']:.0%}"] if totals["proposed"] else []
        parts += [f"{totals['skipped']} skipped"] if totals["skipped"] else []
        return ", ".join(parts) + "."


def _per_row(trace) -> list[Counter]:
    """Proposed, accepted and committed tokens, and forwards, of every row."""
    counts = [Counter() for _ in trace.new_tokens]
    for entry in (entry for entries in trace.rounds for entry in entries):
        counts[entry.row].update(
            proposed=entry.proposed, accepted=entry.accepted, committed=entry.committed, forwards=1
        )
    return counts


def _ratios(counts: Counter) -> dict[str, float | None]:
    ratios = {"acceptance_rate": ("accepted", "proposed"), "block_efficiency": ("committed", "forwards")}
    return {name: counts[a] / counts[b] if counts[b] else None for name, (a, b) in ratios.items()}


def draft_weights(name: str | None, draft) -> str | None:
    """A hash by which the draft `name` is known again: of its file, or of what its model or heads, or those of its parts, weigh; None for a draft without any."""
    from ..bench.arms import model_of

    if name is not None and Path(name).is_file():
        with open(name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    parts = [draft_weights(None, part) for part in getattr(draft, "parts", ())]
    return "+".join(map(str, parts)) if any(parts) else weights_of(model_of(draft) or getattr(draft, "heads", draft))


def weights_of(model) -> str | None:
    """A hash of a few numbers of every floating-point weight: it tells models apart without reading all of them."""
    if not hasattr(model, "named_parameters"):
        return None
    import torch

    from ..mx.linear import MXMatrix

    digest = hashlib.sha256()
    for prefix, module in model.named_modules():
        if isinstance(module, MXMatrix):
            continue  # laid out as the machine at hand likes it
        for name, weight in module.named_parameters(prefix, recurse=False):
            if type(weight) is not torch.nn.Parameter or not weight.is_floating_point():
                continue  # quantised by something else
            flat = weight.detach().reshape(-1)
            few = flat[:: max(1, flat.numel() // 64)].float().cpu().contiguous()
            digest.update(f"{name} {tuple(weight.shape)}".encode() + few.numpy().tobytes())
    return digest.hexdigest()


def _device(place: Place) -> str | None:
    """The process's own GPU; None lets the loader choose."""
    import torch

    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return "cpu"
    if place.world == 1 or not torch.cuda.is_available():
        return None
    torch.cuda.set_device(place.local % torch.cuda.device_count())
    return f"cuda:{torch.cuda.current_device()}"


def say(text: str, place: Place = Place()) -> None:
    print(f"[{place.rank}] {text}" if place.world > 1 else text, file=sys.stderr, flush=True)
