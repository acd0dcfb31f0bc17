"""K "auto" against rounds of known cost: what it asks for, and what a whole call of it takes, on a clock that is simulated."""

from __future__ import annotations

import gc
import random
import weakref
from statistics import mean

import pytest

from hf_specdec.drafts import PromptLookupDraft, SuffixAutomatonDraft
from hf_specdec.budget import Budget, progress
from hf_specdec.round_cost import RoundCost
from hf_specdec.schedule import AutoSchedule, FixedSchedule, Rates, _calls
from tests.helpers import perturbed, repetitive, speculate, tiny_llama

NEW = 48
# seconds of a round that drafts k tokens for n rows, and of the first one, which reads the prompts: measured on two CPUs' worth of kinds
FLOAT32 = {1: 0.1, 5: 0.2}   # a token more per row, in plain steps: the pass is bound by arithmetic
BFLOAT16 = {1: 0.025, 5: 0.1}  # by reading the weights


def copying(step: int) -> tuple[int, int]:
    """(evidence, tokens that would be accepted) of a row that repeats what it has read."""
    return (10, 64) if step else (1, 0)


def chatting(step: int) -> tuple[int, int]:
    """Of a row that says new things: every other time a match of one token, which is not borne out."""
    return (1, 0) if step % 2 else (-1, 0)


def seconds(rows: list, slope: dict, make) -> float:
    """A call of `rows`, in plain rounds of five rows; the schedule sees each round's proposed and accepted tokens, and its time."""
    schedule, left, steps, total = make(), [NEW] * len(rows), [0] * len(rows), 0.0
    while any(left):
        active = [b for b, room in enumerate(left) if room]
        answers = [rows[b](steps[b]) for b in active]
        k = schedule.next_k([evidence for evidence, _ in answers], [left[b] for b in active])
        proposed = [0 if evidence < 0 else min(own, evidence * evidence + 1) for (evidence, _), own in zip(answers, k)]
        accepted = [min(n, right) for n, (_, right) in zip(proposed, answers)]
        first = left == [NEW] * len(rows)
        per_token = slope[1] + (slope[5] - slope[1]) * (len(active) - 1) / 4
        took = (0.8 + 0.04 * len(active)) * (1 + per_token * max(proposed)) if not first else 5.0 + per_token * max(proposed)
        schedule.observe(proposed, accepted, None if first else took)
        total += took
        for b, n in zip(active, accepted):
            left[b], steps[b] = max(left[b] - n - 1, 0), steps[b] + 1
    return total


class Never(AutoSchedule):
    def next_k(self, evidence, room):
        return super().next_k([-1] * len(evidence), room)


def speed_up(rows: list, slope: dict) -> float:
    def make(kind):
        return lambda: kind(10, 0.0, prior=PromptLookupDraft().prior)

    return seconds(rows, slope, make(Never)) / seconds(rows, slope, make(AutoSchedule))


@pytest.mark.parametrize("slope", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows, least", [([chatting], 0.97), ([chatting] * 5, 0.97), ([chatting] * 4 + [copying], 0.97),
                                         ([chatting] * 2 + [copying] * 3, 0.97), ([copying], 2.0), ([copying] * 5, 1.5)],
                         ids=["chat", "five chats", "one of five copies", "three of five copy", "copy", "five copies"])
def test_a_call_takes_no_longer_than_plain_decoding_and_less_where_text_is_copied(rows, least, slope):
    assert speed_up(rows, slope) >= least


def test_in_a_row_alone_progress_is_the_expected_tokens():
    assert progress([3.7], [20]) == pytest.approx(3.7)


@pytest.mark.parametrize("tokens", [1.0, 2.5, 8.0])
def test_rows_that_get_on_alike_progress_as_each_of_them(tokens):
    assert progress([tokens] * 5, [9] * 5) == pytest.approx(tokens)


def test_a_batch_is_brought_on_by_its_slowest_rows():
    one_leaps = progress([9.0, 1.0, 1.0, 1.0, 1.0], [30] * 5)
    assert 1 < one_leaps < (9 + 4) / 5 - 0.5
    assert progress([1.0, 3.0], [10, 30]) > 2.5 > 1.3 > progress([3.0, 1.0], [10, 30])


def test_what_rows_have_cost_more_than_one_before_anything_is_timed():
    alone, many = AutoSchedule(10, 0.0), AutoSchedule(10, 0.0)
    alone.next_k([1], [50])
    many.next_k([1] * 5, [50] * 5)
    assert many.cost.prior_ratio == pytest.approx(5 * alone.cost.prior_ratio)


