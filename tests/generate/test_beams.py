"""Speculative beam search equals transformers' own: sequences, scores, beam indices, whatever the draft."""

import random

import pytest
import torch

from hf_specdec.compat import CACHE
from hf_specdec.drafts import ModelDraft, ModelTreeDraft, PromptLookupDraft, RecyclingDraft, SuffixAutomatonDraft, UniformDraft
from hf_specdec.tree_shapes import DynamicTree

from ..architectures import FAMILIES
from ..helpers import VOCAB, assert_unchanged, build, contrary, enabled, padded, perturbed, prompts, repetitive, small_vocabulary_llama, snapshot, tiny_llama

MODEL = enabled(tiny_llama())
NEAR = perturbed(MODEL, 0.1)
DRAFTS = {
    "lookup": lambda: None,
    "automaton": SuffixAutomatonDraft,
    "automaton tree": lambda: SuffixAutomatonDraft(branches=3),
    "recycling": RecyclingDraft,
    "recycling tree": lambda: RecyclingDraft(branches=3),
    "model": lambda: NEAR,
    "contrary model": lambda: contrary(MODEL),
    "tree": lambda: ModelTreeDraft(NEAR, (3, 2, 1)),
    "dynamic tree": lambda: ModelTreeDraft(NEAR, DynamicTree(nodes=8)),
}


def both(rows, draft=None, k=4, model=MODEL, **options):
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "num_beams": 3, "return_dict_in_generate": True, "output_scores": True, **options}
    plain = model.generate(**padded(rows), **options)
    return plain, model.generate(**padded(rows), **options, speculative=True, assistant_model=draft, num_assistant_tokens=k)


def assert_equal(plain, ours):
    assert torch.equal(plain.sequences, ours.sequences)
    torch.testing.assert_close(plain.sequences_scores, ours.sequences_scores, atol=1e-5, rtol=1e-5)
    assert torch.equal(plain.beam_indices, ours.beam_indices) and len(plain.scores) == len(ours.scores)


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("rows", [repetitive(17), repetitive(16, 9, 4)], ids=["one row", "ragged"])
def test_every_draft_gives_the_beams_of_plain_search(name, rows):
    for k in (1, 4):
        assert_equal(*both(rows, DRAFTS[name](), k))


@pytest.mark.parametrize("name", ["BLOOM", "MPT", "GPT-Neo (local layers)", "TrOCR"])
def test_models_that_make_their_own_masks_search_in_the_same_beams(name):
    model = enabled(next(family for family in FAMILIES if family.name == name).model("eager"))
    rows = repetitive(12, 12) if name == "TrOCR" else repetitive(16, 9, 4)  # TrOCR takes padding for text where it counts positions
    for draft in (None, ModelDraft(perturbed(model, 0.02))):
        assert_equal(*both(rows, draft, 4, model))


def settings(rng: random.Random) -> dict:
    """One of many ways to call beam search."""
    beams = rng.choice((2, 3, 4, 6))
    options = {"num_beams": beams, "num_return_sequences": rng.choice((1, beams)), "length_penalty": rng.choice((0.0, 1.0, 2.0, -1.0)),
               "early_stopping": rng.choice((False, True, "never")), "max_new_tokens": rng.choice((1, 2, 9, 16))}
    if rng.random() < 0.6:
        options["eos_token_id"] = rng.sample(range(1, VOCAB), rng.choice((1, 3, 9)))
    if rng.random() < 0.6:
        options |= rng.choice(({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 5}, {"bad_words_ids": [[5], [6, 7]]}))
    return options


@pytest.mark.parametrize("seed", range(24))
def test_every_setting_of_beam_search_is_obeyed(seed):
    rng = random.Random(seed)
    rows = repetitive(*rng.choice(((12,), (7, 15), (3,))), seed=seed)
    assert_equal(*both(rows, DRAFTS[rng.choice(list(DRAFTS))](), rng.choice((1, 3, 7, "auto")), **settings(rng)))


def test_what_was_guessed_costs_no_pass():
    """A draft that proposes every token of a vocabulary of 7, two levels deep: three steps a pass."""
    model = enabled(small_vocabulary_llama())
    draft = ModelTreeDraft(perturbed(model), (7, 7))
    plain, ours = both(prompts(9, vocab=7), draft, 2, model, max_new_tokens=12, num_beams=3)
    assert_equal(plain, ours)
    trace = ours.speculation
    assert len(trace.rounds) == 4 and trace.block_efficiency == 3.0 and trace.target_calls <= 5
    assert trace.accepted == 8 and trace.lossless


def test_a_target_of_its_own_draft_needs_fewer_passes_than_steps():
    model = enabled(tiny_llama(spread=0.6))
    plain, ours = both(prompts(9), ModelTreeDraft(model, (6, 3)), 2, model, max_new_tokens=16)
    assert_equal(plain, ours)
    assert ours.speculation.target_calls < 13 and ours.speculation.block_efficiency > 1.3


