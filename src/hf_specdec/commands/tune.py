"""`hf-specdec tune`: which draft, and how many tokens or which tree of it, is fastest on your prompts and your machine."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import CONFIG_NAME
from .common import check_draft, check_length, check_overwrite, load_draft

WIDTH = 150
REPORT = "tune.json"
USUAL, QUICK = (2, 96), (1, 32)  # prompts of each category, tokens of an answer
NEED_TOKENIZERS = ("translated",)
BUILT_IN = ("prompt_lookup", "suffix_automaton", "recycling", "ngram_recycling", "mixture")  # always tried
SHOWN = (1, 2, 4, 8, 16, 32)
NOTES = (
    "1st .. 4th: acceptance of the drafted token at that position, those before it being right; K=..: predicted speed-up of decoding over plain "
    "generate; tokens/pass: block efficiency of the best; the best is marked. The prompt pass is left out everywhere."
)


def tune(target: str, drafts: list[str], prompts: str, limit: int | None, max_new_tokens: int | None, dtype: str, threads: int | None,
         out: Path | None, check: bool, quick: bool = False) -> None:
    import torch

    from .. import enable
    from ..bench.embedded import load_target
    from ..bench.prompts import load_prompts
    from ..bench.runner import environment
    from ..bench.terminal import working
    from ..bench.tuning import choices

    check_overwrite(out, REPORT, (CONFIG_NAME,), {"environment", "costs", "choices"})
    usual = QUICK if quick else USUAL
    limit, max_new_tokens = usual[0] if limit is None else limit, usual[1] if max_new_tokens is None else max_new_tokens
    if max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens {max_new_tokens}: must be at least 2, the first token comes with the prompt pass.")
    chosen = load_prompts(prompts, limit)
    if threads is not None:
        torch.set_num_threads(threads)
    for name in drafts:
        if name not in BUILT_IN:
            check_draft(name)
    model, tokenizer = load_target(target, dtype)
    loaded = {name: load_draft(name, dtype, model, tokenizer) for name in drafts if name not in BUILT_IN}
    console, before = Console(highlight=False, width=max(Console().width, WIDTH)), _known(out)

    def so_far(measured: list, costs) -> None:
        """What is known yet, once there is a choice. What a former run has written stays until this one knows as much."""
        if out is not None and len(measured) >= before and (found := choices(measured, costs)):
            _write(out, config_of(_best(found)), _report(model, costs, measured, found) | {"unfinished": [one.label for one in measured]})

    texts, measured, costs = _measure(enable(model), [prompt.ids(tokenizer) for prompt in chosen], loaded, max_new_tokens, so_far)
    with working("Choosing ..."):
        found = choices(measured, costs)
    found = _confirmed(model, texts, measured, costs, found)
    best = _best(found)
    config = config_of(best)
    _print_passes(costs, environment(model), console)
    _print_table(measured, found, console)
    _print_choice(best, found, console)
    draft = loaded.get(config.draft_source or (best.label if config.draft == best.draft else None))
    real = _check(model, texts, config, draft, max_new_tokens) if check else None
    if real is not None:
        console.print(f"predicted {config.predicted_speedup:.2f}x, measured {real:.2f}x on the same prompts")
    if out is not None:
        _write(out, config, _report(model, costs, measured, found) | {"measured_speedup": real})
        console.print(f"Written: {out / CONFIG_NAME}, {out / REPORT}", markup=False, soft_wrap=True)
        _print_use(target, dtype, out, console)


def _measure(model, prompts: list[list[int]], drafts: dict, max_new_tokens: int, so_far=lambda measured, costs: None):
    """so_far(measured, costs) is called whenever one more draft has been measured."""
    from ..bench import measuring as measure
    from ..bench.terminal import counting
    from ..drafts import PromptLookupDraft

    vocab = model.get_output_embeddings().weight.shape[0]
    for ids in prompts:
        check_length(model, ids, max_new_tokens, "--prompts: a prompt")
    with counting("Reading the target's answers:", len(prompts)) as step:
        measure.timed(model, prompts[0], 4)  # the first call is a slow one
        texts = measure.read_answers(model, prompts, max_new_tokens, step)
    trees = measure.takes_trees(model)
    lookups, learners = measure.lookups(trees), measure.learners(trees)
    total = len(texts) * (2 + len(lookups) + len(learners) + len(drafts)) + measure.PASSES
    with counting("Tuning:", total) as step:
        rest = measure.record(model, PromptLookupDraft(), texts, 8, step).rest
        costs = measure.measure_costs(model, texts, rest, step)
        measured = measure.measure_lookups(lookups, texts, vocab, step)
        so_far(measured, costs)
        for learner in learners:
            measured.append(measure.measure_learner(model, learner, texts, rest, step))
            so_far(measured, costs)
        for name, draft in drafts.items():
            measured.append(measure.measure_draft(model, name, draft, texts, vocab, step))
            so_far(measured, costs)
    return texts, measured, costs


def _confirmed(model, texts, measured, costs, found: list) -> list:
    """The choices, the first of which that a config can name holds: what a draft that learns from the target's passes gets right depends on how wide they are, so its
    best K is run before it is believed, and replaces what a wider K had promised."""
    from ..bench import measuring as measure
    from ..bench.terminal import counting
    from ..bench.tuning import Recorded, choices
    from ..registry import DRAFTS, load

    sure = set()
    while (best := _best(found)).speedup > 1 and best.label not in sure:
        sure.add(best.label)
        if any(one.label == best.label and isinstance(one.table, Recorded) and one.draft in BUILT_IN for one in measured):
            with counting("Confirming:", len(texts)) as step:
                run = measure.record(model, load(DRAFTS, best.draft, "draft")(**best.options), texts, best.k, step)
            real = measure.Measured(best.label, best.draft, run.table, run.per_token, max(run.rest - costs.rest, 0.0), best.options, None, best.k, best.k)
            found = sorted([*choices([real], costs), *(own for own in found if own.label != best.label)], key=lambda own: -own.tokens_per_second)
    return found


def _best(found: list):
    return next(choice for choice in found if choice.draft not in NEED_TOKENIZERS)


def config_of(choice):
    """The `SpeculativeConfig` of a choice; where none is faster than plain decoding, the default, which finds that out by itself."""
    from .. import SpeculativeConfig

    if choice.speedup <= 1:
        return SpeculativeConfig(predicted_speedup=1.0)
    return SpeculativeConfig(num_assistant_tokens=choice.k, draft=choice.draft, draft_options=choice.options, draft_source=choice.source,
                             predicted_speedup=round(choice.speedup, 4))


def _check(model, texts, config, draft, max_new_tokens: int) -> float:
    """Plain over ours, seconds per decoded token, text by text in turns."""
    from ..bench.measuring import decoding_seconds
    from ..bench.terminal import counting

    spent = [0.0, 0.0]
    with counting("Checking:", len(texts)) as step:
        decoding_seconds(model, texts[0].prompt, 4, speculative=config, assistant_model=draft)
        for text in texts:
            for way, options in enumerate(({}, {"speculative": config, "assistant_model": draft})):
                answer, seconds = decoding_seconds(model, text.prompt, max_new_tokens, **options)
                spent[way] += seconds * len(answer)
            step()
    return spent[0] / spent[1]


# --- what is written --------------------------------------------------------------------------------------------------------


def _report(model, costs, measured: list, found: list) -> dict:
    from ..bench.runner import environment
    from ..bench.tuning import by_position

    drafts = {f"{one.label}, K {one.least} to {one.most}": {"acceptance_by_position": by_position(one.table, 16), "rank_rates": getattr(one.table, "rates", None),
                                                            "seconds_per_token": one.per_token, "seconds_per_round": one.per_round} for one in measured}
    return {"environment": environment(model), "costs": dataclasses.asdict(costs), "drafts": drafts, "choices": [_plain(choice) for choice in found]}


def _known(out: Path | None) -> float:
    """How many drafts a former run has measured that has written there; one that was finished knows more than any that is not."""
    if out is None or not (out / REPORT).exists():
        return 0
    report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    return len(report["unfinished"]) if "unfinished" in report else math.inf


def _write(out: Path, config, report: dict) -> None:
    """The report first, by which the folder is known again; each file is whole or as it was."""
    from ..bench.report import finite

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".") as folder:
        (Path(folder) / REPORT).write_text(json.dumps(finite(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        config.save_pretrained(folder)
        for name in (REPORT, CONFIG_NAME):
            os.replace(Path(folder) / name, out / name)


# --- what is printed --------------------------------------------------------------------------------------------------------


def _print_passes(costs, env: dict, console: Console) -> None:
    console.print(f"{env['model']} ({env['parameters'] / 1e6:.0f}M, {env['dtype']}, {env['device']}, threads: {env['threads']}), plain generate "
                  f"{1 / costs.plain:.1f} tokens/s; a pass over n tokens, in ms:", markup=False, soft_wrap=True)
    console.print("  " + "  ".join(f"{width}: {1000 * costs.verify(width):.1f}" for width in costs.widths), soft_wrap=True)


def _print_table(measured: list, found: list, console: Console) -> None:
    from ..bench.tuning import by_position

    table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0))
    for name in ("draft", "1st", "2nd", "3rd", "4th", *(f"K={k}" for k in SHOWN), "best", "tokens/pass", "predicted"):
        table.add_column(name, justify="left" if name in ("draft", "best") else "right", no_wrap=True)
    for label in dict.fromkeys(one.label for one in measured):
        own = [choice for choice in found if choice.label == label]
        if not own:
            table.add_row(escape(label), *["-"] * (len(SHOWN) + 7))
            continue
        first = next(one for one in measured if one.label == label)
        speed = {choice.k: choice.speedup for choice in own if choice.tree is None}
        best = own[0]
        table.add_row(escape(label), *("-" if rate is None else f"{rate:.0%}" for rate in by_position(first.table, 4)),
                      *(f"{speed[k]:.2f}x" if k in speed else "-" for k in SHOWN),
                      _name(best), f"{best.block_efficiency:.2f}", f"{best.speedup:.2f}x" + (" *" if best is found[0] else ""))
    console.print(table)
    console.print(NOTES, style="dim")


def _name(choice) -> str:
    return f"K={choice.k}" if choice.tree is None else f"tree of {choice.nodes}, depth {choice.k}"


def _print_choice(best, found: list, console: Console) -> None:
    if best is not found[0] and found[0].speedup > 1:
        console.print(f"{found[0].label} is predicted to be faster, {found[0].speedup:.2f}x, but has another tokenizer, which a config does not carry: pass "
                      f"it to generate() with tokenizer= and assistant_tokenizer=.", markup=False)
    if best.speedup <= 1:
        console.print("No draft is predicted to be faster than plain generate here; the config leaves K to \"auto\", which drafts nothing where it does not pay.")
    else:
        console.print(f"Best: {best.label}, {_name(best)}, predicted {best.speedup:.2f}x, {best.tokens_per_second:.1f} tokens/s", markup=False)


def _print_use(target: str, dtype: str, out: Path, console: Console) -> None:
    console.print(f"Python:  model.generate(**inputs, speculative=hf_specdec.SpeculativeConfig.from_pretrained({json.dumps(str(out))}))", markup=False, soft_wrap=True)
    more = "" if dtype == "float32" else f" --dtype {dtype}"
    console.print(f"command: hf-specdec generate {shlex.quote(target)} --config {shlex.quote(str(out))}{more} --prompt \"...\"", markup=False, soft_wrap=True)


def _plain(choice) -> dict:
    own = {name: getattr(choice, name) for name in ("label", "draft", "options", "k", "nodes", "block_efficiency", "tokens_per_second", "speedup")}
    return own if choice.tree is None else {**own, "options": {name: value for name, value in own["options"].items() if name != "tree"}}