def test_what_one_kind_of_match_comes_to_is_held_against_the_others():
    rates = Rates(PromptLookupDraft().prior)
    trusted = rates.expected_tokens(6, 4)[-1]
    for _ in range(6):
        rates.update(2, 4, 0)
    assert rates.expected_tokens(6, 4)[-1] < 0.8 * trusted
    for _ in range(40):
        rates.update(6, 4, 4)
    assert rates.expected_tokens(6, 4)[-1] > 4.5


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_looking_again_takes_two_percent_of_the_time_at_most_but_goes_on(rows):
    schedule, spent, looks, slope = AutoSchedule(10, 0.0, prior=lambda strength: (0.0, 0.0)), 0.0, 0, 0.05 * rows
    for step in range(400):
        k = max(schedule.next_k([1] * rows, [500 - step] * rows))
        looks += k > 0
        spent += slope * k
        schedule.observe([k] * rows, [0] * rows, 1 + slope * k if step else None)
    assert looks >= 400 // 66 and spent < 0.02 * 400


def costs(k: int) -> float:
    """Of the kernels' tiles: 8 tokens cost what one costs, more of them more."""
    return 1.0 if k < 8 else 1.25 + 0.07 * (k - 8)


def test_what_wide_rounds_cost_is_not_laid_upon_narrow_ones():
    cost = RoundCost()
    for k in [0, *range(1, 24), *range(1, 24)]:
        cost.update(k, costs(k))
    assert all(abs(cost(k) - costs(k)) < 0.06 * costs(k) for k in range(24))


def test_until_a_wide_round_is_timed_the_narrow_line_goes_on_and_the_other_way_round():
    for known, asked in (((2, 5), 20), ((12, 20), 3)):
        cost = RoundCost()
        for k in known * 20:
            cost.update(k, 2.0 + 0.1 * k)
        assert cost(asked) == pytest.approx(2.0 + 0.1 * asked, rel=0.02)


def test_rows_of_a_batch_make_a_pass_wide_sooner():
    cost = RoundCost(rows=4)
    for k in (1, 2, 1, 2, 1, 2):
        cost.update(k, {1: 1.0, 2: 2.0}[k])
    assert cost(1) < 1.2 and cost(2) > 1.8


def left(room: list[int], *later: list[int], spent: float = 0.0) -> float:
    budget = Budget(RoundCost())
    budget.spent = spent
    for each in (room, *later):
        budget.open(each)
    return budget.left


def test_a_call_may_fall_behind_by_a_share_of_what_it_has_room_for_and_spend_what_it_is_ahead():
    assert left([48, 48]) == pytest.approx(0.96 / 2) and left([10]) == pytest.approx(0.2 / 2)  # half of it in the round that is not timed
    assert left([200, 200], [200, 196], spent=1.5) == pytest.approx(0.96 + 1 - 1.5)  # the slowest row has got one token
    assert left([200, 200], [200, 196], [150, 150], spent=1.5) == pytest.approx(0.02 * 51 + 51 - 1.5)


def test_a_round_is_made_only_if_its_worst_cost_is_within_the_budget_and_costs_what_it_took():
    budget = Budget(RoundCost())
    assert budget.covers(1000)  # K is not "auto": nobody has opened it
    budget.open([50])
    assert budget.covers(4) and not budget.covers(5) and not budget.covers(3, drafting=0.2)  # 0.12 a token at worst, of 0.48
    assert budget.covers(5, gain=0.12) and budget.covers(6, gain=9.0) and not budget.covers(7, gain=9.0)  # 0.25 of what is expected
    budget.spend(4, None)
    assert budget.spent == pytest.approx(1.48)
    budget.cost.update(0, 2.0)
    budget.spend(0, 5.0)
    budget.cost.update(4, 2.2)
    budget.spend(4, 2.2, drafting=0.5)
    assert budget.spent == pytest.approx(1.48 + 1 + 1.1 + 0.5)
    budget.spend(0, 3.0, told=True)
    assert budget.spent == pytest.approx(1.48 + 1 + 1.1 + 0.5 + 1.5)


def test_a_step_that_makes_up_for_rejected_tokens_is_no_plain_one_and_costs_what_it_took():
    schedule = AutoSchedule(16, 0.0)
    for seconds, told, k in ((1.0, False, 0), (2.4, False, 4), (1.8, True, 0)):
        schedule.next_k([1], [40])
        schedule.asked = [k]
        schedule.observe([k], [0], seconds, told)
    assert schedule.cost(0) == 1.0 and schedule.budget.spent == pytest.approx(1 + 1.48 + 1.8)  # of what is not known yet at most the worst


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_trials_that_fail_and_are_dear_are_soon_no_longer_made(rows):
    schedule, lost = AutoSchedule(16, 0.0, prior=lambda strength: (0.9, 0.9)), 0.0
    for step in range(48):
        k = max(schedule.next_k([4] * rows, [48 - step] * rows))
        slope = min(0.12 * rows, 0.9)
        lost += slope * k
        schedule.observe([k] * rows, [0] * rows, 1 + slope * k if step else None)
    assert 0 < lost < 0.035 * 48


