"""The target's own layers as the draft: nothing is copied, the cache is the target's, and the target is left as it was."""

import pytest
import torch

from hf_specdec.drafts import EarlyExitDraft, MixtureDraft, ModelDraft, PromptLookupDraft
from hf_specdec.drafts.early_exit import search, some_layers
from tests.architectures import FAMILIES
from tests.helpers import assert_unchanged, build, generated, plain, prompts, repetitive, snapshot, speculate, tiny_llama


def deep(seed: int = 3):
    return tiny_llama(seed, num_hidden_layers=4)


def test_all_layers_are_the_target_and_none_is_copied():
    target = deep()
    before, view = snapshot(target), some_layers(target, 4)
    ids = torch.tensor(repetitive(12))
    assert torch.equal(view(input_ids=ids, use_cache=False).logits, target(input_ids=ids).logits)
    fewer = some_layers(target, [0, 2])
    owned = {id(p) for p in target.parameters()}
    assert all(id(p) in owned for p in fewer.parameters()) and len(list(fewer.parameters())) < len(list(target.parameters()))
    assert not torch.equal(fewer(input_ids=ids, use_cache=False).logits, target(input_ids=ids).logits)
    assert target.config.num_hidden_layers == 4 and len(target.model.layers) == 4
    assert_unchanged(target, before)


def test_leaving_after_the_first_layers_is_what_transformers_computes_there():
    target, ids = deep(), torch.tensor(repetitive(12))
    hidden = target.model(input_ids=ids, output_hidden_states=True).hidden_states[2]
    expected = target.lm_head(target.model.norm(hidden))
    assert torch.allclose(some_layers(target, 2)(input_ids=ids, use_cache=False).logits, expected, atol=1e-5)


@pytest.mark.parametrize("rows", [repetitive(12), repetitive(12) + prompts(3, 7, seed=6)], ids=["alone", "ragged"])
def test_the_targets_keys_and_values_are_those_the_first_layers_would_make(rows):
    """With the cache shared or one of its own, the first layers propose the same."""
    target, proposed = deep(), []
    for share in (True, False):
        draft = EarlyExitDraft(target, 2)
        if not share:
            draft.whole = None
        seen, propose = {}, draft.propose

        def watched(context, k, propose=propose, seen=seen):
            proposal = propose(context, k)
            seen.update({tuple(row): tokens[:n] for row, tokens, n in zip(context.rows, proposal.tokens.tolist(), proposal.sizes) if n})
            return proposal

        draft.propose = watched
        out = speculate(target, rows, draft, 3)
        assert generated(out, rows) == plain(target, rows)
        proposed.append(seen)
    common = proposed[0].keys() & proposed[1].keys()
    assert len(common) > 5
    for row in common:
        n = min(len(found[row]) for found in proposed)
        assert proposed[0][row][:n] == proposed[1][row][:n]


def test_the_draft_runs_no_prompt_pass_and_owns_no_cache():
    target = deep()
    draft = EarlyExitDraft(target, 2)
    widths = []
    forward = draft.model.forward
    draft.model.forward = lambda **inputs: (widths.append(inputs["input_ids"].shape[1]), forward(**inputs))[1]
    speculate(target, repetitive(12), draft, 3)
    assert set(widths) == {1} and draft.calls == len(widths)
    assert not draft.cached.cache.layers


@pytest.mark.parametrize("layers", [3, [0, 2, 3], [1, 3], 1, 4])
def test_any_subset_gives_plain_generates_text(layers):
    target, rows = deep(), repetitive(12) + prompts(5, seed=4)
    out = speculate(target, rows, EarlyExitDraft(target, layers), 4)
    assert generated(out, rows) == plain(target, rows)
    if layers == 4:
        assert out.speculation.acceptance_rate == 1.0


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in
                                    ("GPT-2", "Gemma 2", "OPT", "GPT-NeoX", "Llama 4 (text, chunked)")], ids=lambda family: family.name)
def test_families_whose_layers_have_other_names_or_kinds(family):
    target, rows = family.model("eager"), repetitive(13)
    out = speculate(target, rows, EarlyExitDraft(target, 1), 3, max_new_tokens=8)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=8)


@pytest.mark.parametrize("layers", [0, 5, [], [0, 0], [2, 1], [4], [0.5], True, 1.0, None, torch.tensor([0, 1])])
def test_layers_out_of_range_are_named(layers):
    with pytest.raises(ValueError, match="layers="):
        EarlyExitDraft(deep(), layers)


@pytest.mark.parametrize("name", ["hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_layers_that_need_the_others_are_refused_by_what_binds_them(name):
    settings = dict(vocab_size=61, vocab_size_per_layer_input=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=8, layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=0,
                    num_kv_shared_layers=0)
    with pytest.raises(ValueError, match=f"target: Gemma4ForCausalLM has {name}=2.*another draft"):
        EarlyExitDraft(build("gemma4_text", **{**settings, name: 2}), 1)


def test_what_is_wrong_with_the_draft_is_said_though_it_never_started():
    masked = next((family for family in FAMILIES if family.kind == "roformer"), None)
    if masked is None:
        pytest.skip("transformers has no RoFormer that generates from its cache")
    masked = masked.model("eager")
    draft = EarlyExitDraft(masked, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="assistant_model: RoFormerForCausalLM gives a row other logits in a ragged batch"):
            speculate(deep(), repetitive(12) + prompts(5, seed=4), draft)
    assert generated(speculate(masked, repetitive(12), draft), repetitive(12)) == plain(masked, repetitive(12))


@pytest.mark.parametrize("inside", [False, True])
def test_a_draft_of_a_target_that_was_resized_since_is_to_be_made_anew(inside):
    target, rows = deep(), repetitive(12)

    def draft():
        early = EarlyExitDraft(target, 2)
        return MixtureDraft([PromptLookupDraft(), early]) if inside else early

    old = draft()
    target.resize_token_embeddings(2 * target.config.vocab_size)
    with pytest.raises(ValueError, match="EarlyExitDraft was made when its model had 61 tokens, and it has been resized to 122 since. Make the draft anew"):
        speculate(target, rows, old, 3)
    assert generated(speculate(target, rows, draft(), 3), rows) == plain(target, rows)


def test_search_leaves_out_the_layer_that_does_nothing():
    target = deep()
    with torch.no_grad():
        for name in ("o_proj", "down_proj"):
            part = target.model.layers[2].self_attn if name == "o_proj" else target.model.layers[2].mlp
            getattr(part, name).weight.zero_()
    found = search(target, [row + text for row, text in zip(repetitive(12), plain(target, repetitive(12)))], patience=2)
    assert 2 not in found.layers and found.agreement > 0 and 0 < found.cost <= 1
    assert search(target, repetitive(12), patience=1).speedup >= 4 / 5  # that of all layers at K = 1 at least
    out = speculate(target, repetitive(12), EarlyExitDraft(target, list(found.layers)), found.k)
    assert generated(out, repetitive(12)) == plain(target, repetitive(12))


def test_search_needs_texts():
    with pytest.raises(ValueError, match="texts"):
        search(deep(), [])


def test_a_model_that_is_not_the_target_may_lend_its_layers():
    target, other = tiny_llama(3), build("llama", 3, **{"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
                                                        "num_attention_heads": 2, "num_key_value_heads": 1})
    rows = repetitive(12)
    assert generated(speculate(target, rows, EarlyExitDraft(other, 1), 4), rows) == plain(target, rows)
    assert isinstance(EarlyExitDraft(other, 1), ModelDraft)
