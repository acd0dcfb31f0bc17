"""Drafts inside drafts inside drafts: what reads the target's states has those of the committed tokens, wherever it stands."""

import pytest
import torch

from hf_specdec.drafts import (
    CascadeDraft, EarlyExitDraft, HorizontalCascadeDraft, MixtureDraft, ModelDraft, ModelTreeDraft, PromptLookupDraft, RecyclingDraft,
    SuffixAutomatonDraft,
)
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.feature_tree import FeatureTreeDraft
from hf_specdec.drafts.features import fused, hidden_states
from hf_specdec.drafts.inner import Judged
from hf_specdec.drafts.medusa import MedusaDraft
from hf_specdec.drafts.online import OnlineDraft
from hf_specdec.drafts.parallel import ParallelDraft
from hf_specdec.drafts.pass_draft import PassDraft
from hf_specdec.proposal import Proposal, Verdict
from hf_specdec.training import build_drafter
from hf_specdec.tree import Tree
from hf_specdec.tree_shapes import DynamicTree
from tests.conformance.builders import block_drafter, look_ahead, medusa_heads
from tests.helpers import assert_unchanged, generated, perturbed, plain, prompts, repetitive, snapshot, speculate, tiny_llama

import hf_specdec
from hf_specdec.compat import CACHE

BATCHES = {"alone": repetitive(12), "ragged": [*repetitive(12), *prompts(5, seed=4), *repetitive(9, seed=2)]}


class Noting:
    """Notes before it is asked to draft (row, places that the target has read, places known, states [n, F] that it has of the last of these)."""

    def evidence(self, context):
        read = self.context.target.lengths
        self.log += [(list(row), own, getattr(self, "seen", self).known[b], self.kept(b)) for b, (row, own) in enumerate(zip(context.rows, read))]
        return super().evidence(context)


class Features(Noting, FeatureDraft):
    def kept(self, b):
        return self.states[b, : self.known[b]].clone()


class FeatureTrees(Noting, FeatureTreeDraft):
    kept = Features.kept


class Heads(Noting, MedusaDraft):
    def kept(self, b):
        return None if self.seen.recent[b] is None else self.seen.recent[b].clone()


class Blocks(Noting, ParallelDraft):
    kept = Heads.kept


def noting(kind, *arguments):
    made = kind(*arguments)
    made.log = []
    return made


def feature(target, log):
    log.append(noting(Features, build_drafter(target, [1], None, (0, 1, 2)), target))
    return log[-1]


def feature_tree(target, log):
    log.append(noting(FeatureTrees, build_drafter(target, [1], None, (0, 1, 2)), target, DynamicTree(6, 2, 2)))
    return log[-1]


def medusa(target, log):
    log.append(noting(Heads, medusa_heads(target), target))
    return log[-1]


def block(target, log):
    log.append(noting(Blocks, block_drafter(target), target))
    return log[-1]


def good(target):
    return ModelDraft(perturbed(target, 0.05))


# name -> (target, where drafts that note are put) -> draft
NESTINGS = {
    "mixture, then lookup": lambda t, log: HorizontalCascadeDraft(MixtureDraft([good(t), feature(t, log), medusa(t, log)], branches=1), PromptLookupDraft(), 5),
    "lookup, then mixture": lambda t, log: HorizontalCascadeDraft(PromptLookupDraft(), MixtureDraft([feature(t, log), medusa(t, log), good(t)], branches=1)),
    "model, then features": lambda t, log: HorizontalCascadeDraft(good(t), feature(t, log)),
    "lookup, then heads": lambda t, log: HorizontalCascadeDraft(PromptLookupDraft(), medusa(t, log)),
    "lookup, then a block": lambda t, log: HorizontalCascadeDraft(PromptLookupDraft(), block(t, log)),
    "cascade, then features": lambda t, log: HorizontalCascadeDraft(HorizontalCascadeDraft(feature(t, log), good(t), 1), feature(t, log), 3),
    "heads, then a cascade": lambda t, log: HorizontalCascadeDraft(medusa(t, log), HorizontalCascadeDraft(good(t), feature(t, log), 1), 1),
    "a chain of both in a tree": lambda t, log: MixtureDraft([HorizontalCascadeDraft(feature(t, log), good(t)), medusa(t, log), "recycling"]),
    "cascades in one tree": lambda t, log: MixtureDraft([HorizontalCascadeDraft(good(t), feature(t, log)), HorizontalCascadeDraft(medusa(t, log), good(t))]),
    "one of cascades": lambda t, log: MixtureDraft([HorizontalCascadeDraft(feature(t, log), good(t)), HorizontalCascadeDraft(medusa(t, log), good(t))], "choose"),
    "trees in a tree": lambda t, log: MixtureDraft([MixtureDraft([feature_tree(t, log), PromptLookupDraft()]), medusa(t, log), good(t)]),
    "one of trees": lambda t, log: MixtureDraft([MixtureDraft([feature_tree(t, log), good(t)], "choose"), MixtureDraft([block(t, log), "recycling"])], "choose"),
    "three deep": lambda t, log: MixtureDraft([MixtureDraft([MixtureDraft([feature(t, log), good(t)]), medusa(t, log)]), SuffixAutomatonDraft()]),
    "beside a model's tree": lambda t, log: MixtureDraft([MixtureDraft([ModelTreeDraft(perturbed(t, 0.1), (2, 2)), feature(t, log)]), RecyclingDraft(branches=3)]),
    "beside the target's own layers": lambda t, log: MixtureDraft([EarlyExitDraft(t, 1), PassDraft(look_ahead(t), t), feature(t, log), medusa(t, log)]),
    "one that learns": lambda t, log: MixtureDraft([MixtureDraft([OnlineDraft(feature(t, log), t, every=3, lr=1e-3), medusa(t, log)]), good(t)]),
}


