"""Prompts that are embeddings (inputs_embeds): plain generate's text, whatever is drafted."""

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_specdec
from hf_specdec.compat import CACHE
from hf_specdec.drafts import EarlyExitDraft, MixtureDraft, ModelDraft, ModelTreeDraft, NGramRecyclingDraft, SuffixAutomatonDraft
from tests import architectures
from tests.helpers import FULL, enabled, padded, perturbed, prompts, repetitive, tiny_llama

ROWS = repetitive(14) + prompts(5, 9, seed=2)
OPTIONS = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
DRAFTS = {"lookup": lambda target: None, "model": lambda target: ModelDraft(perturbed(target)), "model tree": lambda target: ModelTreeDraft(perturbed(target)),
          "automaton": lambda target: SuffixAutomatonDraft(), "recycling": lambda target: NGramRecyclingDraft(), "early exit": lambda target: EarlyExitDraft(target, 1),
          "mixture": lambda target: MixtureDraft()}


def shown(model, rows, seed: int = 0, ids: bool = False) -> dict:
    """Embeddings that are no token's, of left-padded rows."""
    inputs = padded(rows)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    noise = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(seed)) * embeds.std()
    given = {"inputs_embeds": embeds + noise, "attention_mask": inputs["attention_mask"]}
    return {**given, "input_ids": inputs["input_ids"]} if ids else given


@pytest.mark.share(2)
@pytest.mark.parametrize("ids", [False, True], ids=["alone", "beside ids"])
@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one row", "ragged"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_text_is_plain_generates(draft, rows, ids):
    target = tiny_llama(1)
    inputs = shown(target, rows, ids=ids)
    expected = target.generate(**inputs, **OPTIONS)
    for k in (3, 7):
        out = enabled(target).generate(**inputs, **OPTIONS, speculative=True, assistant_model=DRAFTS[draft](target), num_assistant_tokens=k)
        assert torch.equal(out, expected)


def outcome(line) -> str:
    """"exact", "refused" by name, or "plain" where plain generate does not take embeddings."""
    try:
        target = line.model("eager")
        texts = [target.generate(**shown(target, rows), **OPTIONS) for rows in (ROWS[:1], ROWS)]
    except (ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError, IndexError):
        return "plain"
    try:
        for rows, text in zip((ROWS[:1], ROWS), texts):
            out = enabled(target).generate(**shown(target, rows), **OPTIONS, speculative=True, assistant_model=ModelDraft(perturbed(target)), num_assistant_tokens=4)
            assert torch.equal(out, text), line.name
    except ValueError as error:
        assert any(words in str(error) for words in ("inputs_embeds: not with", "Generate the rows one by one")), line.name
        return "refused"
    return "exact"


def test_families_are_exact_or_refused_by_name():
    outcomes = [outcome(line) for line in architectures.FAMILIES[:: 1 if FULL else 6]]
    assert outcomes.count("exact") > 1.5 * outcomes.count("refused") > 0


def test_embeddings_count_for_something():
    target = tiny_llama(1)
    texts = [target.generate(**shown(target, ROWS[:1], seed), **OPTIONS).tolist() for seed in range(3)]
    assert len({str(text) for text in texts}) > 1


def test_a_draft_that_embeds_as_the_target_does_reads_them():
    target = tiny_llama(1)
    inputs = shown(target, ROWS)
    out = enabled(target).generate(**inputs, **OPTIONS, speculative=True, assistant_model=ModelDraft(target), num_assistant_tokens=4, return_dict_in_generate=True)
    assert out.speculation.acceptance_rate == 1.0
    other = tiny_llama(5, hidden_size=16)
    out = enabled(target).generate(**inputs, **OPTIONS, speculative=True, assistant_model=other, num_assistant_tokens=4)
    assert torch.equal(out, hf_specdec.disable(target).generate(**inputs, **OPTIONS))


class Sees(LogitsProcessor):
    """Favours a token by what it sees of the text, and by how much."""

    def __call__(self, input_ids, scores):
        return scores.index_add(1, input_ids.new_tensor([(int(input_ids.sum()) + 3 * input_ids.shape[1]) % 50]), scores.new_full((len(scores), 1), 4.0))


