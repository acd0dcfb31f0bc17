"""What `tune` measures: the target's own answers, the price of its passes, and what each draft gets right of the answers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle

import torch

from .. import compat
from ..cached_model import CachedModel
from ..config import WITH_WEIGHTS
from ..distributions import Sampler
from ..drafts import Context, Draft
from ..proposal import Proposal
from ..registry import DRAFTS, load
from .arms import answered
from .meter import synchronize
from .tuning import MOST, RANKS, Costs, Measured, Ranked, Recorded, Replayed

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 65)
REPETITIONS = 5
PASSES = REPETITIONS * len(WIDTHS)
Step = Callable[..., None]


@dataclass(frozen=True)
class Text:
    """A prompt and the target's greedy answer. seconds: per token of the answer, without the prompt pass."""

    prompt: list[int]
    answer: list[int]
    seconds: float


def now(model) -> float:
    """The clock, once the device has done what it was told."""
    synchronize(model)
    return time.perf_counter()


def timed(model, prompt: list[int], max_new_tokens: int, **options) -> tuple[list[int], float]:
    """The greedy answer, and the seconds of the call."""
    begin = now(model)
    return answered(model, [prompt], max_new_tokens, **options).tokens[0], now(model) - begin


def decoding_seconds(model, prompt: list[int], max_new_tokens: int, **options) -> tuple[list[int], float]:
    """The greedy answer, and its seconds per token after the first: a call less a call for one token."""
    _, first = timed(model, prompt, 1, **options)
    answer, seconds = timed(model, prompt, max_new_tokens, **options)
    return answer, max(seconds - first, 1e-9) / max(len(answer) - 1, 1)


def read_answers(model, prompts: Iterable[list[int]], max_new_tokens: int, step: Step) -> list[Text]:
    """What the target says to every prompt; those of fewer than two tokens are left out."""
    texts = []
    for prompt in prompts:
        answer, seconds = decoding_seconds(model, prompt, max_new_tokens)
        step()
        if len(answer) > 1:
            texts.append(Text(prompt, answer, seconds))
    if not texts:
        raise ValueError("--prompts: the target answers every prompt with a single token, so there is nothing to speed up; give others.")
    return texts