@torch.no_grad()
def check(draft, target, forgets=False) -> None:
    """What a draft noted is what the target computes of these rows; all of it unless it `forgets`."""
    for row, read, known, kept in draft.log:
        assert known == read or forgets and known <= len(row)
        if kept is not None and known:
            with hidden_states(target, draft.layers) as seen:
                target(input_ids=torch.tensor([row]))
            states = seen()[0, :known]
            states = fused(draft.model, states) if isinstance(draft, FeatureDraft) else states[-len(kept) :]
            torch.testing.assert_close(kept, states, atol=1e-3, rtol=1e-3)


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize(("batch", "k"), [("alone", 9), ("ragged", 9), ("ragged", "auto")])
@pytest.mark.parametrize("name", NESTINGS)
def test_the_text_and_the_states_are_the_targets(name, batch, k):
    target, rows, readers = tiny_llama(3), BATCHES[batch], []
    before = snapshot(target)
    draft = NESTINGS[name](target, readers)
    out = speculate(target, rows, draft, k, seed=0, max_new_tokens=14)
    hf_specdec.disable(target)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=14)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())
    assert_unchanged(target, before)
    assert sum(len(reader.log) for reader in readers) >= 3
    for reader in readers:
        check(reader, target)


def test_rows_that_end_before_the_others_leave_them_their_states():
    target, rows, readers = tiny_llama(3), BATCHES["ragged"], []
    texts = plain(target, rows, max_new_tokens=14)
    stop = texts[0][4]
    draft = MixtureDraft([HorizontalCascadeDraft(good(target), feature(target, readers)), medusa(target, readers), feature_tree(target, readers)])
    out = speculate(target, rows, draft, 9, seed=0, max_new_tokens=14, eos_token_id=stop)
    assert generated(out, rows) == [text[: text.index(stop) + 1] if stop in text else text for text in texts]
    assert len({len(text) for text in generated(out, rows)}) > 1 and out[CACHE] is not None
    for reader in readers:
        check(reader, target)


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("inside", ["mixture", "feature", "heads", "horizontal"])
def test_inside_a_cascade_the_pass_is_the_middle_models(inside, batch):
    """The middle model's tokens may be rejected by the target: what was kept of them is forgotten."""
    target, rows, readers = tiny_llama(3), BATCHES[batch], []
    middle = perturbed(target, 0.15)
    made = {"mixture": lambda: MixtureDraft([feature(middle, readers), medusa(middle, readers), "recycling"]),
            "feature": lambda: feature(middle, readers), "heads": lambda: block(middle, readers),
            "horizontal": lambda: HorizontalCascadeDraft(medusa(middle, readers), feature(middle, readers))}[inside]()
    out = speculate(target, rows, CascadeDraft(middle, made, tokens=6), 6, seed=0, max_new_tokens=24)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=24)
    assert sum(len(reader.log) for reader in readers) > 5 and 0 < out.speculation.accepted < out.speculation.proposed
    for reader in readers:
        check(reader, middle, forgets=True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in middle.modules())


@pytest.mark.parametrize("kind", [feature, medusa])
def test_a_reader_of_another_models_states_is_refused(kind):
    target, middle = tiny_llama(3), perturbed(tiny_llama(3), 0.1)
    for draft in (kind(middle, []), CascadeDraft(middle, kind(target, []))):
        with pytest.raises(ValueError, match="another model than the one that it drafts for"):
            speculate(target, BATCHES["alone"], draft, 4)
    assert not any(module._forward_hooks or module._forward_pre_hooks for model in (target, middle) for module in model.modules())


class Told:
    """Keeps the verdict that it is given."""

    reads_pass = False

    def commit(self, verdict):
        self.verdict = verdict


@pytest.mark.parametrize("fetched", [False, True], ids=["on the device", "on the host already"])
def test_a_part_is_told_its_own_path_and_not_that_of_the_whole(fetched):
    whole, own = Proposal(Tree((0, 0, 1)), torch.tensor([[5, 7, 9]]), None, [3]), Proposal.chain(torch.tensor([[7, 8]]))
    verdict, told = Verdict(torch.tensor([[True, False, True, False]]), torch.tensor([3])), Told()
    if fetched:
        assert verdict.paths() == [[True, False, True, False]]
    Judged(whole, verdict).tell(told, own)
    assert told.verdict.paths() == told.verdict.on_path.tolist() == [[True, True, False]]
    assert verdict.paths() == verdict.on_path.tolist()


@pytest.mark.parametrize("tree", [(2, 2), (3, 1)], ids=str)
def test_a_tree_of_the_target_itself_is_right_in_every_round_of_a_mixture(tree):
    """Its cache holds the path that was taken of its own tree, whatever the others have proposed beside it."""
    target = tiny_llama(3)
    for rows in BATCHES.values():
        draft = MixtureDraft([SuffixAutomatonDraft(), ModelTreeDraft(target, tree)], tokens=6)
        out = speculate(target, rows, draft, 6, max_new_tokens=40)
        assert generated(out, rows) == plain(target, rows, max_new_tokens=40)
        full = [entry for entries in out.speculation.rounds[:-1] for entry in entries if entry.proposed]
        assert full and min(entry.accepted for entry in full if entry.accepted + 1 == entry.committed) >= 1
