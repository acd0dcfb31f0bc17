"""`hf-specdec demo`: an answer streams with its drafted tokens coloured; then both ways of decoding are timed."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..viz.gif import check_path
from ..viz.highlights import DRAFTED, Highlighter
from ..viz.text import visible
from .common import check_length, load_draft, parse_k
from .race import race as run_race

EFFICIENT = 1.5  # tokens per target forward from which on what was copied or drafted is worth speaking of

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

    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt is empty; give a question, or leave it out for the shipped one.")
    if save_race is not None:
        check_path(save_race)
    console = Console(highlight=False)
    speculation = {"speculative": SpeculativeConfig(num_assistant_tokens=parse_k(k))}
    model, tokenizer = load_target(target, dtype)
    enable(model)
    assistant = load_draft(draft, dtype, model, tokenizer)
    question = Prompt("prompt", "demo", prompt) if prompt else load_prompts("code_edit", 1)[0]
    ids = question.ids(tokenizer)
    check_length(model, ids, max_new_tokens)

    console.print(Text(visible(question.text), style="dim"))
    if race or save_race is not None:
        options = {"assistant_model": assistant, "max_new_tokens": max_new_tokens, **speculation}
        run_race(console, model, tokenizer, padded(model, [ids]), options, save_race)
        return
    console.print(Text.assemble("\n", ("drafted and accepted", DRAFTED), " | the target's own\n"))
    model.generate(**padded(model, [ids]), do_sample=False, max_new_tokens=max_new_tokens, assistant_model=assistant, streamer=Highlighter(tokenizer, console),
                   **speculation)
    console.print()

    arms = [generate_arm(PLAIN, model), generate_arm("hf_specdec", model, assistant_model=assistant, **speculation)]
    if target == EMBEDDED and model.device.type == "cpu":  # a second copy of a model this small does no harm
        arms += _in_tiles(draft, dtype, speculation)
    with counting("Timing them, in turns", len(arms) * repetitions) as step:
        report = run_benchmark(
            model, tokenizer, [question], arms, max_new_tokens=max_new_tokens, repetitions=repetitions, step=step
        )
    _print_result(console, report, tokenizer)
    said = verdict(report["results"][1], lookup=assistant is None, shipped=prompt is None)
    if assistant is None and target == EMBEDDED and report["results"][1]["block_efficiency"] < EFFICIENT:
        said = f"{said} --draft smollm2_feature_drafter or smollm2_drafter proposes more; whether that pays is the machine's to say."
    if said:
        console.print(said, style="dim", soft_wrap=True)


def verdict(ours: dict, lookup: bool, shipped: bool) -> str:
    """What the measurement says of speculation on this prompt, "" where it speaks for itself. lookup: the draft is prompt lookup; shipped: so is the prompt."""
    rate, efficiency, gain = ours.get("acceptance_rate"), ours["block_efficiency"], ours["speed_up"]
    pays = "Speculation did not pay here" if gain <= 1 else "Speculation brought little here"
    if rate is None:
        return f"{pays}: nothing was drafted" + (", because the answer repeats nothing that came before it." if lookup else ".")
    if efficiency < EFFICIENT and rate < 0.5:
        why = "the answer copies little, and prompt lookup proposes copies alone" if lookup else "the draft is seldom right on this prompt"
        return f"{pays}: {rate:.0%} of the drafted tokens were accepted; {why}."
    if efficiency < EFFICIENT:
        return (f"{pays}: what was drafted was mostly right, but it was little, {ours['mean_k']:.1f} tokens a round: there was nothing to propose, or a pass "
                f"over several tokens costs too much on this machine.")
    if gain <= 1:
        return (f"Speculation did not pay here, although a target forward brought {efficiency:.1f} tokens: a pass over several tokens, and drafting them, took "
                f"as much time as they save.")
    if lookup and shipped:
        return ("This prompt is answered by copying much of it, which is where prompt lookup pays. Try --prompt with a question of your own: with nothing to "
                "copy, expect the speed of plain generate.")
    return ""


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
    table = Table("", "tokens/s:\nmedian", "speed-up: median\nover the turns", "output", header_style="bold")
    for row in (plain, *all_ours):
        output = "" if row is plain else "identical" if row["equal"] == row["outputs"] else "differs"
        table.add_row(row["arm"], f"{row['tokens_per_second']:.1f}", f"{row['speed_up']:.2f}x", output)
    console.print(headline(report), style="dim", soft_wrap=True)
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
