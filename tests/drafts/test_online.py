"""A draft that learns while it serves: it gets better, it is exact meanwhile, and only its own weights change."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.drafts import EarlyExitDraft, MixtureDraft, ModelDraft, ModelTreeDraft, PromptLookupDraft, SuffixAutomatonDraft
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.online import OnlineDraft
from hf_specdec.training import build_drafter

from ..conformance import law
from ..conformance.builders import feature_drafter
from ..helpers import generated, perturbed, plain, prompts, repetitive, small_vocabulary_llama, speculate, tiny_llama

ROWS = prompts(8, 5, 6, seed=3)


def accepted(target, draft, calls: int, **options) -> list[float]:
    return [speculate(target, ROWS, draft, 4, max_new_tokens=24, **options).speculation.acceptance_rate for _ in range(calls)]


@pytest.mark.parametrize("kind", ["model", "feature"])
def test_acceptance_rises_over_calls_and_the_text_stays_the_targets(kind):
    target = tiny_llama(3)
    texts = plain(target, ROWS, max_new_tokens=24)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    inner = ModelDraft(perturbed(target, 0.5)) if kind == "model" else FeatureDraft(feature_drafter(target), target)
    draft, rates = OnlineDraft(inner, target, every=4, lr=1e-2), []
    for _ in range(14):
        out = speculate(target, ROWS, draft, 4, max_new_tokens=24)
        assert generated(out, ROWS) == texts
        rates.append(out.speculation.acceptance_rate)
    assert sum(rates[-3:]) / 3 > sum(rates[:3]) / 3 + 0.2, rates
    assert draft.steps > 10
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert not any(p.requires_grad and p.grad is not None for p in inner.model.parameters()) and not target.base_model._forward_hooks


def test_the_law_holds_while_it_learns():
    target, row = small_vocabulary_llama(2, law.VOCAB), [1, 2, 3, 1, 2]
    draft = OnlineDraft(ModelDraft(perturbed(target, 0.5)), target, every=1, lr=1e-2)
    found, traces = law.counts(target, [row], draft, 8_000, 3, 3, chunk=400)
    assert law.worst_p_value(found, [law.joint(target, row, 3)], 3) > law.THRESHOLD
    assert draft.steps > 30 and all(trace.lossless for trace in traces)
    assert traces[-1].acceptance_rate > traces[0].acceptance_rate + 0.1


@torch.no_grad()
def test_what_is_kept_is_the_targets_law_where_a_token_was_rejected():
    target = tiny_llama(3)
    draft = OnlineDraft(ModelDraft(perturbed(target, 0.3)), target, every=10**6, top=5)
    out = speculate(target, ROWS, draft, 4, max_new_tokens=24)
    lessons = {tuple(lesson.tokens): lesson for lesson in draft.lessons}
    assert len(lessons) == len(ROWS) and draft.steps == 0
    for row, text in zip(ROWS, generated(out, ROWS)):
        whole = row + text
        lesson = next(lesson for tokens, lesson in lessons.items() if list(tokens) == whole[: len(tokens)])
        expected = target(input_ids=torch.tensor([whole])).logits[0].softmax(-1)
        for place, ids, probs in zip(lesson.places, lesson.ids, lesson.probs):
            assert place >= len(row) - 1
            torch.testing.assert_close(probs, expected[place, ids], atol=1e-5, rtol=1e-3)
            assert int(ids[0]) == whole[place + 1] if place + 1 < len(whole) else True


def test_a_feature_drafters_step_reads_the_states_that_it_drafts_from():
    target, steps = tiny_llama(3), []
    draft = OnlineDraft(FeatureDraft(feature_drafter(target), target), target, every=10**6, window=6)
    speculate(target, ROWS, draft, 4, max_new_tokens=24)
    for lesson in list(draft.lessons):
        assert len(lesson.tokens) == len(lesson.states) <= 6
        draft.lessons.clear()
        draft.lessons.append(lesson)
        steps.append(draft.learn())
    assert len(steps) == 3 and all(loss > 0 for loss in steps) and draft.learn() is None


def test_the_state_is_restored_and_goes_on_alike(tmp_path):
    target, made = tiny_llama(3), []
    for _ in range(2):
        draft = OnlineDraft(ModelDraft(perturbed(target, 0.5)), target, every=4, lr=1e-2)
        if made:
            draft.restore(tmp_path / "state.safetensors")
        else:
            accepted(target, draft, 3)
            draft.lessons.clear()
            draft.rounds = 0
            draft.save(tmp_path / "state.safetensors")
        accepted(target, draft, 2)
        made.append(draft)
    one, two = (draft.model.state_dict() for draft in made)
    assert made[0].steps == made[1].steps and all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    other = OnlineDraft(ModelDraft(tiny_llama(1, num_hidden_layers=1)), target)
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(ValueError, match="not the state of an OnlineDraft"):
        other.restore(tmp_path / "state.safetensors")
    (tmp_path / "half.safetensors").write_bytes((tmp_path / "state.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged"):
        other.restore(tmp_path / "half.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.model.state_dict().items())


def test_an_interrupt_while_new_weights_go_in_leaves_all_of_them_in(monkeypatch):
    target = tiny_llama(3)
    draft = OnlineDraft(ModelDraft(perturbed(target, 0.5)), target, every=2, lr=1e-2)
    copy, calls = draft._copy, []

    def interrupted():
        calls.append(1)
        if len(calls) == 1:
            next(iter(draft.own.values())).data.fill_(7.0)
            raise KeyboardInterrupt
        copy()

    monkeypatch.setattr(draft, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        accepted(target, draft, 4)
    assert draft.steps == 1 and not draft.texts
    for p, (_, _, weight) in zip(draft.own.values(), draft.moments):
        assert torch.equal(p.data, weight)
    assert generated(speculate(target, ROWS, draft, 4), ROWS) == plain(target, ROWS)


def test_a_drafter_of_the_targets_parts_learns_its_own_layers_only():
    target = tiny_llama(3)
    draft = OnlineDraft(ModelDraft(build_drafter(target, [1], torch.arange(0, 61, 2))), target, every=2, lr=1e-2)
    shared = [target.get_input_embeddings().weight, target.lm_head.weight, *draft.model.get_output_embeddings().parameters()]
    before = [p.detach().clone() for p in shared]
    assert accepted(target, draft, 4) and draft.steps > 2
    assert all(torch.equal(p, old) for p, old in zip(shared, before))


def test_it_stops_where_its_draft_stops():
    target = tiny_llama(3)
    text = plain(target, ROWS, max_new_tokens=24)
    outs = [speculate(target, ROWS, OnlineDraft(ModelDraft(perturbed(target, 0.3)), target), 8, max_new_tokens=24, speculative={"draft_stop": kind})
            for kind in ("constant", "confidence")]
    assert all(generated(out, ROWS) == text for out in outs)
    assert outs[1].speculation.proposed < outs[0].speculation.proposed


class Told(ModelTreeDraft):
    """Notes how long the path is that it is told of."""

    def commit(self, verdict):
        self.paths += [len(path) for path in verdict.paths()]
        super().commit(verdict)


@pytest.mark.parametrize("alone", [True, False])
def test_its_draft_is_told_of_its_own_proposal_wherever_it_stands(alone):
    target, rows = tiny_llama(3), repetitive(12)
    inner = Told(perturbed(target, 0.1), (2, 1))
    inner.paths = []
    draft = OnlineDraft(inner, target, every=10**6)
    out = speculate(target, rows, draft if alone else MixtureDraft([SuffixAutomatonDraft(), draft]), 6, max_new_tokens=24)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=24)
    assert inner.paths and set(inner.paths) <= {1, 3, 5}


def test_what_cannot_learn_is_refused():
    target = tiny_llama(3)
    for draft, message in ((PromptLookupDraft(), "no model of its own"), (ModelDraft(target), "no model of its own"),
                           (EarlyExitDraft(target, 1), "the target's own")):
        with pytest.raises(ValueError, match=message):
            OnlineDraft(draft, target)
    packed = perturbed(target)
    from hf_specdec import mx

    with pytest.raises(ValueError, match="MX format"):
        OnlineDraft(ModelDraft(mx.compress(packed, "mxint8")), target)
    for name, value in (("every", 0), ("lr", 2.0), ("rows", True), ("top", 0)):
        with pytest.raises(ValueError, match=f"^{name}="):
            OnlineDraft(ModelDraft(perturbed(target)), target, **{name: value})
