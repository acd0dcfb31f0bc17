"""Token recycling on its own: what is kept of the logits, how the tree is filled, what it holds. The conformance tests run it in the
loop."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_specdec.drafts import Context, RecyclingDraft
from hf_specdec.drafts.recycling import RATES, UNKNOWN, best_first
from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree
from tests.helpers import generated, plain, prompts, repetitive, speculate, tiny_llama

VOCAB = 23


def context(*rows: list[int], do_sample: bool = False, vocab: int = VOCAB) -> Context:
    return Context(list(rows), 1000, vocab, torch.device("cpu"), SimpleNamespace(do_sample=do_sample), None)


def taught(draft: RecyclingDraft, ctx: Context, rounds: int = 1, seed: int = 0) -> RecyclingDraft:
    """The draft after passes over nothing but the roots 0, 1, 2, ...: it knows every token's successors."""
    generator = torch.Generator().manual_seed(seed)
    draft.start(ctx)
    rows = [list(row) for row in ctx.rows]
    for token in range(ctx.vocab_size):
        ctx.rows[:] = [[token]] * len(rows)
        draft.observe(Proposal.from_lists([[]] * len(rows), "cpu"), torch.randn(len(rows), 1, ctx.vocab_size, generator=generator))
    ctx.rows[:] = rows
    return draft


def known(matrix: np.ndarray) -> set[int]:
    """Tokens with a successor."""
    return set(np.nonzero(matrix[:, 0] != UNKNOWN)[0].tolist())


class Watched(RecyclingDraft):
    """Also keeps, the slow way, what it should know: per row and token the logits that were shown last."""

    def start(self, context):
        super().start(context)
        self.last = [{} for _ in context.rows] if context.sampler.do_sample else [{}] * len(context.rows)
        self.prompts = [set(row[:-1]) for row in context.rows] if context.sampler.do_sample else [set().union(*context.rows)] * len(context.rows)
        self.checked = 0

    def observe(self, proposal, logits):
        super().observe(proposal, logits)
        for b, row in enumerate(self.context.rows):
            for node in range(proposal.sizes[b], -1, -1):
                token = row[-1] if node == 0 else int(proposal.tokens[b, node - 1])
                self.last[b][token] = logits[b, node].clone()
        self.check()

    def keep(self, rows):
        super().keep(rows)
        self.last, self.prompts = ([column[row] for row in rows] for column in (self.last, self.prompts))

    def check(self):
        for matrix, last, prompt in zip(self.matrices, self.last, self.prompts):
            assert set(last) <= known(matrix) <= set(last) | prompt
            for token, logits in last.items():
                assert matrix[token].tolist() == logits.topk(self.successors).indices.tolist()
                self.checked += 1


# --- what is kept -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("branches", [1, 3])
def test_the_matrix_holds_the_top_successors_of_every_tokens_last_logits(branches, do_sample):
    draft, rows = Watched(branches), repetitive(12) + prompts(2, 7, seed=4)
    target = tiny_llama(3)
    eos = plain(target, rows[:1])[0][8]
    out = speculate(target, rows, draft, 6, max_new_tokens=60, do_sample=do_sample, seed=1, eos_token_id=eos)
    assert draft.checked > 200 and out.speculation.proposed > 30


def test_of_equal_tokens_in_one_pass_the_one_nearest_to_the_root_counts():
    draft, ctx = RecyclingDraft(successors=3), context([4, 5])
    draft.start(ctx)
    logits = torch.randn(1, 5, VOCAB, generator=torch.Generator().manual_seed(0))
    draft.observe(Proposal.from_lists([[7, 5, 7, 9]], "cpu"), logits)
    for token, node in ((5, 0), (7, 1), (9, 4)):
        assert draft.matrices[0][token].tolist() == logits[0, node].topk(3).indices.tolist()


def test_padding_is_not_learned_from():
    draft, ctx = RecyclingDraft(), context([1], [2])
    draft.start(ctx)
    draft.observe(Proposal.from_lists([[3, 4], []], "cpu"), torch.randn(2, 3, VOCAB))
    assert known(draft.matrices[0]) == {1, 2, 3, 4}


