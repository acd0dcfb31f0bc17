"""`hf-specdec train`: a draft for a target, from the target's own text."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from .common import check_folder


def train(target: str, out: Path, data: Path | None, tokens: int, prompts: str | None, column: str | None, layers: str | None, head: int,
          losses: str, steps: int, batch_tokens: int, lr: float, on_policy: int, format: str, new_tokens: int, seed: int,
          features: bool, places: dict[str, int], lora: int = 0, eagle3: bool = False, begin: str | None = None, single: int = 0, own: dict[str, str] | None = None) -> None:
    """places: the option that asks for tokens predicted at once -> how many, 0 for none. own: --config or --distill -> the model that it names."""
    from ..mx.formats import get_format
    from ..training.eagle3 import Eagle3RunConfig
    from ..training.feature_trainer import FeatureRunConfig
    from ..training.heads import HeadsRunConfig
    from ..training.joint import JointRunConfig
    from ..training.look_ahead import LookAheadRunConfig
    from ..training.losses import LOSSES
    from ..training.parallel import ParallelRunConfig
    from ..training.pipeline import check_out
    from ..training.processes import need_accelerate
    from ..training.prompts import find_prompts
    from ..training.shards import refuse_foreign
    from ..training.trainer import RunConfig

    need_accelerate()
    check_folder(out, "--out")
    check_folder(data, "--data")
    refuse_foreign(data or out / "data")
    features, format = features or eagle3, "bf16" if eagle3 or own else format
    names = [name.strip() for name in losses.split(",")]
    for name in (name for name in names if name not in LOSSES):
        raise ValueError(f"--loss {name}: choose from {', '.join(LOSSES)}.")
    if column is not None and prompts is None:
        raise ValueError(f"--column {column}: it is a column of --prompts; name these, too, or leave it out.")
    get_format(format)
    kinds = {"--heads": HeadsRunConfig, "--joint": JointRunConfig, "--parallel": ParallelRunConfig, "--look-ahead": LookAheadRunConfig}
    asked_for = [option for option, count in places.items() if count]
    beside = [option for option, given in {"--eagle3" if eagle3 else "--features": features, "--layers": layers, "--on-policy": on_policy}.items() if given] + asked_for[:-1]
    if asked_for and beside:
        raise ValueError(f"{asked_for[-1]}: it takes none of the target's layers and learns from the target's own text; leave out {', '.join(beside)}.")
    kind, more = (kinds[asked_for[0]], {"heads": places[asked_for[0]]}) if asked_for else (Eagle3RunConfig if eagle3 else FeatureRunConfig if features else RunConfig, {})
    if lora and not places["--joint"]:
        raise ValueError(f"--lora {lora}: adapters are for --joint, where the target learns, too.")
    more |= {"rank": lora} if lora else {}
    more |= _going_on(features, asked_for, begin, single, steps)
    if features and on_policy:
        raise ValueError("--on-policy: a feature drafter learns from the target's own text alone; leave it out with --features.")
    common = {"loss": names[0], "steps": steps, "batch_tokens": batch_tokens, "lr": lr, "seed": seed, "on_policy": on_policy}
    if own:
        config = _own_config(own, {"--features": features, "--layers": layers, "--begin": begin, **places}, common)
    else:
        config = kind(layers=_numbers(layers or ("-1" if features or asked_for else "0,-1")), head=None if places["--look-ahead"] else head or None, format=format, **common, **more)
    data = data or out / "data"
    check_out(out, data, config, names)
    _run(target, data, out, config, names, bool(own), tokens, None if prompts is None else find_prompts(prompts, column), new_tokens)


def _run(target: str, data: Path, out: Path, config, losses: list[str], own: bool, tokens: int, prompts, new_tokens: int) -> None:
    """Text where it is lacking, then the draft; own: it is a model of its own."""
    from ..bench.embedded import load_target
    from ..training import pipeline
    from ..training.drafter import check_start
    from ..training.independent import check_config, draft_config
    from ..training.processes import is_main

    console = Console(stderr=True, quiet=not is_main())
    model, tokenizer = load_target(target, "bfloat16")
    if own:
        check_config(draft_config(config.model), model, config.model)
    else:
        check_start(config, model)
    try:
        pipeline.prepare(data, model, tokenizer, tokens, prompts, new_tokens, seed=config.seed, console=console)
        pipeline.train(model, tokenizer, data, out, config, losses, target, console)
    except KeyboardInterrupt:
        console.print("Interrupted. The same command goes on where this one ended.")
        raise typer.Exit(130) from None


def _own_config(own: dict[str, str], others: dict[str, object], common: dict):
    """The config of a draft that is a model of its own; others: options that ask for one made of the target's parts."""
    from ..training.independent import IndependentRunConfig, draft_config

    asked_for = [*own, *(option for option, given in others.items() if given)]
    if len(asked_for) > 1:
        raise ValueError(f"{asked_for[0]}: the draft is a model of its own then, not made of the target's parts, and named once; leave out {asked_for[1]}.")
    option, name = next(iter(own.items()))
    draft_config(name)
    return IndependentRunConfig(model=name, fresh=option == "--config", **common)


def _going_on(features: bool, others: list[str], begin: str | None, single: int, steps: int) -> dict:
    """What the config gets of `begin` and `single`, checked; others: options that ask for a draft without layers of its own."""
    from ..training import drafter

    if single and not features:
        raise ValueError(f"--single {single}: a feature drafter is trained so; add --features, or leave it out.")
    if begin and others:
        raise ValueError(f"--begin {begin}: only a draft with layers of its own goes on from another drafter; leave out --begin or {others[0]}.")
    if single > steps:
        raise ValueError(f"--single {single}: there are {steps} steps in all; give fewer.")
    if begin and not drafter.is_drafter(begin):
        raise ValueError(f"--begin {begin} is no drafter; name a folder that training wrote, or one of {drafter.shipped()}.")
    return {"begin": begin or ""} | ({"single": single} if features else {})


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--layers {text}: give layer numbers with commas between them, such as 0,-1.") from None
