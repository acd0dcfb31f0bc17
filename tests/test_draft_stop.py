"""When a draft stops: exact in every way, cheaper where it pays, and wrong if the token that made it stop were dropped."""

import pytest
import torch

from hf_specdec import SpeculativeConfig
from hf_specdec.draft_stop import CHOICES, Calibration, DraftStop, StopRule
from hf_specdec.drafts import CascadeDraft, EarlyExitDraft, HorizontalCascadeDraft, MixtureDraft, ModelDraft, PromptLookupDraft, SuffixAutomatonDraft
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.proposal import Proposal
from hf_specdec.schedule import HeuristicSchedule
from tests.conformance import law
from tests.conformance.builders import feature_drafter
from tests.helpers import FULL, generated, perturbed, plain, prompts, repetitive, small_vocabulary_llama, speculate, tiny_llama

ROWS = repetitive(12) + prompts(5, 9, seed=4)
STOPS = ("confidence", "expected_gain")


class Cheap(ModelDraft):
    """A draft as large as the target that says it is not."""

    def relative_cost(self, target):
        return 0.05


def with_stop(kind: str, **options) -> dict:
    return dict(speculative={"draft_stop": kind, **options})


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("k", [1, 4, 7, "auto"])
@pytest.mark.parametrize("kind", CHOICES)
def test_greedy_text_is_that_of_plain_generate(kind, k):
    target = tiny_llama(3)
    out = speculate(target, ROWS, ModelDraft(perturbed(target, 0.2)), k, max_new_tokens=30, **with_stop(kind))
    assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=30)
    assert out.speculation.lossless and out.speculation.config["draft_stop"] == kind


@pytest.mark.share(1 / 6)
@pytest.mark.parametrize("acceptance", ["speculative_sampling", "block"])
@pytest.mark.parametrize("kind", ["heuristic", *STOPS])
def test_sampled_text_follows_the_targets_law(kind, acceptance):
    target, rows = small_vocabulary_llama(2, law.VOCAB), [[1, 2, 3, 1, 2], [4, 3]]
    found, traces = law.counts(target, rows, Cheap(perturbed(target, 0.3)), 50_000 if FULL else 1_200, 3, 4, acceptance=acceptance,
                               **with_stop(kind, draft_confidence=0.35))
    assert law.worst_p_value(found, [law.joint(target, row, 3) for row in rows], 3) > law.THRESHOLD
    assert kind == "heuristic" or len({entry.proposed for trace in traces for entries in trace.rounds for entry in entries}) > 2


class Dropping(ModelDraft):
    """Leaves out the token that made it stop."""

    def propose(self, context, k):
        proposal = super().propose(context, k)
        sizes = [size - (size < own) for size, own in zip(proposal.sizes, k)]
        return Proposal(proposal.tree, proposal.tokens, proposal.probs, sizes, proposal.source)


@pytest.mark.share(0)
def test_dropping_the_token_that_made_it_stop_is_rejected_by_the_same_test():
    target, row = small_vocabulary_llama(2, law.VOCAB), [1, 2, 3, 1, 2]
    found, _ = law.counts(target, [row], Dropping(perturbed(target, 0.3)), 12_000, 3, 4, **with_stop("confidence", draft_confidence=0.35))
    assert law.worst_p_value(found, [law.joint(target, row, 3)], 3) < law.THRESHOLD


@pytest.mark.parametrize("kind", STOPS)
def test_a_row_stops_as_it_does_alone(kind):
    target = tiny_llama(3)
    options = dict(k=6, do_sample=True, max_new_tokens=30, **with_stop(kind, seed=5, draft_confidence=0.5))
    together = speculate(target, ROWS, Cheap(perturbed(target, 0.2)), **options).speculation
    options["speculative"]["seed"] = 6
    alone = speculate(target, ROWS[1:2], Cheap(perturbed(target, 0.2)), **options).speculation
    sizes = [entry.proposed for entries in together.rounds for entry in entries if entry.row == 1]
    assert sizes == [entry.proposed for entries in alone.rounds for entry in entries] and len(set(sizes)) > 2


def test_a_row_whose_cache_is_the_targets_learns_from_its_own_rounds_after_others_have_ended():
    target = tiny_llama(3, num_hidden_layers=4)
    options = dict(k=6, do_sample=True, max_new_tokens=40)
    stop = dict(draft_confidence=0.3)
    together = speculate(target, ROWS, EarlyExitDraft(target, 3), **options, **with_stop("confidence", seed=[5, 6, 7], **stop)).speculation
    last = [max(i for i, entries in enumerate(together.rounds) if any(entry.row == row for entry in entries)) for row in range(len(ROWS))]
    row = max(range(1, len(ROWS)), key=lambda row: last[row] - min(last[:row]))
    alone = speculate(target, ROWS[row : row + 1], EarlyExitDraft(target, 3), **options, **with_stop("confidence", seed=5 + row, **stop)).speculation
    sizes = [entry.proposed for entries in together.rounds for entry in entries if entry.row == row]
    assert last[row] > min(last[:row]) + 3 and sizes == [entry.proposed for entries in alone.rounds for entry in entries] and len(set(sizes)) > 2