def test_of_the_prompt_the_last_pairs_are_known_until_the_target_speaks():
    draft, ctx = RecyclingDraft(branches=2, successors=2), context([1, 2, 3, 1, 4, 5], [6, 7], do_sample=True)
    draft.start(ctx)
    logits = torch.zeros(2, 1, VOCAB)
    logits[:, 0, 1], logits[:, 0, 9] = 2.0, 1.0
    draft.observe(Proposal.from_lists([[], []], "cpu"), logits)
    assert {token: draft.matrices[0][token].tolist() for token in known(draft.matrices[0])} == {
        1: [4, UNKNOWN], 2: [3, UNKNOWN], 3: [1, UNKNOWN], 4: [5, UNKNOWN], 5: [1, 9]}
    assert known(draft.matrices[1]) == {6, 7}
    proposal, tree = draft.propose(ctx, [5, 0]), best_first(5, 2)
    assert proposal.tree == tree.truncate(proposal.sizes[0])
    tokens = [5, *proposal.tokens[0].tolist()]
    assert [tokens[node] for node, rank in enumerate(tree.ranks[: proposal.sizes[0]], 1) if tree.depths[node] == 1] == [1, 9][: tree.parents[: proposal.sizes[0]].count(0)]
    assert all(tokens[node] == 4 for node in range(1, len(proposal.tree) + 1) if tree.parents[node - 1] and tokens[tree.parents[node - 1]] == 1 and tree.ranks[node - 1] == 0)


@pytest.mark.parametrize("vocab", [5, 23, 4096])
def test_it_takes_four_bytes_per_token_and_successor_once_for_all_greedy_rows(vocab):
    greedy, sampled = (taught(RecyclingDraft(), context([1], [2], [3], do_sample=sample, vocab=min(vocab, 50))) for sample in (False, True))
    held = min(vocab, 50) * min(8, vocab) * 4
    assert len({id(matrix) for matrix in greedy.matrices}) == 1 and greedy.matrices[0].nbytes == held and greedy.matrices[0].dtype == np.int32
    assert len({id(matrix) for matrix in sampled.matrices}) == 3 and sum(matrix.nbytes for matrix in sampled.matrices) == 3 * held
    draft = RecyclingDraft()
    draft.start(context([1], vocab=vocab))
    draft.observe(Proposal.from_lists([[]], "cpu"), torch.zeros(1, 1, vocab))
    assert draft.matrices[0].nbytes == vocab * min(8, vocab) * 4
    draft.finish()
    assert draft.matrices == [] and draft.kept is None


# --- the tree -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("branches", [1, 2, 3, 8])
def test_the_tree_holds_the_likeliest_paths_and_that_of_fewer_nodes_is_its_beginning(branches):
    tree = best_first(24, branches)
    chance = [1.0]
    for parent, rank in zip(tree.parents, tree.ranks):
        assert rank < branches
        chance.append(chance[parent] * RATES[rank])
    assert chance == sorted(chance, reverse=True)
    missing = [chance[node] * RATES[tree.parents.count(node)] for node in range(25) if tree.parents.count(node) < branches]
    assert max(missing) <= min(chance)
    assert [best_first(n, branches) for n in range(25)] == [tree.truncate(n) for n in range(25)]
    assert tree.is_chain == (branches == 1)


@pytest.mark.parametrize("branches", [1, 2, 4])
def test_a_node_holds_the_successor_of_its_rank_of_the_token_of_its_parent(branches):
    ctx = context([3, 4], [9], [1, 1, 1], do_sample=True)
    draft = taught(RecyclingDraft(branches), ctx)
    proposal = draft.propose(ctx, [14, 3, 0])
    assert proposal.tree == best_first(14, branches) and proposal.sizes == [14, 3, 0] and proposal.probs is None
    for b, root in enumerate((4, 9)):
        tokens = [root, *proposal.tokens[b].tolist()]
        for node in range(1, proposal.sizes[b] + 1):
            parent, rank = proposal.tree.parents[node - 1], proposal.tree.ranks[node - 1]
            assert tokens[node] == draft.matrices[b][tokens[parent], rank]