def test_without_a_clock_times_change_nothing():
    def asked(second: float) -> list[list[int]]:
        schedule, made = AutoSchedule(16, 0.0, timed=False, prior=PromptLookupDraft().prior), []
        for step in range(24):
            made.append(schedule.next_k([4, 6, 2, 10], [48 - step] * 4))
            schedule.observe(made[-1], [0] * 4, second * (step + 1))
        return made

    assert asked(1.0) == asked(0.01)


# --- a machine with other things to do -------------------------------------------------------------------------------------------


def with_slow_rounds(slow: tuple[float, ...], alpha: float, c: float = 0.05, tokens: int = 64, runs: int = 60) -> float:
    """Mean speed over plain decoding where a round costs 1 + c K, of which the clock shows `slow` times as much in the first ones."""
    total = 0.0
    for seed in range(runs):
        rng, schedule, left, spent = random.Random(seed), AutoSchedule(16, None), tokens, 0.0
        schedule.next_k([0], [left])
        schedule.observe([0], [0], None)
        clock = iter(slow)
        while left > 0:
            k = schedule.next_k([0], [left])[0]
            taken = next((n for n in range(k) if rng.random() >= alpha), k)
            schedule.observe([k], [taken], (1 + c * k) * next(clock, 1.0) * rng.uniform(0.97, 1.03))
            spent, left = spent + 1 + c * k, left - taken - 1
        total += tokens / spent / runs
    return total


@pytest.mark.parametrize("slow", [(5,), (3, 1, 3), (3, 3, 3, 3)])
def test_a_slow_first_round_does_not_end_drafting(slow):
    assert with_slow_rounds(slow, alpha=0.7) > 0.75 * with_slow_rounds((), alpha=0.7) > 1.6


def test_a_wide_round_in_a_bad_moment_does_not_end_narrow_ones():
    cost = RoundCost()
    for k, seconds in ((4, 1.1), (0, 1.0), (11, 40.0)):
        cost.update(k, seconds)
    assert cost(4) < 1.3 and cost(7) < 1.5 and cost(11) > 3

    schedule, asked, room = AutoSchedule(16, None), [], 96
    while room:
        k = schedule.next_k([0], [room])[0]
        schedule.observe([k], [k], (40.0 if k > 7 else 1 + 0.03 * k) if asked else None)
        asked.append(k)
        room -= k + 1
    dear = next(i for i, k in enumerate(asked) if k > 7)
    assert len(asked) > dear + 5 and all(0 < k <= 7 for k in asked[dear + 1 :])


def test_a_plain_step_timed_in_a_bad_moment_is_found_out():
    assert with_slow_rounds((3, 3), alpha=0.02) > 0.9


def test_no_round_is_faster_than_a_plain_step():
    cost = RoundCost()
    cost.update(0, 3.0)
    cost.update(4, 1.2)
    assert cost.plain == 1.2
    cost.update(4, 1.1)  # by so little, that is noise
    assert cost.plain == 1.2


@pytest.mark.parametrize("share", [3, 10])
def test_a_round_in_a_bad_moment_costs_a_call_no_more_than_such_rounds_do(share):
    """Five tokens that are not taken, in a round during which the machine was busy: the next ones are drafted all the same."""
    schedule, left, asked = AutoSchedule(16, 0.0, prior=PromptLookupDraft().prior), 64, []
    for step in range(12):
        k = schedule.next_k([6], [left])[0]
        taken = 0 if step == 5 else k
        schedule.observe([k], [taken], (1 + 0.08 * k) * (share if step == 5 else 1) if step else None)
        asked, left = [*asked, k], left - taken - 1
        if left < 2:
            break
    assert asked[5] and all(asked[6:8])


# --- one call after the other ----------------------------------------------------------------------------------------------------


class Target:
    """Something to remember calls by."""


