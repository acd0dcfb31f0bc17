"""From a target to a draft in one call: data if there is none, one run per loss, held-out acceptance, a model card."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from .. import compat
from ..bench.terminal import counting
from . import checkpoint, export
from .answers import stops
from .batches import split
from .card import write_card
from .data import make_data, make_on_policy
from .eagle3 import Eagle3RunConfig, Eagle3Trainer
from .feature_trainer import FeatureRunConfig, FeatureTrainer
from .heads import HeadsRunConfig, HeadsTrainer
from .independent import IndependentRunConfig, IndependentTrainer
from .joint import CHANGED, JointRunConfig, JointTrainer
from .look_ahead import LookAheadRunConfig, LookAheadTrainer
from .losses import LOSSES
from .parallel import ParallelRunConfig, ParallelTrainer
from .processes import is_main, main_first, need_accelerate
from .shared import learning_again, rounded
from .shards import Shard, shard_files
from .trainer import RunConfig, Trainer

KINDS = {RunConfig: Trainer, FeatureRunConfig: FeatureTrainer, Eagle3RunConfig: Eagle3Trainer, HeadsRunConfig: HeadsTrainer, ParallelRunConfig: ParallelTrainer,
         LookAheadRunConfig: LookAheadTrainer, JointRunConfig: JointTrainer, IndependentRunConfig: IndependentTrainer}


def prepare(folder: str | Path, model, tokenizer, tokens: int, prompts: Sequence[str] | Mapping[str, str] | None = None,
            new_tokens: int = 160, rows: int = 48, seed: int = 0, console: Console | None = None) -> list[Path]:
    """`make_data` with its progress on `console`, standard error without it."""
    with main_first(model.device), counting("Tokens of training text", tokens, console=console) as count:
        tell = chain([lambda done, note: count.start(done)], repeat(count.reach))

        def told(done: int, _: int) -> None:
            next(tell)(min(done, tokens), f"{done:,} with prompts, in whole shards of {rows} texts" if done > tokens else "")

        return make_data(folder, model, tokenizer, tokens, rows, new_tokens, seed, prompts, told)


def train(target, tokenizer, data: str | Path, out: str | Path, config: RunConfig, losses: Sequence[str] = (), target_name: str = "",
          console: Console | None = None, every: int = 50, on_policy: int = 0) -> list[dict]:
    """Train one draft per loss (config.loss alone without `losses`) on the shards in `data`; a run that was stopped goes on. What
    is trained goes by the kind of the config: `KINDS`.

    target: in bfloat16 or float32; the draft learns in float32. on_policy: tokens that the draft, half trained, writes itself and the
    target judges; every other step of the second half is on them (DistillSpec, arXiv 2310.08461); also in the config. Returns held-out acceptance per loss,
    best first; with several losses the drafters lie in out/<loss>. Of several processes one writes. Raises ValueError as `check_out` does.
    """
    need_accelerate()
    target, losses, out = compat.unwrap(target), list(losses) or [config.loss], Path(out)
    config = replace(config, on_policy=on_policy or config.on_policy)
    if config.on_policy and isinstance(config, FeatureRunConfig):
        raise ValueError("on_policy: a feature drafter learns from the target's own text alone; leave on_policy out.")
    if config.on_policy and isinstance(config, LookAheadRunConfig):
        raise ValueError("on_policy: look-ahead embeddings write no text of their own; leave on_policy out.")
    check_out(out, data, config, losses)
    main = is_main(target.device)
    console = console or Console(stderr=True, quiet=not main)
    results = []
    for loss in losses:
        run = replace(config, loss=loss)
        with learning_again(target):
            trainer = _trainer(target, data, _folder(out, loss, losses), run, target_name, console)
            _run(trainer, console, every, _on_policy(trainer, target, tokenizer) if run.on_policy else None)
        last = trainer.progress.history[-1]
        results.append({"loss": loss, "out": str(trainer.out), **last, "history": trainer.progress.history})
        if main:
            _describe(trainer, tokenizer, data, console)
    results.sort(key=lambda result: -result["greedy_acceptance"])
    if main:
        (out / checkpoint.RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        console.print(table(results))
        console.print(f"How to use it: {Path(results[0]['out'], 'README.md')}", soft_wrap=True, highlight=False, markup=False)
    trainer.accelerator.wait_for_everyone()
    return results


def check_out(out: Path, data: str | Path, config: RunConfig, losses: Sequence[str]) -> None:
    """Before any work: ValueError for an `out` with files of others or an export, with a run of another config, data or more steps, or
    with a damaged checkpoint."""
    if (Path(out) / export.CONFIG).exists():
        raise ValueError(f"out: {out} holds {export.CONFIG}, which `hf-specdec export` wrote for vLLM; name another --out.")
    kind = KINDS[type(config)]
    for loss in losses:
        kind.refuse(_folder(out, loss, losses), Path(data), replace(config, loss=loss))
    own = [out, *(_folder(out, loss, LOSSES) for loss in LOSSES)]
    checkpoint.refuse_foreign(out, [checkpoint.RESULTS], [folder / name for folder in own for name in (kind.checkpoint, "drafter.json")])


def _folder(out: Path, loss: str, losses: Sequence[str]) -> Path:
    return out / loss.replace("+", "p") if len(losses) > 1 else out


def _describe(trainer: Trainer, tokenizer, data: str | Path, console: Console) -> None:
    write_card(trainer.out, trainer, data_notes(data))
    if not trainer.of_the_target:
        tokenizer.save_pretrained(trainer.out)
    if trainer.warning:
        tokenizer.save_pretrained(trainer.out / CHANGED)
        console.print(trainer.warning)


def _trainer(target, data: str | Path, out: Path, config: RunConfig, target_name: str, console: Console) -> Trainer:
    kind = KINDS[type(config)]
    if not issubclass(kind, FeatureTrainer):
        return kind(target, data, out, config, target_name)
    with counting("The target's hidden states, by shard", 1, console=console) as count:
        return kind(target, data, out, config, target_name, count.reach_of)


def _on_policy(trainer: Trainer, target, tokenizer) -> Callable[[], list[Path]]:
    def make() -> list[Path]:
        config, draft, (parts, _) = trainer.config, trainer.draft.eval(), split(trainer.data)
        with main_first(target.device), rounded(trainer.own if trainer.of_the_target else [], target.dtype):
            return make_on_policy(trainer.out / "on_policy", draft, target, parts, config.on_policy, stops(target, tokenizer), seed=config.seed)

    return make


def _run(trainer: Trainer, console: Console, every: int, on_policy: Callable[[], list[Path]] | None) -> None:
    with counting(f"Training, {trainer.config.loss}", trainer.config.steps, trainer.progress.step, console) as count:

        def report(progress, loss: float) -> None:
            held = progress.history[-1] if progress.history else None
            count.reach(progress.step, f"loss {loss:.3f}" + (f", held out {held['greedy_acceptance']:.3f}" if held else ""))

        if on_policy is not None:
            trainer.run(report, every, until=trainer.config.steps // 2)
            count.say("the draft writes, the target judges")
            trainer.use(on_policy())
        trainer.run(report, every)
        trainer.finish()


def table(results: list[dict]) -> Table:
    """Held-out acceptance per loss."""
    titles = ("loss", "steps", "greedy acceptance", "sampling acceptance", "folder")
    made = Table(*(Column(title, overflow="fold") for title in titles), title="Held out", header_style="bold")
    for row in results:
        made.add_row(row["loss"], str(row["step"]), f"{row['greedy_acceptance']:.3f}", f"{row['sampling_acceptance']:.3f}", row["out"])
    return made


def data_notes(folder: str | Path) -> dict:
    """Tokens and kinds of the shards in a folder."""
    total, kinds = 0, Counter()
    for path in shard_files(Path(folder)):
        shard = Shard.load(path)
        total += len(shard.tokens)
        kinds[shard.notes["kind"]] += len(shard)
    return {"tokens": total, "texts": kinds}