@torch.no_grad()
def measure_costs(model, texts: list[Text], rest: float, step: Step) -> Costs:
    """Median seconds of a pass over each of WIDTHS tokens behind a text of middling length, in turns; and of plain generate the smaller of two
    times, since the first comes before the machine is warm and would be held against it."""
    text = sorted(texts, key=lambda text: len(text.prompt) + len(text.answer))[len(texts) // 2]
    row = (text.prompt + text.answer)[: _room(model)]
    cached, ahead = CachedModel(model, len(row) + PASSES + MOST + 1), cycle(row)
    cached.score([row[:-1]])
    cached.commit([1])
    seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(REPETITIONS):
        for width in WIDTHS:
            seconds[width].append(_pass(cached, row, width))
            row = [*row, next(ahead)]
            step(f"a pass over {width}")
    plain = 0.0
    for text in texts:
        _, again = decoding_seconds(model, text.prompt, len(text.answer))
        plain += min(text.seconds, again) * len(text.answer)
        step("plain generate")
    plain /= sum(len(text.answer) for text in texts)
    return Costs(WIDTHS, tuple(statistics.median(seconds[width]) for width in WIDTHS), plain, rest)


def _pass(cached: CachedModel, row: list[int], width: int) -> float:
    """Seconds of a pass over the last token of the row and width - 1 candidates, of which none is accepted; what states have not read before is told them
    beforehand, since they cannot be cropped."""
    if cached.lengths[0] < len(row) - 1:
        cached.feed([row[cached.lengths[0] : -1]])
    proposal = Proposal.from_lists([[row[i % len(row)] for i in range(width - 1)]], cached.device)
    begin = now(cached.model)
    cached.score([row], proposal)
    seconds = now(cached.model) - begin
    cached.commit([1])
    return seconds


def _room(model) -> int | None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return max(limit - PASSES - MOST - 1, 2) if limit else None


# --- what a draft gets right ----------------------------------------------------------------------------------------------


def replay(draft: Draft, texts: list[Text], vocab_size: int, step: Step) -> tuple[Replayed, float]:
    """For drafts that look at the text alone: what they propose at every position of every answer, and the seconds per call."""
    tables, calls, spent = [], 0, 0.0
    for text in texts:
        row = list(text.prompt)
        context = Context([row], 2**31, vocab_size, torch.device("cpu"), Sampler.greedy(), _no_noise)
        table = []
        draft.start(context)
        try:
            for at, token in enumerate(text.answer):
                begin = time.perf_counter()
                proposal = draft.propose(context, [MOST if own >= 0 else 0 for own in draft.evidence(context)])
                spent, calls = spent + time.perf_counter() - begin, calls + 1
                table.append((proposal.sizes[0], right_path(proposal, text.answer[at:])))
                row.append(token)
        finally:
            draft.finish()
        tables.append(tuple(table[1:]))  # the first token comes with the prompt pass
        step(draft.name)
    return Replayed(tuple(tables)), spent / calls


def right_path(proposal: Proposal, answer: list[int]) -> tuple[int, ...]:
    """The nodes of the first row that agree with what came."""
    tokens, tree, size = proposal.tokens[0].tolist(), proposal.tree, proposal.sizes[0]
    child = {(parent, token): node for node, (parent, token) in reversed(list(enumerate(zip(tree.parents, tokens), start=1))) if node <= size}
    path, node = [], 0
    for token in answer:
        node = child.get((node, token))
        if node is None:
            break
        path.append(node)
    return tuple(path)


def ranks_of(model, texts: list[Text], step: Step) -> Ranked:
    """The ranks that a draft model gives to the tokens of the answers: one pass over each text, as far as its context reaches. Behind that it drafts nothing."""
    most, result = compat.traits_of(compat.unwrap(model), "assistant_model").max_positions, []
    for text in texts:
        ids = torch.tensor([text.prompt + text.answer], device=model.device)[:, :most]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(text.prompt) : len(text.prompt) + len(text.answer) - 1]
        wanted = torch.tensor(text.answer[1:], device=logits.device)
        best = logits.topk(min(RANKS, logits.shape[-1])).indices
        hits = best == wanted[: len(best), None]
        ranks = torch.where(hits.any(-1), hits.int().argmax(-1), RANKS).tolist()
        result.append((*ranks, *[RANKS] * (len(wanted) - len(ranks))))
        step("ranks")
    return Ranked(tuple(result))


class Recorder(Draft):
    """Another draft, and a record of what it proposed and what was accepted."""

    trusted = True

    def __init__(self, draft: Draft):
        self.draft, self.name, self.cost_ratio = draft, f"recorded {draft.name}", draft.cost_ratio
        self.traits, self.may_branch = getattr(draft, "traits", None), draft.may_branch
        self.records: list[tuple[int, tuple[int, ...]]] = []
        self.reads_prompt, self.stops, self.parts = draft.reads_prompt, draft.stops, draft.parts
        for method in ("start", "evidence", "read", "observe", "keep", "finish", "prior"):
            setattr(self, method, getattr(draft, method))

    def propose(self, context: Context, k: list[int]) -> Proposal:
        self.proposal = self.draft.propose(context, k)
        return self.proposal

    def commit(self, verdict) -> None:
        self.records.append((self.proposal.sizes[0], tuple(verdict.on_path[0, 1:].nonzero()[:, 0].add(1).tolist())))
        self.draft.commit(verdict)


@dataclass(frozen=True)
class Run:
    """Real rounds. per_token, rest: seconds of the draft per drafted level, and of a round outside draft and target."""

    table: Recorded
    per_token: float
    rest: float