def calls_of(target, rows: list, kind=("lookup", 1), slope: float = 0.03, tokens: int = 48, stall=(-1, -1, 1)) -> list[list[tuple[int, float]]]:
    """(K, plain steps) of the rounds of one call per row. A row says of every place of its text what the draft's evidence is there, and how many of
    the tokens that follow it has right. stall: call, round, and how many times as long as it takes that round seems to take."""
    made = []
    for call, row in enumerate(rows):
        schedule, at, rounds = AutoSchedule(16, 0.0, prior=PromptLookupDraft().prior), 0, []
        if target is not None:
            schedule.follow(target, kind)
        while at < tokens:
            evidence, right = row(at)
            k = schedule.next_k([evidence], [tokens - at])[0]
            slow = stall[2] if (call, len(rounds)) == stall[:2] else 1
            schedule.observe([k], [min(k, right)], (1 + slope * k) * slow if rounds else None)
            rounds.append((k, 1 + slope * k))
            at += 1 + min(k, right)
        made.append(rounds)
    return made


def copies(at: int) -> tuple[int, int]:
    return 10, 64


def misleads(at: int) -> tuple[int, int]:
    """Nothing of what the draft finds at first is right; all of it later."""
    return 3, 64 if at >= 5 else 0


def steps(rounds: list[tuple[int, float]]) -> float:
    return sum(cost for _, cost in rounds)


def test_a_call_begins_with_what_rounds_have_cost_in_the_one_before():
    first, *others = calls_of(Target(), [copies] * 8)
    assert first[0][0] < 16 and all(rounds[1][0] == 16 for rounds in others)
    assert sum(map(steps, others)) < 0.9 * 7 * steps(first)
    looks = sum(k == 0 for rounds in others for k, _ in rounds[:-1])
    assert looks <= 1  # what a plain step costs need not be looked at in every call


def test_what_the_call_before_is_ahead_pays_for_trials():
    alone, (_, after) = calls_of(None, [misleads], slope=0.08)[0], calls_of(Target(), [copies, misleads], slope=0.08)
    assert steps(after) < 0.4 * steps(alone)


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("times", [3, 10, 100])
def test_a_round_in_a_bad_moment_is_not_laid_upon_the_calls_that_follow(call, times):
    whole = calls_of(Target(), [copies] * 8)
    for number in range(1, len(whole[call])):
        made = calls_of(Target(), [copies] * 8, stall=(call, number, times))
        assert sum(map(steps, made)) < sum(map(steps, whole)) + 1.2 * 48  # one call without a draft, at most
        assert steps(made[-1]) < 1.1 * steps(whole[-1])


def test_calls_of_other_targets_and_kinds_are_not_taken_for_the_one_before():
    target = Target()
    first = calls_of(target, [copies])
    assert calls_of(target, [copies], kind=("lookup", 2)) == calls_of(Target(), [copies]) == first != calls_of(target, [copies])


@pytest.mark.parametrize("before, now", [(0.02, 0.4), (0.4, 0.02)])
def test_what_has_been_learned_is_soon_forgotten_where_it_is_no_longer_so(before, now):
    """The weights are stored otherwise now, say."""
    def chats(at):
        return (1, 0) if at % 2 else (-1, 0)

    target = Target()
    calls_of(target, [copies] * 5, slope=before)
    for row in (chats, copies):
        made, fresh = calls_of(target, [row] * 4, slope=now), calls_of(Target(), [row] * 4, slope=now)
        assert sum(map(steps, made)) < 1.06 * sum(map(steps, fresh))


def test_calls_of_a_model_follow_one_another_without_a_seed_and_keep_nothing_of_it_alive(monkeypatch):
    followed = []
    monkeypatch.setattr(AutoSchedule, "follow", lambda self, model, *kind, really=AutoSchedule.follow: followed.append(kind) or really(self, model, *kind))
    target, other, rows = tiny_llama(3), perturbed(tiny_llama(3), 0.3), repetitive(12)
    for draft, batch, options in ((PromptLookupDraft(), rows, {}), (PromptLookupDraft(), rows, {}), (PromptLookupDraft(), rows * 2, {}),
                                  (SuffixAutomatonDraft(), rows, {}), (other, rows, {}), (other, rows, {}), (PromptLookupDraft(), rows, {"seed": 5})):
        speculate(target, batch, draft, "auto", **options)
    assert len(followed) == 6 and [followed.count(kind) for kind in followed] == [2, 2, 1, 1, 2, 2]
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


def test_what_was_learned_with_a_draft_model_goes_when_it_does_and_is_not_another_ones():
    """Another model may lie at the address of one that is gone."""
    target, rows = tiny_llama(3), repetitive(12)
    for seed in range(3):
        speculate(target, rows, perturbed(target, seed=seed), "auto", max_new_tokens=4)
        gc.collect()
    speculate(target, rows, None, "auto", max_new_tokens=4)
    assert [kind[0] for kind in _calls[target]] == [PromptLookupDraft]


# --- passes that are filled up -----------------------------------------------------------------------------------------------------

