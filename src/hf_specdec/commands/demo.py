"""`hf-specdec demo`: an answer streams with its drafted tokens coloured; then both ways of decoding are timed."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ..viz.gif import check_path
from ..viz.highlights import DRAFTED, Highlighter
from ..viz.text import has_colour, visible
from .common import check_draft, check_length, load_draft, parse_k
from .race import race as run_race
from .verdict import EFFICIENT, copies, verdict


def demo(
    target: str,
    draft: str | None,
    prompt: str | None,
    k: str,
    max_new_tokens: int,
    repetitions: int,
    dtype: str,
    race: bool = False,
    save_race: Path | None = None,
) -> None:
    """race: show a race in the place of the streamed answer and the timing; save_race: and write it as a GIF."""
    from .. import SpeculativeConfig, enable
    from ..bench.arms import PLAIN, generate_arm, padded
    from ..bench.embedded import EMBEDDED, load_target
    from ..bench.prompts import Prompt, load_prompts
    from ..bench.runner import run_benchmark
    from ..bench.terminal import counting
    from ..drafts.base import Draft

    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt is empty; give a question, or leave it out for the shipped one.")
    if save_race is not None:
        check_path(save_race)
    console = Console(highlight=False)
    speculation = {"speculative": SpeculativeConfig(num_assistant_tokens=parse_k(k))}
    check_draft(draft)
    model, tokenizer = load_target(target, dtype)
    enable(model)
    assistant = load_draft(draft, dtype, model, tokenizer)
    question = Prompt("prompt", "demo", prompt) if prompt else load_prompts("code_edit", 1)[0]
    ids = question.ids(tokenizer)
    check_length(model, ids, max_new_tokens)

    console.print(Text(visible(question.text), style="dim"))
    if race or save_race is not None:
        options = {"assistant_model": assistant, "max_new_tokens": max_new_tokens, **speculation}
        run_race(console, model, tokenizer, padded(model, [ids]), options, save_race,
                 lambda copy: load_draft(draft, dtype, copy, tokenizer) if isinstance(assistant, Draft) else assistant)
        return
    console.print(Text.assemble("\n", ("drafted and accepted" if has_colour(console) else "[drafted and accepted]", DRAFTED), " | the target's own\n"))
    out = model.generate(**padded(model, [ids]), do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, assistant_model=assistant, return_dict_in_generate=False,
                         streamer=Highlighter(tokenizer, console, marks=True), **speculation)
    console.print()

    arms = [generate_arm(PLAIN, model), generate_arm("hf_specdec", model, assistant_model=assistant, **speculation)]
    if target == EMBEDDED and model.device.type == "cpu":  # a second copy of a model this small does no harm
        arms += _in_tiles(draft, dtype, speculation)
    with counting("Timing them, in turns", len(arms) * repetitions) as step:
        report = run_benchmark(
            model, tokenizer, [question], arms, max_new_tokens=max_new_tokens, repetitions=repetitions, step=step
        )
    _print_result(console, report, tokenizer)
    copied = copies(ids, out[0, len(ids) :].tolist()) if assistant is None else 1.0
    said = verdict(report["results"][1], assistant is None, prompt is None, k == "auto", copied)
    if assistant is None and target == EMBEDDED and report["results"][1]["block_efficiency"] < EFFICIENT > copied:
        said = f"{said} --draft smollm2_feature_drafter or smollm2_drafter proposes more; whether that pays is the machine's to say."
    if said:
        console.print(said, style="dim", soft_wrap=True)


def _in_tiles(draft: str | None, dtype: str, speculation: dict) -> list:
    """Ours with the same weights in the kernels' tiles, if there are kernels."""
    from ..bench.arms import generate_arm
    from ..bench.embedded import EMBEDDED
    from ..mx.kernels import cpu
    from .bench import in_tiles

    if cpu.library() is None:
        return []
    fast, faster = in_tiles(EMBEDDED, draft, dtype)
    return [generate_arm("hf_specdec, mx.to_tiles(model)", fast, assistant_model=faster, **speculation)]


def _print_result(console: Console, report: dict, tokenizer) -> None:
    from ..bench.forks import Fork
    from ..bench.report import headline

    plain, *all_ours = report["results"]
    ours = all_ours[0]
    titles = ("", "tokens/s:\nmedian", "speed-up: median\nover the turns", "output")
    table = Table(*(Column(title, overflow="fold") for title in titles), header_style="bold")
    for row in (plain, *all_ours):
        output = "" if row is plain else "identical" if row["equal"] == row["outputs"] else "differs"
        table.add_row(row["arm"], f"{row['tokens_per_second']:.1f}", f"{row['speed_up']:.2f}x", output)
    console.print(headline(report), style="dim", markup=False, soft_wrap=True)
    console.print(table)
    if report["settings"]["repetitions"] > 1:
        console.print("speed-up: over plain generate in the same turn; where other work disturbs the turns, it is not the ratio of the medians.", style="dim", soft_wrap=True)
    rate, outside = ours.get("acceptance_rate"), ours["outside_forwards"]
    console.print(f"block efficiency  {ours['block_efficiency']:.2f} tokens per target forward")
    console.print(f"acceptance rate   {'nothing was drafted' if rate is None else format(rate, '.0%')}")
    if outside is not None and math.isfinite(outside):
        console.print(f"outside forwards  {outside:.1%} of the time after the prompt pass")
    if all(row["equal"] == row["outputs"] for row in all_ours):
        console.print("outputs           identical", style="bold green")
        return
    console.print("outputs           differ", style="bold yellow")
    for fork in (fork for row in all_ours for fork in row["forks"]):
        fork = Fork(**{name: fork[name] for name in Fork.__dataclass_fields__})
        console.print("  " + visible(fork.explain(tokenizer)), markup=False, soft_wrap=True)
