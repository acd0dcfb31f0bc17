"""Chains that end before K: behind a token that the draft itself is not sure of, or, by the confidence head of DSpark, before one that is not drawn yet."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_specdec.draft_stop import Calibration, DraftStop, StopRule
from hf_specdec.drafts import DFlashDraft
from hf_specdec.drafts.layout import Confidence, Layout, Markov
from hf_specdec.training import load_drafter
from tests.conformance import law
from tests.conformance.builders import masked_places

from .dflash_checkpoints import BLOCK, SPARKS, TWO, block, checkpoint, first_place, trusted, write
from ..helpers import FULL, Logged, generated, plain, repetitive, small_vocabulary_llama, speculate, tiny_llama

pytestmark = pytest.mark.skipif("muse_glimmer_assistant" not in CONFIG_MAPPING, reason="this version of transformers has no assistant of the kind")
ROWS = [*repetitive(13), *repetitive(7, seed=4)]
STOP = {"draft_stop": "confidence", "draft_confidence": 0.35}
sampled_too = pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])


class BlockLog(Logged, DFlashDraft):
    """Also writes down what the confidence head says, per round, place and row."""

    def propose(self, context, k):
        self.told = [*getattr(self, "told", []), []]
        return super().propose(context, k)

    def _foretold(self, step, tokens):
        self.told[-1].append(super()._foretold(step, tokens))
        return self.told[-1][-1]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(3, num_hidden_layers=4)


def loaded(target, folder, config, more=None) -> DFlashDraft:
    draft = load_drafter(write(folder, config, checkpoint(config) | (more or {})), target)
    return BlockLog(draft.model, layout=draft.layout)


@sampled_too
def test_a_chain_ends_behind_a_token_that_is_not_sure(target, tmp_path, sampled):
    """What made it end is judged, too; a tree does not end by that."""
    draft = loaded(target, tmp_path, TWO)
    out = speculate(target, ROWS, draft, BLOCK - 1, max_new_tokens=16, seed=3, speculative=STOP, **sampled)
    sizes = [size for _, proposal in draft.log for size in proposal.sizes if size]
    assert draft.layout.confidence is None and min(sizes) == 1 and len(set(sizes)) > 1
    if not sampled:
        assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=16)
    with pytest.raises(ValueError, match="draft_stop='confidence': the draft 'dflash' does not draft token by token"):
        speculate(target, ROWS, DFlashDraft(draft.model, tree=(2, 2), layout=draft.layout), 4, max_new_tokens=4, speculative={"draft_stop": "confidence"})


@pytest.mark.parametrize("config", SPARKS.values(), ids=SPARKS)
@sampled_too
def test_a_chain_ends_where_the_product_of_confidences_falls_below_the_threshold(target, tmp_path, monkeypatch, config, sampled):
    """The confidences are those of the originals' formula, written down beside the checkpoints; the first token is drafted in any case."""
    monkeypatch.setattr(Calibration, "__call__", lambda self, confidence: confidence)
    tensors, sizes = checkpoint(config) | {"confidence_head.proj.bias": torch.ones(1)}, []
    draft = loaded(target, tmp_path, config, tensors)
    out = speculate(target, ROWS, draft, BLOCK, max_new_tokens=16, seed=3, speculative=STOP, **sampled)
    for (committed, proposal), told, k in zip(draft.log, draft.told, draft.k, strict=True):
        for b, row in enumerate(committed):
            size, most = proposal.sizes[b], min(k[b], BLOCK - first_place(config))
            if not size:
                continue
            wanted = trusted(config, tensors, block(target, config, tensors, row)[0], row[-1], proposal.listed()[b][:size])[: min(size + 1, most)]
            assert [values[b] for values in told[: len(wanted)]] == pytest.approx(wanted, abs=1e-4)
            goes_on = [product >= STOP["draft_confidence"] for product in torch.tensor(wanted).cumprod(0).tolist()]
            assert all(goes_on[1:size]) and (size == most or not goes_on[size])
            sizes.append(size)
    assert min(sizes) == 1 and len(set(sizes)) > 1
    if not sampled:
        assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=16)


@pytest.mark.parametrize("kind", ["confidence", "expected_gain"])
@pytest.mark.parametrize("k", [1, 5, "auto"])
def test_greedy_text_is_that_of_plain_generate(target, tmp_path, kind, k):
    draft = loaded(target, tmp_path, SPARKS["DSpark, rnn"], {"confidence_head.proj.bias": torch.ones(1)})
    out = speculate(target, ROWS, draft, k, max_new_tokens=30, speculative={**STOP, "draft_stop": kind})
    assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=30) and out.speculation.lossless and out.speculation.drafted


@pytest.mark.parametrize("name, changed", [("as speculators first wrote it", {"confidence_head.proj.": "confidence_head."}),
                                           ("as SpecForge first wrote it", {"confidence_head.": "logit_head.confidence_head.", "markov_head.": "logit_head.markov_head."})])
