"""What a mixture chooses, and K "auto", on a simulated clock: against the better of the drafts, and against the best K of all."""

import random
from itertools import count

import pytest
import torch

from hf_specdec import passes
from hf_specdec.compiled import WIDTHS
from hf_specdec.distributions import Sampler
from hf_specdec.drafts import Context, Draft, MixtureDraft, ModelDraft, PromptLookupDraft, SuffixAutomatonDraft, earning
from hf_specdec.drafts.earning import DraftCost
from hf_specdec.proposal import Proposal, Verdict
from hf_specdec.schedule import AutoSchedule, FixedSchedule
from tests.helpers import generated, perturbed, repetitive, speculate, tiny_llama

VOCAB, PROMPT, LENGTH = 1000, 120, 500
SHORT = PROMPT + 60
# seconds of a pass: of a plain one, more per drafted token, more once there is one, more once there are 8, and more per token from then on
LINES = {"flat": (0.04, 0.0, 0.0, 0.0, 0.0), "steep": (0.04, 0.004, 0.0, 0.0, 0.0), "step": (0.06, 0.002, 0.035, 0.0, 0.0),
         "tiles": (0.04, 0.0, 0.0, 0.01, 0.0025)}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Knowing(Draft):
    """A draft model that is right at `rate` of all places of the text, and takes `c` plain steps a token."""

    name, trusted = "knowing", True

    def __init__(self, text: list[int], rate: float, c: float, clock: Clock, seed: int, step: float):
        coin = random.Random(seed)
        self.said = [token if coin.random() < rate else token + 1 for token in text] + [0] * 64
        self.cost_ratio, self.clock, self.step_seconds = c, clock, step

    def propose(self, context, k):
        self.clock.now += self.cost_ratio * self.step_seconds * k[0]
        at = len(context.rows[0])
        return Proposal.from_lists([self.said[at : at + k[0]]], "cpu", self.name)


def text(kind: str, seed: int) -> list[int]:
    """Words of a small language ("chat"), or the same with long copies of the prompt ("copy")."""
    coin = random.Random(seed)
    follow = {word: [coin.randrange(VOCAB - 1) for _ in range(6)] for word in range(VOCAB)}
    words = [1]
    while len(words) < LENGTH:
        if kind == "copy" and len(words) >= PROMPT and coin.random() < 0.2:
            at = coin.randrange(PROMPT - 40)
            words += words[at : at + 40]
        words.append(coin.choice(follow[words[-1]]))
    return words[:LENGTH]


def seconds(draft, words: list[int], line: str, clock: Clock, k: int | None = None, most: int = 16, stall=(-1, 1.0)) -> float:
    """Of decoding what follows the prompt with K = k, or "auto". stall: a round, and how many times as long as it takes its pass seems to take."""
    flat, slope, step, jump, beyond = LINES[line]
    row, clock.now, lost = list(words[:PROMPT]), 0.0, 0.0
    context = Context([row], len(words), VOCAB, torch.device("cpu"), Sampler.greedy(), lambda stream, n: None)
    draft.start(context)
    schedule = draft.schedule(most, True) or AutoSchedule(most, draft.cost_ratio, True, draft.prior)
    schedule = schedule if k is None else FixedSchedule(k)
    for rounds in count():
        if len(row) >= len(words):
            break
        begin, left = clock.now, len(words) - len(row)
        proposal = draft.propose(context, schedule.next_k(draft.evidence(context), [left])).within([left - 1])
        size = proposal.sizes[0]
        took = flat + slope * size + step * (size > 0) + jump * (size > 7) + beyond * max(size - 7, 0)
        more = (stall[1] - 1) * took * (rounds == stall[0])
        clock.now, lost = clock.now + took + more, lost + more
        on_path, node, right = torch.zeros((1, len(proposal.tree) + 1), dtype=torch.bool), 0, 0
        on_path[0, 0] = True
        for own, (parent, token) in enumerate(zip(proposal.tree.parents, proposal.tokens[0].tolist()), start=1):
            if own <= proposal.sizes[0] and parent == node and token == words[len(row) + right]:
                on_path[0, own], node, right = True, own, right + 1
        logits = torch.zeros((1, len(proposal.tree) + 1, VOCAB))
        draft.observe(proposal, logits)
        draft.commit(Verdict(on_path, torch.tensor([0])))
        row += words[len(row) : len(row) + right + 1]
        schedule.observe(proposal.sizes, [right], clock.now - begin if rounds else None)
    draft.finish()
    return clock.now - lost


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(earning, "perf_counter", clock)
    return clock


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("mode", ["choose", "merge"])
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("kind", ["chat", "copy"])
def test_a_mixture_of_lookup_and_model_is_as_good_as_the_better_of_them(kind, line, mode, clock):
    ratios = []
    for seed in range(3):
        words = text(kind, seed)

        def model():
            return Knowing(words, 0.8, 0.2, clock, seed, LINES[line][0])

        alone = [seconds(PromptLookupDraft(), words, line, clock), seconds(model(), words, line, clock)]
        ratios.append(seconds(MixtureDraft([PromptLookupDraft(), model()], mode), words, line, clock) / min(alone))
    assert sum(ratios) / len(ratios) < 1.03 and max(ratios) < 1.07  # of some 100 rounds, one is 1 %
    assert kind == "chat" or sum(ratios) / len(ratios) < 1.0  # where the text is of both kinds, it is faster than either


@pytest.mark.share(2)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("make", [lambda text, clock, step: Knowing(text, 0.8, 0.1, clock, 1, step), lambda *_: PromptLookupDraft(),
                                  lambda *_: MixtureDraft([SuffixAutomatonDraft()])], ids=["model", "lookup", "tree"])
