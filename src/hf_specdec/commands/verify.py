"""`hf-specdec verify`: the user's own proof that speculation does not change what the target generates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console

from ..viz.text import visible
from .common import check_draft, load_draft, parse_k

DEPTH, TOP_K, ROWS = 3, 3, 64
THRESHOLD = 1e-4
LAW_PROMPT = "The weather today is"


@dataclass
class Findings:
    """What was checked: (passed, text) in order."""

    console: Console
    checks: list[tuple[bool, str]] = field(default_factory=list)

    def add(self, passed: bool, text: str) -> None:
        self.checks.append((passed, text))
        self.console.print("PASS" if passed else "FAIL", style="bold green" if passed else "bold red", end="  ")
        self.console.print(visible(text), markup=False, soft_wrap=True)

    @property
    def passed(self) -> bool:
        return all(passed for passed, _ in self.checks)


def verify(
    target: str,
    draft: str | None,
    prompts: str,
    limit: int,
    k: str,
    max_new_tokens: int,
    samples: int,
    seed: int,
    dtype: str,
) -> bool:
    """Print every check and a verdict; whether all passed."""
    import torch

    from .. import SpeculativeConfig, enable
    from ..bench.embedded import load_target
    from ..bench.forks import Judge
    from ..bench.prompts import load_prompts

    if samples < 200:
        raise ValueError(f"--samples {samples}: the chi-square test needs at least 200.")
    chosen = load_prompts(prompts, limit)
    speculation = {"speculative": SpeculativeConfig(num_assistant_tokens=parse_k(k))}
    check_draft(draft)
    model, tokenizer = load_target(target, dtype)
    enable(model)
    assistant = load_draft(draft, dtype, model, tokenizer)
    torch.manual_seed(seed)
    findings, judge = Findings(Console(highlight=False)), Judge(model)
    forks = _greedy(findings, judge, tokenizer, chosen, max_new_tokens, {"assistant_model": assistant, **speculation})
    _sampling(findings, judge, tokenizer, assistant, lambda copy: load_draft(draft, "float32", copy, tokenizer), samples)
    count = sum(passed for passed, _ in findings.checks)
    verdict = "the outputs CHANGE, or the test has no power"
    if findings.passed:
        verdict = "the rule is sound, outputs part at near-ties" if forks else "speculation does not change the output"
    findings.console.print(f"{count} of {len(findings.checks)} checks passed: {verdict}.", style="bold", soft_wrap=True)
    return findings.passed


def _greedy(findings: Findings, judge, tokenizer, prompts, max_new_tokens: int, speculation: dict) -> list:
    """Greedy outputs, speculative against plain, on every prompt; forks are explained and returned."""
    from ..bench.arms import generate_arm
    from ..bench.terminal import counting

    model = judge.model
    plain = generate_arm("plain", model, repetition_penalty=1.0)
    ours = generate_arm("ours", model, repetition_penalty=1.0, **speculation)
    forks, accepted, proposed = [], 0, 0
    with counting("Greedy equality", len(prompts)) as step:
        for prompt in prompts:
            ids = prompt.ids(tokenizer)
            answer = ours.run([ids], max_new_tokens)
            fork = judge.fork(ids, plain.run([ids], max_new_tokens).tokens[0], answer.tokens[0])
            forks += [(prompt.id, fork)] if fork else []
            accepted, proposed = accepted + answer.trace.accepted, proposed + answer.trace.proposed
            step()
    equal = (
        f"greedy: {len(prompts) - len(forks)} of {len(prompts)} outputs equal to plain generate, "
        f"{accepted} of {proposed} drafted tokens accepted"
    )
    sound = all(fork.near_tie for _, fork in forks)
    if forks and sound:
        equal += f"; the other {len(forks)} part at near-ties of the {model.dtype} logits (rule sound, arithmetic differs)"
    findings.add(sound and proposed > 0, equal)
    for name, fork in forks:
        findings.console.print(visible(f"      {name}, {fork.explain(tokenizer)}"), markup=False, soft_wrap=True)
    return forks


def _sampling(findings: Findings, judge, tokenizer, assistant, made_for: Callable, samples: int) -> None:
    """The joint law of the first tokens against enumeration: honest drafts have to follow it, a lying one must not.

    A 16-bit target is tested in float32: it is the rule that is on trial here, not the arithmetic. The draft is then made again for that
    copy of the target, since it may read its states.
    """
    import torch

    from ..bench.law import SupportDraft, chi_square, enumerate_law, joint, sample
    from ..bench.terminal import counting, working

    narrow = judge.model.dtype in (torch.float16, torch.bfloat16)
    model, where = (judge.reference, "sampling in float32") if narrow else (judge.model, "sampling")
    assistant = made_for(model) if narrow else assistant
    prompt = tokenizer(LAW_PROMPT)["input_ids"]
    with working("Enumerating the target's law ..."):
        laws = enumerate_law(model, prompt, DEPTH, TOP_K)
        law = joint(laws, DEPTH)
    drafts = [
        ("a draft drawn from the support", SupportDraft(laws, len(prompt)), True),
        ("negative control, a draft that lies about q", SupportDraft(laws, len(prompt), lying=True), False),
    ]
    if assistant is not None:
        drafts.insert(0, ("the draft under test", assistant, True))
    for name, draft, honest in drafts:
        with counting(f"Sampling with {name}", samples) as step:
            counts, proposed, accepted = sample(model, prompt, samples, DEPTH, TOP_K, _together(model, draft), step, assistant_model=draft,
                                                speculative={"num_assistant_tokens": DEPTH})
        test = chi_square(counts, law)
        p = f"= {test.p:.2g}" if test.p else "< 1e-300"
        text = (
            f"{where} with {name}: {samples} samples of the first {DEPTH} tokens, {len(law)} cells, {accepted} of "
            f"{proposed} drafted tokens accepted, chi-square {test.statistic:.1f} with {test.freedom} d.o.f., p {p}"
        )
        follows = test.p >= THRESHOLD
        findings.add(follows == honest and proposed > 0, text + ("" if honest else " (has to be rejected)"))


def _together(model, draft) -> int:
    """How many texts are sampled at once: one where target or draft cannot share a pass between rows."""
    from .. import compat
    from ..drafts.base import Draft
    from ..probe import check_batch

    models = [run.model for run in draft.models()] if isinstance(draft, Draft) else [draft]
    try:
        for own, role in ((model, "target"), *((one, "assistant_model") for one in models)):
            check_batch(own, compat.traits_of(compat.unwrap(own), "target"), ROWS, role)
    except ValueError:  # the call says what is wrong, if it is not that
        return 1
    return ROWS