def test_the_seconds_of_a_search_are_those_of_any_call():
    trace = both(prompts(9), NEAR, 2)[1].speculation
    assert len(trace.round_seconds) == len(trace.rounds) > 1 and 0 < trace.seconds["forward"] <= sum(map(sum, trace.round_seconds[1:]))
    assert trace.seconds["prompt"] == pytest.approx(sum(trace.round_seconds[0]))


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "gemma2"])
def test_other_families(kind):
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                 sliding_window=6)
    attention = "eager" if kind == "gemma2" else "sdpa"
    model = enabled(build(kind, attn=attention, **({"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4} if kind == "gpt2" else sizes)))
    for draft in (None, ModelTreeDraft(perturbed(model, 0.1), (3, 2))):
        assert_equal(*both(repetitive(13, 6), draft, 4, model))


def test_plain_ids_models_and_settings_are_as_they_were():
    draft = perturbed(MODEL, 0.1)
    before, of_draft = snapshot(MODEL), snapshot(draft)
    options = dict(max_new_tokens=9, do_sample=False, pad_token_id=0, num_beams=3)
    ours = MODEL.generate(**padded(prompts(8)), **options, speculative=True, assistant_model=draft)
    assert torch.equal(ours, MODEL.generate(**padded(prompts(8)), **options))
    assert_unchanged(MODEL, before)
    assert_unchanged(draft, of_draft)


@pytest.mark.parametrize("options", [{}, dict(do_sample=True, temperature=1.4), dict(eos_token_id=list(range(1, 20)), num_return_sequences=3)], ids=["plain", "sampled", "several"])
@pytest.mark.parametrize("asked", [(), ("output_scores",), ("output_logits",), ("output_scores", "output_logits")], ids=lambda asked: " and ".join(asked) or "neither")
def test_scores_and_logits_are_those_of_plain_search(asked, options):
    options = {**options, **{name: name in asked for name in ("output_scores", "output_logits")}}
    plain, ours = both(repetitive(16, 9), ModelTreeDraft(NEAR, (3, 2)), model=_seeded(), **options)
    assert [name for name in plain.keys() if name != CACHE] == list(ours.keys()) and torch.equal(plain.sequences, ours.sequences)
    for name in ("scores", "logits"):
        theirs, mine = getattr(plain, name), getattr(ours, name)
        assert (theirs is None) == (mine is None) == (f"output_{name}" not in asked)
        for one, other in zip(theirs or (), mine or (), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    if "output_scores" in asked:
        steps = [MODEL.compute_transition_scores(out.sequences, out.scores, out.beam_indices) for out in (plain, ours)]
        torch.testing.assert_close(*steps, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(plain.sequences_scores, ours.sequences_scores, atol=1e-4, rtol=1e-4)


def test_stopping_criteria_see_every_candidate():
    def stop(ids, scores, **kwargs):
        return ids[:, -1] % 5 == 0

    assert_equal(*both(repetitive(11), ModelTreeDraft(NEAR, (3, 2)), 2, stopping_criteria=[stop], max_new_tokens=20))


@pytest.mark.parametrize(("options", "words"), [
    (dict(speculative={"lenience": 0.5}), "lenience=1.0"),
    (dict(speculative={"acceptance": "typical"}), "typical"),
    (dict(speculative={"compile": True}), "compile=True"),
    (dict(speculative={"record_probs": True}), "record_probs=True"),
    (dict(assistant_model=UniformDraft()), "'uniform' does not follow beams"),
])
def test_what_is_no_plain_beam_search_is_refused_by_name(options, words):
    options = {"speculative": True, "num_beams": 3, "max_new_tokens": 4, **options}
    with pytest.raises(ValueError, match=f"num_beams=3.*{words}"):
        MODEL.generate(**padded(prompts(6)), **options)


def test_a_cache_of_the_caller_is_refused():
    from transformers import DynamicCache

    with pytest.raises(ValueError, match=f"num_beams=2.*{CACHE}"):
        MODEL.generate(**padded(prompts(6)), num_beams=2, max_new_tokens=4, speculative=True, **{CACHE: DynamicCache()})


def test_ctrl_c_leaves_the_draft_ready_for_the_next_call():
    draft = PromptLookupDraft()

    def interrupt(ids, scores, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        both(repetitive(11), draft, stopping_criteria=[interrupt], max_new_tokens=5, model=_without_plain())
    assert draft.indices == []
    assert_equal(*both(repetitive(11), draft))


def _seeded():
    """The model, whose every call begins with the same draws."""
    class Same:
        def generate(self, *args, **kwargs):
            torch.manual_seed(4)
            return MODEL.generate(*args, **kwargs)

    return Same()


def _without_plain():
    class Ours:
        def generate(self, *args, **kwargs):
            return MODEL.generate(*args, **kwargs) if "speculative" in kwargs else None

    return Ours()
