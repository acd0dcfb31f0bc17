"""Look-ahead embeddings as a draft: what they see, and that the target keeps nothing of them. Exactness is the conformance battery's."""

from __future__ import annotations

import pytest
import torch

import hf_specdec
from hf_specdec.compat import CACHE
from hf_specdec.drafts.pass_draft import PassDraft

from .. import encoder_decoders
from ..architectures import FAMILIES
from ..conformance.builders import look_ahead
from ..helpers import Logged, assert_unchanged, generated, plain, repetitive, snapshot, speculate, tiny_llama


class Watched(Logged, PassDraft):
    pass


@torch.no_grad()
def expected(target, heads, row, n) -> torch.Tensor:
    """Laws [n, V] from a forward of its own."""
    inputs = torch.cat([target.get_input_embeddings()(torch.tensor(row)), heads.embeddings[: n - 1]])
    return target(inputs_embeds=inputs[None]).logits[0, len(row) - 1 :].softmax(-1)


@pytest.mark.parametrize("rows", [[[5, 6, 7, 8]], [[5, 6, 7, 8, 9, 10], [11, 12, 13], [3, 4]]], ids=["one", "ragged"])
def test_every_round_draws_from_what_the_target_says_behind_its_text(rows):
    target = tiny_llama(3)
    before, heads = snapshot(target), look_ahead(target)
    draft, checked = Watched(heads, target), 0
    out = speculate(target, rows, draft, 4, do_sample=True, seed=3, top_k=0, max_new_tokens=16)
    for committed, proposal in draft.log[1:]:
        for b, row in enumerate(committed):
            n = proposal.sizes[b]
            if n:
                torch.testing.assert_close(proposal.probs[b, :n], expected(target, heads, row, n), atol=1e-5, rtol=1e-4)
                checked += n
    assert checked > 10 and not target.base_model._forward_pre_hooks
    first = [entry.accepted > 0 for entries in out.speculation.rounds[1:] for entry in entries if entry.proposed]
    assert all(first) and out.speculation.draft_calls == sum(bool(len(proposal.tree)) for _, proposal in draft.log)
    hf_specdec.disable(target)
    assert_unchanged(target, before)


def test_the_cache_handed_back_is_that_of_plain_generate():
    target, row = tiny_llama(3), [5, 6, 7, 8]
    out = speculate(target, [row], PassDraft(look_ahead(target), target), 4)
    ids = out.sequences[:, :-1]
    reference = target(input_ids=ids, use_cache=True)[CACHE]
    for own, other in zip(out[CACHE].layers, reference.layers):
        torch.testing.assert_close(own.keys, other.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own.values, other.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in ("GPT-2", "Gemma 3 (text)", "Llama 4 (text, chunked)")],
                         ids=lambda family: family.name)
def test_families_with_other_positions_and_masks(family):
    target, rows = family.model("eager"), repetitive(13)
    out = speculate(target, rows, PassDraft(look_ahead(target), target), 4, max_new_tokens=10)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=10)
    assert out.speculation.accepted >= 4  # the target's own first token, every round


def test_an_interrupt_inside_the_drafts_pass_leaves_no_hook():
    target = tiny_llama(3)
    draft = PassDraft(look_ahead(target), target)

    def interrupted(*args):
        raise KeyboardInterrupt

    layer, calls = target.model.layers[1], []
    hook = layer.register_forward_pre_hook(lambda module, args: calls.append(1) or (interrupted() if len(calls) == 4 else None))
    with pytest.raises(KeyboardInterrupt):
        speculate(target, [[5, 6, 7]], draft, 4)
    hook.remove()
    assert not target.base_model._forward_pre_hooks and draft.context is None
    assert generated(speculate(target, [[5, 6, 7]], draft, 4), [[5, 6, 7]]) == plain(target, [[5, 6, 7]])


@pytest.mark.parametrize("name", ["Gemma 4", "Gemma 4 (text)"])
def test_a_target_that_looks_embeddings_up_is_refused(name):
    """Gemma 4 finds out which tokens they are of, and fails in the midst of a call on those of none."""
    family = next((line for line in FAMILIES if line.name == name), None)
    if family is None:
        pytest.skip("this transformers has no Gemma 4")
    target = family.model()
    with pytest.raises(ValueError, match="target: Gemma4For.* look-ahead embeddings are those of no token. Pass another draft"):
        PassDraft(look_ahead(target), target)


def test_what_are_no_embeddings_and_targets_with_an_encoder_are_refused():
    target = tiny_llama(3)
    with pytest.raises(ValueError, match="not LookAhead"):
        PassDraft(target, target)
    with pytest.raises(ValueError, match="encoder-decoder"):
        PassDraft(look_ahead(target), encoder_decoders.family("T5").model("eager", 0))