class Stops(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([row.shape[0] >= 7 for row in input_ids])


@pytest.mark.share(2)
@pytest.mark.parametrize("ids", [False, True], ids=["alone", "beside ids"])
@pytest.mark.parametrize("options", [
    dict(repetition_penalty=1.5), dict(min_new_tokens=6, eos_token_id=list(range(0, 64, 3))), dict(no_repeat_ngram_size=1), dict(min_length=8, eos_token_id=list(range(0, 64, 3))),
    dict(logits_processor=LogitsProcessorList([Sees()])), dict(bad_words_ids=[[3], [4, 5]]), dict(max_length=24, max_new_tokens=None),
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_processors_see_what_plain_generate_shows_them(options, ids):
    target = tiny_llama(1)
    inputs, options = shown(target, ROWS[:1], ids=ids), {**OPTIONS, **options}
    out = enabled(target).generate(**inputs, **options, speculative=True, assistant_model=ModelDraft(perturbed(target)), num_assistant_tokens=5)
    assert torch.equal(out, hf_specdec.disable(target).generate(**inputs, **options))


def test_criteria_see_what_plain_generate_shows_them():
    target = tiny_llama(1)
    inputs, options = shown(target, ROWS[:1]), {**OPTIONS, "stopping_criteria": StoppingCriteriaList([Stops()])}
    out = enabled(target).generate(**inputs, **options, speculative=True, num_assistant_tokens=5)
    assert torch.equal(out, hf_specdec.disable(target).generate(**inputs, **options)) and out.shape[1] == 7


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one row", "ragged"])
def test_scores_logits_and_the_cache(rows):
    target = tiny_llama(1)
    inputs, options = shown(target, rows), {**OPTIONS, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours = enabled(target).generate(**inputs, **options, speculative=True, assistant_model=ModelDraft(perturbed(target)), num_assistant_tokens=5)
    stock = hf_specdec.disable(target).generate(**inputs, **options)
    assert torch.equal(ours.sequences, stock.sequences)
    assert torch.allclose(torch.stack(ours.scores), torch.stack(stock.scores), atol=1e-4) and torch.allclose(torch.stack(ours.logits), torch.stack(stock.logits), atol=1e-4)
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(rows), ours.sequences.shape[1] - 1, dtype=torch.long)], dim=1).bool()
    for mine, theirs in zip(ours[CACHE].layers, stock[CACHE].layers):
        assert mine.keys.shape == theirs.keys.shape
        assert torch.allclose(mine.keys.transpose(1, 2)[mask], theirs.keys.transpose(1, 2)[mask], atol=1e-4)


def test_several_texts_of_one_prompt_and_sampling():
    target = tiny_llama(1)
    inputs, options = shown(target, ROWS[:2]), {**OPTIONS, "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    out = enabled(target).generate(**inputs, **options, speculative={"seed": 3}, assistant_model=ModelDraft(perturbed(target)), num_assistant_tokens=5)
    assert torch.equal(out, hf_specdec.disable(target).generate(**inputs, **options))


@pytest.mark.parametrize(("options", "words"), [
    (dict(input_ids=torch.ones(1, 3, dtype=torch.long)), "14 places and input_ids 3"),
    (lambda target: {CACHE: _filled(target)}, "holds tokens"),
    (lambda target: {"inputs_embeds": shown(target, ROWS[:1])["inputs_embeds"][0], "attention_mask": None}, r"expected \[B, L, H\], got \[14, 32\]"),
], ids=["ids of another length", "cache", "one row without a batch"])
def test_what_nobody_has_tried_is_refused_by_name(options, words):
    target = tiny_llama(1)
    options = options(target) if callable(options) else options
    with pytest.raises(ValueError, match=f"inputs_embeds.*{words}"):
        enabled(target).generate(**{**shown(target, ROWS[:1]), **OPTIONS, **options}, speculative=True)


def _filled(target) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    target(input_ids=torch.tensor([ROWS[0][:4]]), **{CACHE: cache})
    return cache


@pytest.mark.parametrize("name", ["BLOOM", "MPT"])
def test_models_that_make_their_masks_themselves_refuse_them(name):
    target = next(line for line in architectures.FAMILIES if line.name.startswith(name)).model("eager")
    with pytest.raises(ValueError, match="inputs_embeds.*makes its masks"):
        enabled(target).generate(**shown(target, ROWS[:1]), **OPTIONS, speculative=True)
