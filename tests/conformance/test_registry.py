"""Every registered draft under every registered rule: a new line in a registry buys the whole battery, or fails by name."""

from functools import partial

import pytest

from hf_specdec import registry
from hf_specdec.drafts import Draft
from tests.conformance import law
from tests.conformance.builders import BUILDERS, make
from tests.helpers import FULL, ScriptedDraft, generated, perturbed, plain, prompts, repetitive, small_vocabulary_llama, speculate, tiny_llama

ALONE, RAGGED = "alone", "ragged"
every_draft = pytest.mark.parametrize("draft", sorted(registry.DRAFTS))


def greedy_rule(draft: str, k: int, batch: str) -> None:
    """Equal to plain generate, token for token."""
    target = tiny_llama(3)
    rows = repetitive(12) if batch == ALONE else repetitive(12) + prompts(1, 5, seed=4)
    out = speculate(target, rows, make(draft, target), k, acceptance="greedy")
    assert generated(out, rows) == plain(target, rows)


def sampling_rule(draft: str, k: int, batch: str, acceptance: str = "speculative_sampling", n: int = 320) -> None:
    """The law of the first three tokens."""
    target = small_vocabulary_llama(1, law.VOCAB)
    rows = [[1, 2, 3, 1, 2]] if batch == ALONE else [[1, 2, 3, 1, 2], [4], [5, 4, 5]]
    n = 50_000 if FULL else n // len(rows)
    found, traces = law.counts(target, rows, make(draft, target), n, 3, k, acceptance=acceptance)
    assert law.worst_p_value(found, [law.joint(target, row, 3) for row in rows], 3) > law.THRESHOLD
    assert all(trace.lossless for trace in traces)


def coupled_rule(draft: str, k: int, batch: str) -> None:
    """The text that another draft and another K give with the same seed, and not that of another seed."""
    target = tiny_llama(3)
    rows = repetitive(12) if batch == ALONE else repetitive(12) + prompts(1, 5, seed=4)
    texts = [generated(speculate(target, rows, given, own, seed=seed, do_sample=True, acceptance="coupled"), rows)
             for given, own, seed in ((make(draft, target), k, 3), (ScriptedDraft(lambda row: []), 1, 3), (None, 1, 4))]
    assert texts[0] == texts[1] != texts[2]


def lossy_rule(acceptance: str, passes):
    def check(draft: str, k: int, batch: str) -> None:
        """No drafted token is accepted that does not pass, and the trace says that the law is another."""
        target = tiny_llama(3)
        rows = repetitive(12) if batch == ALONE else repetitive(12) + prompts(1, 5, seed=4)
        options = dict(seed=3, record_probs=True, threshold=0.1, typical_epsilon=0.1, typical_delta=1.0)
        trace = speculate(target, rows, make(draft, target), k, speculative=options, do_sample=True, acceptance=acceptance, top_k=0).speculation
        assert not trace.lossless
        assert all(passes(p) for entries in trace.rounds for entry in entries for p in entry.p[: entry.accepted])

    return check


RULES = {
    "block": partial(sampling_rule, acceptance="block", n=300),
    "coupled": coupled_rule,
    "greedy": greedy_rule,
    "spectr": partial(sampling_rule, acceptance="spectr", n=400),
    "speculative_sampling": sampling_rule,
    "threshold": lossy_rule("threshold", lambda p: p >= 0.1 - 1e-6),
    "typical": lossy_rule("typical", lambda p: p > 1.0 / 61 - 1e-6),  # exp(-H) is at least 1 / V
}


SHAPES = {"model_tree": 8, "feature_tree": 8}  # drafts for which K is a depth: nodes per level, at most


def test_every_registered_draft_has_a_builder_and_no_builder_is_left_over():
    assert sorted(BUILDERS) == sorted(registry.DRAFTS)


def test_every_registered_rule_has_a_test_and_no_test_is_left_over():
    assert sorted(RULES) == sorted(registry.ACCEPTANCE)