def test_nothing_is_proposed_after_a_token_without_successors():
    draft, ctx = RecyclingDraft(successors=2), context([1], [5])
    draft.start(ctx)
    assert draft.evidence(ctx) == [-1, -1] and draft.propose(ctx, [3, 3]).sizes == [0, 0]
    logits = torch.zeros(2, 1, VOCAB)
    logits[0, 0, 2], logits[0, 0, 3] = 2.0, 1.0
    draft.observe(Proposal.from_lists([[], []], "cpu"), logits)
    ctx.rows[1] = [5, 8]
    assert draft.evidence(ctx) == [0, -1]
    assert draft.propose(ctx, [3, 0]).tokens.tolist() == [[2], [0]], "2 has no successors yet, so the chain ends there"
    tree = RecyclingDraft(2, 2)
    tree.start(ctx)
    tree.observe(Proposal.from_lists([[], []], "cpu"), logits)
    proposal = tree.propose(ctx, [8, 0])
    depths = best_first(8, 2).depths
    assert proposal.sizes == [max(node for node in range(9) if depths[node] <= 1), 0]
    proposal.check(2, VOCAB, tree.name)


# --- from call to call --------------------------------------------------------------------------------------------------


def test_what_was_learned_is_kept_for_the_next_call_only_on_request():
    target, rows = tiny_llama(3), repetitive(12)
    for remember in (False, True):
        draft = RecyclingDraft(remember=remember)
        first, second = (speculate(target, rows, draft, 4, max_new_tokens=30) for _ in range(2))
        assert generated(first, rows) == generated(second, rows) == plain(target, rows, max_new_tokens=30)
        gain = second.speculation.accepted - first.speculation.accepted
        assert gain > 0 if remember else gain == 0


def test_a_target_of_another_size_starts_with_nothing():
    draft = RecyclingDraft(remember=True)
    for vocab in (VOCAB, 2 * VOCAB):
        taught(draft, context([1], vocab=vocab))
        assert draft.kept.shape == (vocab, 8)
        draft.finish()


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("branches", [1, 3])
def test_a_sampled_row_equals_its_own_run(branches, seed):
    target, rows = tiny_llama(seed), repetitive(13) + prompts(2, 7, seed=2)
    options = dict(k=5, do_sample=True, temperature=0.6, max_new_tokens=40)
    out = speculate(target, rows, RecyclingDraft(branches), seed=[5, 9, 2], **options)
    assert generated(out, rows) == [generated(speculate(target, [row], RecyclingDraft(branches), seed=own, **options), [row])[0]
                                    for row, own in zip(rows, (5, 9, 2))]
    assert out.speculation.proposed > 10


def test_it_learns_under_stock_assisted_decoding(monkeypatch):
    target, row, draft = tiny_llama(3), repetitive(12)[0], RecyclingDraft(branches=2)
    monkeypatch.setattr(type(target), "_get_candidate_generator", lambda self, **kwargs: draft)
    ids = torch.tensor([row])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
    text = target.generate(ids, prompt_lookup_num_tokens=3, **options)[0, 12:32].tolist()  # 5.10 leaves the cap to the draft
    assert text == plain(target, [row])[0]
    assert known(draft.matrices[0]) - set(row) and draft._stock_proposal.tree.is_chain


@pytest.mark.parametrize("options", [dict(branches=0), dict(branches=9), dict(branches=True), dict(branches=4, successors=3), dict(successors=65)], ids=str)
def test_wrong_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=f"^{list(options)[-1]}="):
        RecyclingDraft(**options)


def test_a_tree_is_a_chain_of_the_first_ranks_with_one_branch():
    assert best_first(5, 1) == Tree.chain(5)