def test_auto_comes_near_to_what_an_exhaustive_search_over_k_finds(make, line, clock):
    ratios = []
    for seed in range(3):
        words = text("copy", seed)
        made = [seconds(make(words, clock, LINES[line][0]), words, line, clock, k) for k in (*range(9), 12, 16)]
        ratios.append(seconds(make(words, clock, LINES[line][0]), words, line, clock) / min(made))
    assert sum(ratios) / len(ratios) < 1.03 and max(ratios) < 1.05


@pytest.mark.parametrize("mode", ["choose", "merge"])
@pytest.mark.parametrize("rate", [0.05, 0.9], ids=["bad", "good"])
def test_a_mixture_begins_with_what_earlier_calls_have_taught_it(rate, mode, clock):
    """Ten short texts with one object take less time than with a new one each: whether the model is of use need not be found out again."""
    kept = MixtureDraft([PromptLookupDraft(), Knowing([], rate, 0.3, clock, 0, 0.04)], mode)
    again = anew = 0.0
    for seed in range(10):
        words = text("chat", seed)[:SHORT]
        fresh = Knowing(words, rate, 0.3, clock, seed, 0.04)
        kept.parts[1].said = fresh.said
        again += seconds(kept, words, "steep", clock)
        anew += seconds(MixtureDraft([PromptLookupDraft(), fresh], mode), words, "steep", clock)
    assert again < 0.99 * anew


@pytest.mark.share(2)
@pytest.mark.parametrize("mode", ["choose", "merge"])
@pytest.mark.parametrize("at", [1, 2, 6, 8])
@pytest.mark.parametrize("line", ["tiles", "steep"])
def test_a_round_in_a_bad_moment_is_not_laid_upon_the_calls_that_follow(line, at, mode, clock):
    texts = [text("copy", seed)[: PROMPT + 120] for seed in range(5)]
    drafts = [MixtureDraft(["suffix_automaton", "ngram_recycling"], mode) for _ in range(2)]
    whole, made = ([seconds(draft, words, line, clock, stall=(at if i and words is texts[0] else -1, 40.0)) for words in texts]
                   for i, draft in enumerate(drafts))
    assert sum(made) < sum(whole) + 120 * LINES[line][0]  # one call without a draft, at most
    assert made[-1] < 1.15 * whole[-1]


def test_what_is_learned_for_one_target_and_one_kind_of_rows_and_passes_is_not_used_for_another(monkeypatch):
    mixture, learned = MixtureDraft(), []
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "eager"})
    other, target = tiny_llama(3), tiny_llama(4)
    for model, rows, compiled in ((other, 1, False), (target, 1, False), (target, 2, False), (target, 2, True)):
        speculate(model, repetitive(12) * rows, mixture, "auto", speculative={"compile": compiled})
        learned.append(mixture.experience)
    speculate(target, repetitive(12) * 2, mixture, "auto", speculative={"compile": True})
    assert len(set(map(id, learned))) == 4 and mixture.experience is learned[-1] and mixture.experience.calls == 2
    assert learned[2].verify.blocks == () and learned[3].verify.blocks == WIDTHS


@pytest.mark.parametrize("mode", ["choose", "merge"])
def test_a_call_with_a_seed_neither_uses_nor_keeps_what_others_have_taught(mode):
    target, rows, options = tiny_llama(3), repetitive(12), {"do_sample": True, "top_k": 8}
    mixture = MixtureDraft([PromptLookupDraft(), ModelDraft(perturbed(target, 0.3))], mode)
    first = speculate(target, rows, mixture, "auto", seed=5, **options)
    assert mixture.experience is None
    for _ in range(2):
        speculate(target, rows, mixture, "auto", **options)
    taught = [str(rates.counts) for rates in mixture.experience.rates]
    second = speculate(target, rows, mixture, "auto", seed=5, **options)
    assert generated(first, rows) == generated(second, rows) and first.speculation.rounds == second.speculation.rounds
    assert taught == [str(rates.counts) for rates in mixture.experience.rates]


@pytest.mark.parametrize("slow", [(4,), (4, 8, 2)])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_what_a_draft_was_timed_at_in_a_bad_moment_is_dropped_once_it_is_faster(slow, k):
    cost = DraftCost(0.2)
    for asked in slow:
        cost.update(asked, 20 * 0.4 * asked)
    assert cost(4, 1.0) > 20
    cost.update(k, 0.4 * k)
    assert cost(4, 1.0) == pytest.approx(1.6)


def test_a_draft_of_one_pass_is_not_taken_for_one_that_was_slow_before():
    cost = DraftCost(0.2)
    for asked in (2, 8, 2, 8, 8, 4, 16, 2):
        cost.update(asked, 0.5)
    assert cost.sums[0] > 6 and cost(2, 1.0) == pytest.approx(0.5, rel=0.4)


def test_what_was_timed_of_a_draft_that_is_not_asked_is_doubted_later_and_later():
    cost, doubts = DraftCost(0.2), []
    cost.update(4, 80.0)
    for rounds in range(2000):
        cost.waited += 1
        if cost(4, 1.0) < 79.0:
            assert cost(4, 1.0) == pytest.approx(0.8)
            doubts.append(rounds)
            cost.ask()
            cost.update(4, 80.0)
    gaps = [after - before for before, after in zip(doubts, doubts[1:])]
    assert doubts[0] + 1 == DraftCost.PATIENCE[0] and gaps[:3] == [96, 192, 384] and max(gaps) <= DraftCost.PATIENCE[1]