@every_draft
def test_a_registered_draft_is_a_draft_under_its_own_name(draft):
    made = make(draft, tiny_llama())
    assert isinstance(made, Draft) and isinstance(made, registry.load(registry.DRAFTS, draft, "draft")) and made.name == draft


CASES = [(rule, k, batch) for rule in sorted(registry.ACCEPTANCE) for k in (1, 4, 7) for batch in (ALONE, RAGGED)
         if FULL or k == 4 or rule == "greedy" and (k, batch) != (7, ALONE)]  # test_law.py goes round all K


@pytest.mark.share(1 / 6)
@pytest.mark.parametrize(("rule", "k", "batch"), CASES)
@every_draft
def test_draft_and_rule_give_the_targets_own_text(draft, rule, k, batch):
    RULES[rule](draft, k, batch)


@pytest.mark.share(2)
@every_draft
def test_a_row_without_room_is_not_drafted_for(draft):
    target = tiny_llama(3)
    rows = repetitive(12, 9)
    for max_new in (1, 2, 3):
        out = speculate(target, rows, make(draft, target), 7, max_new_tokens=max_new)
        proposed = [entry.proposed for entries in out.speculation.rounds for entry in entries]
        assert generated(out, rows) == plain(target, rows, max_new_tokens=max_new)
        assert all(n <= (max_new - 1) * SHAPES.get(draft, 1) for n in proposed)


LEARNS = {"online"}  # keeps its weights from call to call, which is what it is for: tests/drafts/test_online.py


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("draft", sorted(set(registry.DRAFTS) - LEARNS))
def test_the_draft_keeps_nothing_from_one_call_to_the_next(draft):
    target = tiny_llama(3)
    made, rows = make(draft, target), repetitive(12, 9)
    first = [speculate(target, rows, made, 4, seed=5, do_sample=True) for _ in range(2)]
    assert generated(first[0], rows) == generated(first[1], rows)
    assert [first[0].speculation.rounds] == [first[1].speculation.rounds]


@pytest.mark.share(1 / 4)
@every_draft
def test_k_auto_gives_the_targets_own_text(draft):
    target, rows = tiny_llama(3), repetitive(12) + prompts(5, seed=4)
    assert generated(speculate(target, rows, make(draft, target), "auto", max_new_tokens=40), rows) == plain(target, rows, max_new_tokens=40)


@pytest.mark.share(2)
@every_draft
def test_the_draft_serves_stock_assisted_decoding_too(draft):
    target, row = tiny_llama(3), repetitive(12)[0]
    made = make(draft, target)
    if draft == "uniform":
        made.vocab_size = target.config.vocab_size
    assert plain_with_candidates(target, row, made) == plain(target, [row])[0]


def plain_with_candidates(target, row, candidates) -> list[int]:
    """A greedy stock loop around `get_candidates`, as transformers' `_assisted_decoding` calls it."""
    import torch

    ids, start = torch.tensor([row]), len(row)
    with torch.no_grad():
        while ids.shape[1] < start + 20:
            proposed, _ = candidates.get_candidates(ids)
            argmax = target(input_ids=proposed).logits[0, ids.shape[1] - 1 :].argmax(-1)
            drafted = proposed[0, ids.shape[1] :]
            matches = int((drafted == argmax[:-1]).long().cumprod(0).sum())
            ids = torch.cat([ids, argmax[None, : matches + 1]], dim=1)
            candidates.update_candidate_strategy(ids, None, matches)
    return ids[0, start : start + 20].tolist()


def test_lookup_and_a_perturbed_copy_are_accepted_some_of_the_time():
    target, rows = tiny_llama(3), repetitive(12, 14)
    rates = [speculate(target, rows, draft, 4).speculation.acceptance_rate for draft in (None, perturbed(target))]
    assert all(0.02 < rate < 0.98 for rate in rates)
