"""What a trace says of whether speculation pays on a prompt, and why not."""

from __future__ import annotations

EFFICIENT = 1.5  # tokens per target forward from which on what was copied or drafted is worth speaking of
ENOUGH = 16      # tokens of an answer from which on it says something
K = 10


def copies(prompt: list[int], answer: list[int]) -> float:
    """Tokens per target forward that prompt lookup would bring with K fixed, counted on the text alone."""
    from ..bench.measuring import Text, replay
    from ..drafts import PromptLookupDraft

    if len(answer) < 2:
        return 1.0
    tokens, sizes = replay(PromptLookupDraft(), [Text(prompt, answer, 0.0)], max(prompt + answer) + 1, lambda *_: None)[0].rounds(K)
    return tokens / sizes.total()


def verdict(ours: dict, lookup: bool, shipped: bool, auto: bool = False, copied: float = 1.0) -> str:
    """What the measurement says of speculation on this prompt, "" where it speaks for itself. lookup: the draft is prompt lookup; shipped: so is the prompt.
    auto: K was left to the loop. copied: `copies` of the prompt and its answer."""
    rate, efficiency, gain = ours.get("acceptance_rate"), ours["block_efficiency"], ours["speed_up"]
    pays = "Speculation did not pay here" if gain <= 1 else "Speculation brought little here"
    few = auto and efficiency < EFFICIENT and (copied >= EFFICIENT if lookup else ours["mean_k"] < 1)
    if few:
        drafted = "K auto drafted nothing" if rate is None else f"K auto drafted little, {ours['mean_k']:.1f} tokens a round, {rate:.0%} of which were accepted"
        there = f" There is something to copy: with K fixed, prompt lookup would bring {copied:.1f} tokens a forward." if lookup else ""
        return (f"{pays}: {drafted}, because the acceptance and the time of passes that it measured promised no gain.{there} On a busy machine the time "
                f"misleads it: try again when it is idle, or fix K (--k 5).")
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


def hint(trace, prompt: list[int], answer: list[int], drafters: list[str]) -> str:
    """Which draft to try where prompt lookup had nothing to copy, "" where that is not the cause. drafters: those that are shipped for the target."""
    if trace.config.get("draft") != "prompt_lookup" or len(answer) < ENOUGH or trace.block_efficiency >= EFFICIENT or copies(prompt, answer) >= EFFICIENT:
        return ""
    *rest, last = ["mixture", *drafters]
    others = f"{', '.join(rest)} or {last}" if rest else last
    return f"The answer copies little, and prompt lookup, the default draft, proposes copies alone: try --draft {others}; whether that pays is the machine's to say."
