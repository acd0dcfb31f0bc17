"""From measured tables to the choice, against exhaustive search; and what is measured, against the real loop."""

import itertools
import random

import pytest
import torch

from hf_specdec import enable
from hf_specdec.bench.arms import padded
from hf_specdec.bench.measuring import Text, ranks_of, record, replay, right_path
from hf_specdec.bench.tuning import MOST, RANKS, Costs, Measured, Ranked, Recorded, Replayed, by_position, choices
from hf_specdec.drafts import MixtureDraft, ModelDraft, ModelTreeDraft, NGramRecyclingDraft, PromptLookupDraft, RecyclingDraft, SuffixAutomatonDraft
from hf_specdec.proposal import Proposal
from hf_specdec.theory import expected_tokens
from hf_specdec.tree import Tree
from hf_specdec.tree_shapes import best_tree

from ..helpers import FULL, VOCAB, perturbed, repetitive, tiny_llama

WIDTHS = (1, 2, 4, 8, 16, 32, 65)


def costs(slope: float, bend: int = 0, plain: float = 1.0) -> Costs:
    """Seconds of a pass: 1, and `slope` more per token beyond `bend`."""
    return Costs(WIDTHS, tuple(1 + slope * max(width - 1 - bend, 0) for width in WIDTHS), plain, 0.02)