FILLED = {1: 1.0, 4: 1.03, 8: 1.15, 16: 1.5, 32: 2.6, 64: 5.2}  # plain steps of a compiled pass, by the tokens that it is filled up to


def filled_up(k: int) -> float:
    return next(steps for places, steps in FILLED.items() if k < places)


def drafting(schedule, alpha: float, seed: int, tokens: int = 200) -> tuple[float, list[int]]:
    """Plain steps that a text takes in such passes, and what was asked for."""
    rng, left, spent, asked = random.Random(seed), tokens, 0.0, []
    while left:
        k = schedule.next_k([0], [left])[0]
        taken = next((n for n in range(k) if rng.random() >= alpha), k)
        schedule.observe([k], [taken], filled_up(k) * rng.uniform(0.97, 1.03) if asked else None)
        spent, left, asked = spent + filled_up(k), left - taken - 1, [*asked, k]
    return spent, asked


def that_knows_blocks(alpha: float) -> AutoSchedule:
    schedule = AutoSchedule(16, 0.0, prior=lambda strength: (alpha, alpha))
    schedule.cost.blocks = tuple(FILLED)
    return schedule


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.9, 1.0])
def test_passes_that_are_filled_up_are_filled_with_candidates(alpha):
    best = min(mean(drafting(FixedSchedule(k), alpha, seed)[0] for seed in range(40)) for k in (3, 7, 15, 16))
    assert mean(drafting(that_knows_blocks(alpha), alpha, seed)[0] for seed in range(40)) < 1.12 * best
    asked = drafting(that_knows_blocks(alpha), alpha, 0)[1]
    assert set(asked[2:-4]) <= {0, 3, 7, 15}


def test_what_a_filled_pass_costs_is_what_all_of_its_widths_cost():
    cost = RoundCost()
    cost.blocks = tuple(FILLED)
    for k in (0, 2, 5, 11, 1, 7):
        cost.update(k, filled_up(k))
    assert cost(4) == cost(7) < cost(8) == cost(15) < cost(16) == cost(31)
    assert cost.steps(1) == cost.steps(3) and cost(70) > cost(63)  # wider than any block: by its own width


# --- drafts that cost something -----------------------------------------------------------------------------------------------------


def model_calls(rates: list[float], cost: float = 0.4, kind=("model", 1), tokens: int = 96, stall: tuple[int, int, float] | None = None, seed: int = 0) -> list[tuple[float, list[int]]]:
    """Of one call per rate: plain steps for its tokens, and K of its rounds, with a draft model of which a token costs that much and is right that often."""
    target, generator, made = Target(), random.Random(seed), []
    for call, rate in enumerate(rates):
        schedule, at, spent, asked = AutoSchedule(16, cost, prior=lambda strength: (0.7, 0.7)), 0, 0.0, []
        schedule.follow(target, kind)
        while at < tokens:
            k = schedule.next_k([0], [tokens - at])[0]
            right = next((i for i in range(k) if generator.random() > rate), k)
            took = 1 + (cost + 0.04) * k
            seems = took * (stall[2] if stall is not None and stall[:2] == (call, len(asked)) else 1)
            schedule.observe([k], [right], seems if asked else None)
            spent, at = spent + took, at + 1 + right
            asked.append(k)
        made.append((spent, asked))
    return made


@pytest.mark.parametrize("times", [1.6, 1.9, 3.0])
def test_one_slow_round_of_a_draft_model_does_not_change_what_is_drafted(times):
    whole = [sum(spent for spent, _ in model_calls([0.92] * 3, seed=seed)) for seed in range(20)]
    stalled = [sum(spent for spent, _ in model_calls([0.92] * 3, seed=seed, stall=(1, 4, times))) for seed in range(20)]
    assert sum(stalled) < 1.01 * sum(whole)


def test_a_draft_models_acceptance_is_known_to_the_next_call():
    def first(rates):
        return sum(sum(model_calls(rates, seed=seed)[-1][1][1:9]) for seed in range(20)) / 160

    assert first([0.95] * 3) > 1.15 * first([0.95]) and first([0.3, 0.95]) < first([0.95, 0.95])


def test_what_a_draft_models_acceptance_was_is_soon_forgotten_where_it_is_no_longer_so():
    for before, now in ((0.2, 0.95), (0.95, 0.2)):
        changed = [sum(spent for spent, _ in model_calls([before] + [now] * 3, seed=seed)[1:]) for seed in range(20)]
        fresh = [sum(spent for spent, _ in model_calls([now] * 3, seed=seed)) for seed in range(20)]
        assert sum(changed) < 1.08 * sum(fresh), (before, now)