def record(model, draft: Draft, texts: list[Text], k: int, step: Step) -> Run:
    """Decode the texts with K = k; the prompt pass is left out. The caller has enabled `model`."""
    records, drafting, levels, rest, rounds = [], 0.0, 0, 0.0, 0
    for text in texts:
        recorder = Recorder(draft)
        trace = answered(model, [text.prompt], len(text.answer), assistant_model=recorder, speculative={"num_assistant_tokens": k}).trace
        records += recorder.records[1:]
        levels += sum(size for size, _ in recorder.records[1:])
        drafting, rest, rounds = drafting + trace.seconds["draft"], rest + trace.seconds["rest"], rounds + len(recorder.records) - 1
        step(draft.name)
    return Run(Recorded(tuple(records)), drafting / max(levels, 1), rest / max(rounds, 1))


def _no_noise(stream: str, n: int) -> torch.Tensor:
    raise ValueError("tune decodes greedily; this draft draws tokens at random.")


# --- the candidates ---------------------------------------------------------------------------------------------------------


def takes_trees(model) -> bool:
    """Whether the target can score trees, and not chains alone."""
    return not compat.traits_of(compat.unwrap(model), "target").own_positions


def lookups(trees: bool) -> list[tuple[type[Draft], dict]]:
    """Prompt lookup, and the suffix automaton with chains and with `trees`: class and options."""
    from ..drafts import PromptLookupDraft, SuffixAutomatonDraft

    return [(PromptLookupDraft, {}), (SuffixAutomatonDraft, {}), *([(SuffixAutomatonDraft, {"branches": 4})] if trees else [])]


def measure_lookups(made: list[tuple[type[Draft], dict]], texts: list[Text], vocab_size: int, step: Step) -> list[Measured]:
    """What `lookups` gives, measured on the text alone."""
    result = []
    for kind, options in made:
        table, seconds = replay(kind(**options), texts, vocab_size, step)
        result.append(Measured(_label(kind.name, options), kind.name, table, 0.0, seconds, options))
    return result


# drafts that learn from the target's passes, whose acceptance only real rounds show, of chains and of small and large trees: options, least and
# most K; of most tokens, the first are those of a smaller tree
LEARNERS = (("recycling", {}, 1, 16), ("recycling", {"branches": 4}, 1, 24), ("ngram_recycling", {}, 1, 24), ("ngram_recycling", {}, 25, MOST),
            ("mixture", {}, 1, 24), ("mixture", {}, 25, MOST))


def learners(trees: bool) -> list[tuple]:
    """Those of LEARNERS that a target takes which takes `trees`, or none."""
    return [own for own in LEARNERS if trees or not load(DRAFTS, own[0], "draft")(**own[1]).may_branch]


def measure_learner(model, learner: tuple, texts: list[Text], rest: float, step: Step) -> Measured:
    """One of LEARNERS, in real rounds. rest: seconds that a round takes anyway outside draft and target."""
    name, options, least, most = learner
    run = record(model, load(DRAFTS, name, "draft")(**options), texts, most, step)
    return Measured(_label(name, options), name, run.table, run.per_token, max(run.rest - rest, 0.0), options, None, least, most)


def measure_draft(model, name: str, draft, texts: list[Text], vocab_size: int, step: Step) -> Measured:
    """A draft model (chains and trees), an n-gram table, or another draft that was loaded from `name`."""
    from ..drafts import ModelDraft, NGramDraft

    if isinstance(draft, NGramDraft):
        table, seconds = replay(draft, texts, vocab_size, step)
        return Measured(name, "ngram", table, 0.0, seconds, {}, name)
    if isinstance(draft, Draft):
        run = record(model, draft, texts, 16, step)
        return Measured(name, draft.name, run.table, run.per_token, 0.0, {}, name if draft.name in WITH_WEIGHTS else None, 1, 16)
    run = record(model, ModelDraft(draft), texts[:2], 6, lambda *_: None)
    return Measured(name, "model", ranks_of(draft, texts, step), run.per_token, 0.0, {}, name, trees=takes_trees(model))


def _label(name: str, options: dict) -> str:
    return name if options.get("branches", 1) == 1 else f"{name} ({options['branches']} branches)"