def ranked(rates, length: int = 4000, seed: int = 0) -> Ranked:
    left = 1 - sum(rates)
    ranks = random.Random(seed).choices([*range(len(rates)), RANKS], [*rates, left], k=length)
    return Ranked((tuple(ranks[: length // 2]), tuple(ranks[length // 2 :])))


def all_trees(nodes: int):
    """Every shape of that many nodes once: parents that never fall."""
    for parents in itertools.product(*[range(node + 1) for node in range(nodes)]):
        if list(parents) == sorted(parents):
            yield Tree(parents)


def speed(table: Ranked, tree: Tree, price: Costs, c: float) -> float:
    tokens, sizes = table.tree_rounds(tree)
    return tokens / (sizes.total() * (price.verify(len(tree) + 1) + price.rest + c * max(tree.depths)))


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("rates", [(0.5, 0.2, 0.1), (0.8, 0.1), (0.3, 0.25, 0.2, 0.1), (0.15, 0.05)][:: 1 if FULL else 2])
@pytest.mark.parametrize(("slope", "c"), [(0.1, 0.0), (0.25, 0.05), (0.06, 0.2)])
def test_the_choice_is_within_3_percent_of_the_best_of_all_small_trees_and_chains(rates, slope, c):
    table, price = ranked(rates), costs(slope)
    best = max(speed(table, tree, price, c) for nodes in range(1, 8) for tree in all_trees(nodes))
    best = max(best, *(speed(table, Tree.chain(k), price, c) for k in range(1, MOST + 1)))
    assert choices([Measured("m", "model", table, c)], price)[0].tokens_per_second >= 0.97 * best


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize(("rates", "slope", "bend", "c"), [((0.6, 0.15, 0.08, 0.05), 0.02, 15, 0.01), ((0.45, 0.2, 0.1, 0.05, 0.03), 0.01, 31, 0.1)])
def test_the_choice_is_within_3_percent_of_the_best_of_every_budget_and_depth(rates, slope, bend, c):
    table, price = ranked(rates, 1200), costs(slope, bend)
    exhaustive = (best_tree(table.rates, nodes, depth) for nodes in range(1, MOST + 1, 3) for depth in range(1, min(nodes, 14) + 1))
    best = max(speed(table, tree, price, c) for tree in exhaustive)
    choice = choices([Measured("m", "model", table, c)], price)[0]
    assert choice.tokens_per_second >= 0.97 * best and choice.tree is not None


def test_every_k_of_every_draft_is_tried_and_the_fastest_comes_first():
    rng = random.Random(1)
    tables = [Replayed((tuple((64, tuple(range(1, rng.choice((0, 0, 2, 9)) + 1))) for _ in range(300)),)) for _ in range(3)]
    measured = [Measured(str(i), "prompt_lookup", table, 0.0, 0.01 * i, {}) for i, table in enumerate(tables)]
    price = costs(0.03)
    found = choices(measured, price)
    assert {(choice.label, choice.k) for choice in found} == {(str(i), k) for i in range(3) for k in range(1, MOST + 1)}

    def walked(table, k, per_round):
        at = rounds = 0
        while at < 300:
            at, rounds = at + 1 + min(len(table.texts[0][at][1]), k), rounds + 1
        return 300 / (rounds * (price.verify(k + 1) + 0.02 + per_round))

    best = max(walked(table, k, 0.01 * i) for i, table in enumerate(tables) for k in range(1, MOST + 1))
    assert found[0].tokens_per_second == pytest.approx(best)


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_independent_acceptances_give_equation_1(alpha, k):
    tokens, sizes = ranked((alpha,), 40_000).rounds(k)
    assert tokens / sizes.total() == pytest.approx(expected_tokens(alpha, k), rel=0.03)


def test_passes_between_the_measured_widths_lie_on_a_line_that_never_falls():
    price = Costs((1, 3, 5, 9), (1.0, 3.0, 2.0, 5.0), 1.0)
    assert [price.verify(width) for width in (1, 2, 3, 4, 5, 7, 9, 11)] == [1.0, 1.75, 2.5, 2.5, 2.5, 3.75, 5.0, 6.25]


def test_acceptance_by_position_counts_what_was_judged():
    table = Recorded(((3, (1, 2)), (3, ()), (1, (1,)), (0, ())))
    assert by_position(table, 4) == [2 / 3, 1.0, 0.0, None]
    assert by_position(Ranked(((0, 0, 2, 0),)), 2) == [pytest.approx(3 / 4), pytest.approx(1 / 3)]


def test_a_text_has_no_more_tokens_than_it_has():
    right = Replayed((((4, (1, 2, 3)), (4, (1,)), (0, ())),))  # two rounds of K = 1; one of K = 4, which drafts to the end
    assert right.rounds(1) == (3, {1: 1, 0: 1}) and right.rounds(4) == (3, {4: 1})
    assert Ranked(((0, 0, 0, 0),)).rounds(4) == (4, {4: 1}) and Ranked(((0, 0, 0, 0, 1),)).rounds(4) == (5, {4: 1})


# --- what is measured ---------------------------------------------------------------------------------------------------------


def answers(model, n: int = 40) -> list[Text]:
    texts = []
    for row in repetitive(20, 33, seed=2):
        out = model.generate(**padded(model, [row]), max_new_tokens=n, do_sample=False, pad_token_id=0)
        texts.append(Text(row, out[0, len(row) :].tolist(), 1.0))
    return texts


def real_rounds(model, draft, texts, k):
    """Target passes after the prompt's, and tokens they brought."""
    rounds = tokens = 0
    for text in texts:
        out = enable(model).generate(**padded(model, [text.prompt]), max_new_tokens=len(text.answer), do_sample=False, pad_token_id=0,
                                     assistant_model=draft, num_assistant_tokens=k, speculative=True, return_dict_in_generate=True)
        entries = [entry for entries in out.speculation.rounds[1:] for entry in entries]
        rounds, tokens = rounds + len(entries), tokens + sum(entry.committed for entry in entries)
    return rounds, tokens


@pytest.mark.parametrize("draft", [PromptLookupDraft(), SuffixAutomatonDraft(), SuffixAutomatonDraft(branches=3)], ids=["lookup", "automaton", "tree"])
def test_a_replay_predicts_the_tokens_per_pass_of_the_real_loop(draft):
    model = tiny_llama()
    texts = answers(model)
    table, _ = replay(draft, texts, VOCAB, lambda *_: None)
    for k in (1, 4, 16):
        rounds, tokens = real_rounds(model, draft, texts, k)
        predicted, sizes = table.rounds(k)
        assert predicted / sizes.total() == pytest.approx(tokens / rounds, rel=0.15)  # the prompt pass drafts, too, and shifts the rounds


@pytest.mark.parametrize("tree", [Tree.chain(3), Tree((0, 0, 1, 1, 2, 3))], ids=["chain", "tree"])
def test_ranks_predict_the_tokens_per_pass_of_a_draft_model(tree):
    model = tiny_llama()
    draft, texts = perturbed(model, 0.3), answers(model)
    table = ranks_of(draft, texts, lambda *_: None)
    assert 0.1 < table.rates[0] < 0.95
    ours = ModelDraft(draft) if tree.is_chain else ModelTreeDraft(draft, tree)
    rounds, tokens = real_rounds(model, ours, texts, max(tree.depths))
    predicted, sizes = table.tree_rounds(tree)
    assert predicted / sizes.total() == pytest.approx(tokens / rounds, rel=0.15)


@pytest.mark.parametrize("make", [lambda: RecyclingDraft(branches=2), NGramRecyclingDraft, MixtureDraft], ids=["recycling", "ngram_recycling", "mixture"])
def test_a_record_is_of_the_real_rounds_and_changes_nothing(make):
    model = enable(tiny_llama())
    texts = answers(model)
    run = record(model, make(), texts, 8, lambda *_: None)
    rounds, tokens = real_rounds(model, make(), texts, 8)
    counted, sizes = run.table.rounds(8)
    assert sizes.total() == rounds and counted >= tokens > rounds
    assert run.rest > 0 and run.per_token > 0


def test_the_right_path_through_a_tree_is_found():
    proposal = Proposal(Tree((0, 0, 1, 2, 4)), torch.tensor([[5, 6, 7, 8, 9]]), None, [4])
    assert right_path(proposal, [6, 8, 9]) == (2, 4) and right_path(proposal, [5, 8]) == (1,) and right_path(proposal, [9]) == ()


def test_a_model_whose_first_ranks_are_never_right_makes_no_tree():
    measured = [Measured("bad", "model", Ranked(((3, 3, 3, 3), (5, 3, 8))), 0.2, 0.0, {}, "x")]
    found = choices(measured, Costs((1, 2, 65), (0.5, 5.6, 60.0), 1.0, 0.0))
    assert found and all(choice.k >= 1 for choice in found)
