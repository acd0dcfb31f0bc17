"""Medusa heads as a draft: what they see, which tokens a tree gets, and what they refuse. Exactness is the conformance battery's."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.medusa import MedusaDraft
from hf_specdec.drafts.parallel import ParallelDraft
from hf_specdec.training import build_drafter
from hf_specdec.training.heads import build
from hf_specdec.tree import Tree
from hf_specdec.tree_shapes import DynamicTree, rank_tree

from .. import encoder_decoders
from ..architectures import FAMILIES
from ..conformance.builders import block_drafter, medusa_heads
from ..helpers import Logged, generated, plain, small_vocabulary_llama, speculate, tiny_llama


class Watched(Logged, MedusaDraft):
    pass


def expected(target, heads, row) -> torch.Tensor:
    """Logits [K, V'] of the heads on the state of the last token before the root, from a forward of its own."""
    with torch.no_grad():
        return heads(target.base_model(input_ids=torch.tensor([row[:-1]])).last_hidden_state[0, -1])


@pytest.mark.parametrize("tree", [None, (3, 2, 2, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("rows", [[[5, 6, 7, 8]], [[5, 6, 7, 8, 9, 10], [11, 12, 13], [3, 4]]], ids=["one", "ragged"])
def test_every_round_reads_the_state_before_the_root(rows, tree):
    target = tiny_llama(3)
    heads = medusa_heads(target)
    draft = Watched(heads, target, tree)
    speculate(target, rows, draft, 4, do_sample=True, seed=3, max_new_tokens=16)
    checked = 0
    for committed, proposal in draft.log[1:]:
        for b, row in enumerate(committed):
            logits = expected(target, heads, row)
            for node in range(1, proposal.sizes[b] + 1):
                depth, rank = proposal.tree.depths[node], proposal.tree.ranks[node - 1]
                assert int(proposal.tokens[b, node - 1]) == int(logits[depth - 1].topk(rank + 1).indices[-1])
                checked += 1
    assert checked > 20 and not target.base_model._forward_hooks


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_tree_may_have_more_branches_than_the_vocabulary_has_tokens(do_sample):
    target, rows = small_vocabulary_llama(vocab=2), [[1, 0, 1], [0]]
    out = speculate(target, rows, MedusaDraft(medusa_heads(target), target, (3, 2, 1)), 9, max_new_tokens=12, do_sample=do_sample)
    assert out.speculation.drafted and list(map(len, generated(out, rows))) == [12, 12]
    assert do_sample or generated(out, rows) == plain(target, rows, max_new_tokens=12)


def test_new_heads_say_what_the_target_says_next():
    target = tiny_llama(3)
    states = torch.randn(2, 32)
    torch.testing.assert_close(build(target, 3)(states)[:, 1], target.lm_head(states))


def test_a_pruned_head_proposes_its_tokens_only():
    target, ids = tiny_llama(3), torch.arange(1, 61, 3)
    heads = build(target, 3, 1, ids)
    draft = Watched(heads, target, (2, 2))
    out = speculate(target, [[5, 6, 7]], draft, 4)
    tokens = torch.cat([proposal.tokens.flatten() for _, proposal in draft.log])
    assert len(tokens) and bool(torch.isin(tokens, ids).all())
    assert generated(out, [[5, 6, 7]]) == plain(target, [[5, 6, 7]])


def test_the_tree_of_rates_takes_the_likeliest_paths():
    tree = rank_tree([[0.5, 0.3], [0.8, 0.1]], 4)
    # 0.5, 0.5 * 0.8, 0.3, 0.3 * 0.8
    assert tree == Tree((0, 1, 0, 3))
    assert len(rank_tree([[0.5, 0.3]], 10)) == 2


def test_a_confident_tree_has_the_paths_of_the_largest_products():
    target = tiny_llama(3)
    heads = medusa_heads(target)
    draft = Watched(heads, target, DynamicTree(nodes=6, width=1, branches=3))
    speculate(target, [[5, 6, 7, 8]], draft, 4)
    checked = 0
    for ((row,), proposal), (k,) in zip(draft.log[1:], draft.k[1:]):
        if k < 2:
            continue
        best = expected(target, heads, row).softmax(-1).topk(3).values
        chances = [1.0]
        for node, parent in enumerate(proposal.tree.parents, start=1):
            chances.append(chances[parent] * float(best[proposal.tree.depths[node] - 1, proposal.tree.ranks[node - 1]]))
        every = [1.0]
        paths = []
        for d in range(k):
            every = [above * float(value) for above in every for value in best[d]]
            paths += every
        assert proposal.sizes == [6] and sorted(chances[1:]) == pytest.approx(sorted(paths)[-6:], rel=1e-4)
        checked += 1
    assert checked > 3


@pytest.mark.parametrize(("tree", "message"), [("4,2", "tree="), (0, "1..256"), ((2,) * 5, "levels"), ((300,), "256"), (True, "tree=True")])
def test_trees_that_the_heads_cannot_fill_are_refused(tree, message):
    target = tiny_llama(3)
    with pytest.raises(ValueError, match=message):
        MedusaDraft(medusa_heads(target), target, tree)


def test_a_number_of_nodes_needs_measured_rates():
    target = tiny_llama(3)
    with pytest.raises(ValueError, match="measured rates"):
        MedusaDraft(build(target, 2), target, 4)


def test_what_is_not_heads_and_targets_with_an_encoder_are_refused():
    target = tiny_llama(3)
    with pytest.raises(ValueError, match="not MedusaHeads"):
        MedusaDraft(target, target)
    model = encoder_decoders.family("T5").model("eager", 0)
    with pytest.raises(ValueError, match="decoder-only"):
        encoder_decoders.speculate(model, encoder_decoders.source(), MedusaDraft(medusa_heads(target), target), 2)


@pytest.mark.parametrize("make", [lambda target: MedusaDraft(medusa_heads(target), target), lambda target: ParallelDraft(block_drafter(target), target),
                                  lambda target: FeatureDraft(build_drafter(target, [1], None, (0, 1, 2)), target)], ids=["heads", "block", "feature"])
def test_a_target_that_is_cast_after_its_drafter_was_made_is_refused(make):
    target = tiny_llama(3)
    draft = make(target)
    target.bfloat16()
    with pytest.raises(ValueError, match="own weights are torch.float32.*uses are torch.bfloat16"):
        speculate(target, [[5, 6, 7, 8]], draft, 4)
    target.float()
    assert speculate(target, [[5, 6, 7, 8]], draft, 4).speculation.drafted


def test_layers_that_read_images_are_not_taken_for_those_of_the_text():
    """GIT's image encoder is a part of its decoder, and here has as many layers."""
    family = next((line for line in FAMILIES if line.name == "GIT"), None)
    if family is None:
        pytest.skip("this transformers' GIT is refused")
    target = family.model("eager")
    rows = [[5, 6, 7, 8], [9, 10, 11, 12]]
    out = speculate(target, rows, MedusaDraft(medusa_heads(target), target), 4)
    assert generated(out, rows) == plain(target, rows) and out.speculation.proposed