def test_other_names_of_its_tensors(target, tmp_path, name, changed):
    config, tensors = SPARKS["DSpark, gated"], checkpoint(SPARKS["DSpark, gated"])
    known = loaded(target, tmp_path / "known", config)
    for old, new in changed.items():
        tensors = {key.replace(old, new) if key.startswith(old) else key: tensor for key, tensor in tensors.items()}
    other = load_drafter(write(tmp_path / "other", config, tensors), target)
    hidden, before = torch.randn(3, 32), torch.tensor([5, 1, 60])
    torch.testing.assert_close(other.layout.confidence(hidden, before), known.layout.confidence(hidden, before))
    torch.testing.assert_close(other.layout.selector.markov_w2.weight, known.layout.selector.markov_w2.weight)


def test_a_head_of_another_width_is_refused(target, tmp_path):
    with pytest.raises(ValueError, match=r"proj.weight has shape \[1, 33\]"):
        loaded(target, tmp_path, SPARKS["DSpark, rnn"], {"confidence_head.proj.weight": torch.zeros(1, 33)})


def test_a_drafter_whose_states_overflow_is_no_error(target, tmp_path):
    draft = loaded(target, tmp_path, SPARKS["DSpark, gated"])
    draft.model.norm.weight.fill_(torch.nan)
    assert generated(speculate(target, ROWS, draft, 4, speculative=STOP), ROWS) == plain(target, ROWS)


# --- the rule and the law -------------------------------------------------------------------------------------------------------


def sure(target, bias: float = 0.5) -> DFlashDraft:
    """Of random weights, with a confidence that depends much on the token before."""
    config = target.config.get_text_config()
    torch.manual_seed(9)
    markov = Markov(config.vocab_size, config.hidden_size, 5, "gated").requires_grad_(False)
    confidence = Confidence(config.hidden_size, markov).requires_grad_(False)
    confidence.proj.weight[:, config.hidden_size :] *= 8
    confidence.proj.bias += bias
    return DFlashDraft(masked_places(target), layout=Layout(selector=markov, first=0, confidence=confidence))


@pytest.mark.share(1 / 6)
@pytest.mark.parametrize("acceptance", ["speculative_sampling", "block"])
@pytest.mark.parametrize("kind", ["confidence", "expected_gain"])
def test_sampled_text_follows_the_targets_law(kind, acceptance):
    target, rows = small_vocabulary_llama(2, law.VOCAB), [[1, 2, 3, 1, 2], [4, 3]]
    found, traces = law.counts(target, rows, sure(target), 50_000 if FULL else 1_200, 3, 4, acceptance=acceptance, speculative={**STOP, "draft_stop": kind})
    assert law.worst_p_value(found, [law.joint(target, row, 3) for row in rows], 3) > law.THRESHOLD
    assert len({entry.proposed for trace in traces for entries in trace.rounds for entry in entries}) > 2


class Peeking(DFlashDraft):
    """Leaves out a token by what is drawn, which is not allowed."""

    def propose(self, context, k):
        proposal = super().propose(context, k)
        sizes = [max(size - 1, 0) if size and tokens[size - 1] % 2 else size for size, tokens in zip(proposal.sizes, proposal.listed())]
        return type(proposal)(proposal.tree, proposal.tokens, proposal.probs, sizes, proposal.source)


@pytest.mark.share(0)
def test_a_draft_that_decides_by_the_token_it_leaves_out_is_rejected_by_the_same_test():
    target, row = small_vocabulary_llama(2, law.VOCAB), [1, 2, 3, 1, 2]
    good = sure(target)
    found, _ = law.counts(target, [row], Peeking(good.model, layout=good.layout), 12_000, 3, 4, speculative=STOP)
    assert law.worst_p_value(found, [law.joint(target, row, 3)], 3) < law.THRESHOLD


def test_a_token_of_which_too_little_is_expected_is_left_out():
    stop = StopRule("confidence", 0.5, 0.0).start(2)
    stop.begin()
    assert stop.foretold([4, 4], 0, [0.15, 0.95]) == [4, 4]  # the first is drafted in any case
    assert stop.foretold([4, 4], 1, [0.95, 0.85]) == [1, 4]
    assert stop.foretold([1, 4], 2, [0.95, 0.55]) == [1, 2]
    assert stop.round == [[0.15], [0.95, 0.85]]  # those that were drafted, which alone are learnt from


@pytest.mark.parametrize(("cost", "steps"), [(0.0, 4), (0.2, 2), (1.0, 1)])
def test_another_token_is_drafted_while_its_own_chance_pays(cost, steps):
    stop = DraftStop(StopRule("expected_gain", 0.4, cost), 1)
    k, step = [4], 0
    while step < 4:
        k = stop.foretold(k, step, [[0.95, 0.95, 0.15, 0.15][step]])
        step += 1
    assert k == [steps]