@pytest.mark.parametrize("alone", [True, False])
def test_a_feature_drafter_learns_how_far_its_own_tokens_were_accepted(alone, monkeypatch):
    target, told = tiny_llama(3), []
    draft = FeatureDraft(feature_drafter(target), target)
    monkeypatch.setattr(DraftStop, "learn", lambda stop, accepted: told.append((stop.round[0], accepted[0])) or stop.begin())
    mixture = MixtureDraft([SuffixAutomatonDraft(), draft])
    out = speculate(target, ROWS[:1], draft if alone else mixture, 4, max_new_tokens=40, **with_stop("confidence", draft_confidence=0.2))
    drafted = [(len(seen), hits) for seen, hits in told if seen]
    assert generated(out, ROWS[:1]) == plain(target, ROWS[:1], max_new_tokens=40)
    assert any(hits < n for n, hits in drafted) and all(hits <= n for n, hits in drafted)
    assert not alone or sum(hits for _, hits in drafted) == out.speculation.accepted > 0


@pytest.mark.filterwarnings("ignore:assistant_model")
def test_a_bad_draft_is_asked_for_less_and_a_good_one_for_more():
    target = tiny_llama(3)
    good, bad = ModelDraft(target), ModelDraft(perturbed(target, 3.0))
    for kind in ("heuristic", "confidence"):
        rates = [proposed_per_round(speculate(target, ROWS[:1], draft, 8, max_new_tokens=120, **with_stop(kind))) for draft in (good, bad)]
        assert rates[0] > 2 * rates[1], kind


def proposed_per_round(out) -> float:
    return out.speculation.proposed / len(out.speculation.rounds)


def test_a_token_is_kept_whatever_its_confidence():
    stop = StopRule("confidence", 0.5, 0.0).start(2)
    stop.begin()
    assert stop.shortened([4, 4], 0, [0.01, 0.9]) == [1, 4]
    assert stop.shortened([1, 4], 1, [0.9, 0.2]) == [1, 2]
    assert stop.round == [[0.01], [0.9, 0.2]]


def test_the_threshold_adapts_to_what_was_accepted():
    stop = StopRule("confidence", 0.5, 0.0).start(1)
    for _ in range(20):  # sure of itself and wrong
        stop.shortened([4], 0, [0.95])
        stop.learn([0])
    assert stop.shortened([4], 0, [0.95]) == [1]
    stop.begin()
    for _ in range(20):  # unsure and right
        stop.shortened([4], 0, [0.15])
        stop.learn([1])
    assert stop.shortened([4], 0, [0.15]) == [4]


def test_only_judged_tokens_are_learnt_from():
    stop, fresh = StopRule("confidence", 0.1, 0.0).start(1), Calibration()
    for step in range(3):
        stop.shortened([3], step, [0.95, 0.55, 0.35][step : step + 1])
    stop.learn([1])  # the second was rejected, the third never judged
    assert stop.rows[0](0.95) > fresh(0.95) and stop.rows[0](0.55) < fresh(0.55) and stop.rows[0](0.35) == fresh(0.35)


@pytest.mark.parametrize(("cost", "steps"), [(0.0, 8), (0.05, 4), (0.3, 2), (1.0, 1), (2.0, 1)])
def test_drafting_goes_on_while_the_product_of_confidences_pays(cost, steps):
    stop = DraftStop(StopRule("expected_gain", 0.4, cost), 1)
    k, step = [8], 0
    while step < k[0]:
        k, step = stop.shortened(k, step, [0.65]), step + 1
    value = lambda n: (1 + sum(0.65**i for i in range(1, n + 1))) / (1 + cost * n)  # noqa: E731
    best = max(range(1, 9), key=value)
    assert k[0] == best
    assert k[0] == steps or cost == 0.05


def test_the_heuristic_adds_two_and_takes_one():
    schedule = HeuristicSchedule(5, 8)
    seen = []
    for proposed, accepted in (([5], [5]), ([7], [7]), ([8], [8]), ([8, 8], [8, 7]), ([0], [0]), ([7], [0])):
        schedule.observe(proposed, accepted, 0.1)
        seen.append(schedule.k)
    assert seen == [7, 8, 8, 7, 7, 6]
    for _ in range(20):
        schedule.observe([3], [0], 0.1)
    assert schedule.next_k([0, -1], [10, 10]) == [1, 0]


@pytest.mark.parametrize(("options", "message"), [
    (dict(draft_stop="sometimes"), r"^draft_stop='sometimes' is not known; choose one of \['constant'"), (dict(draft_stop=None), "^draft_stop=None"),
    (dict(draft_confidence=0), "^draft_confidence=0"), (dict(draft_confidence=float("inf")), "^draft_confidence=inf"),
])
def test_impossible_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**options)


@pytest.mark.parametrize("kind", STOPS)
def test_a_draft_without_confidence_is_refused_before_any_work(kind):
    target = tiny_llama(3)
    with pytest.raises(ValueError, match=f"^draft_stop='{kind}': the draft 'prompt_lookup' does not draft token by token"):
        speculate(target, ROWS, PromptLookupDraft(), 4, **with_stop(kind))
    small = perturbed(target, 0.1)
    for unheard in (CascadeDraft(small, ModelDraft(small)), HorizontalCascadeDraft(PromptLookupDraft(), ModelDraft(small))):
        with pytest.raises(ValueError, match=f"^draft_stop='{kind}': the draft '{unheard.name}'"):
            speculate(target, ROWS, unheard, 4, **with_stop(kind))
    assert torch.is_tensor(target.generate(torch.tensor([ROWS[0]]), max_new_tokens=2, pad_token_id=0))
