"""Beam search over encoder-decoders: the beams of plain beam search, each reading its own prompt's source."""

import pytest
import torch
from transformers.generation import GenerateBeamEncoderDecoderOutput

import hf_specdec
from hf_specdec.compat import CACHE
from hf_specdec.drafts import ModelDraft, RecyclingDraft, SuffixAutomatonDraft
from tests.encoder_decoders import DRAFTS, FAMILIES, family, seeds, sources
from tests.generate.test_encoder_decoder import counted, whisper
from tests.helpers import FULL, perturbed

OPTIONS = {
    "plain": dict(num_beams=3),
    "several sequences": dict(num_beams=4, num_return_sequences=3, eos_token_id=[3, 4, 5, 6, 7, 8, 9], early_stopping=True),
    "lengths and penalties": dict(num_beams=2, length_penalty=2.0, repetition_penalty=1.4, no_repeat_ngram_size=2, eos_token_id=list(range(20, 28)), min_length=5),
}


def both(model, inputs: dict, draft, k: int | str = 4, **options):
    options = dict(max_new_tokens=16, do_sample=False, return_dict_in_generate=True, output_scores=True) | options
    plain = model.generate(**inputs, **options)
    return plain, hf_specdec.integration.generate(model, **inputs, **options, assistant_model=draft, num_assistant_tokens=k)


def assert_equal(plain, ours):
    assert torch.equal(plain.sequences, ours.sequences) and torch.equal(plain.beam_indices, ours.beam_indices)
    torch.testing.assert_close(plain.sequences_scores, ours.sequences_scores, atol=1e-4, rtol=1e-4)


@pytest.mark.share(1 / 3)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("line", FAMILIES, ids=lambda line: line.name)
def test_the_beams_are_those_of_plain_search(line, draft, option):
    seed = seeds(line.name, 1)[0]
    model = line.model(seed=seed)
    for rows in (1, 3) if FULL or option == "plain" else (3,):
        assert_equal(*both(model, sources(line.kind, seed, rows), DRAFTS[draft](model), **OPTIONS[option]))


@pytest.mark.share(2)
@pytest.mark.parametrize("k", [1, 7, "auto"])
@pytest.mark.parametrize("make", [RecyclingDraft, SuffixAutomatonDraft, lambda: None], ids=["recycling", "suffix automaton", "lookup"])
def test_other_drafts_follow_the_beams(make, k):
    model = family("T5").model(seed=seeds("T5", 1)[0])
    assert_equal(*both(model, sources(), make(), k, num_beams=3))


def test_two_prompts_whose_beams_are_alike_read_each_its_own_source():
    """All texts begin with the same token, and a forced one follows."""
    model = family("BART").model(seed=seeds("BART", 1)[0])
    plain, ours = both(model, sources("bart"), ModelDraft(perturbed(model, 0.03)), num_beams=3, forced_bos_token_id=11)
    assert_equal(plain, ours)
    assert len({tuple(row) for row in ours.sequences.tolist()}) == 3


def test_a_copy_of_the_target_saves_passes_and_each_encoder_runs_once():
    model = family("PLBart").model(seed=seeds("PLBart", 1)[0])
    draft = ModelDraft(perturbed(model, 0.0))
    draft.model.get_encoder().unequal = torch.nn.Parameter(torch.zeros(1))
    encoded, own = counted(model.get_encoder()), counted(draft.model.get_encoder())
    _, ours = both(model, sources(rows=1), draft, num_beams=3)
    assert len(encoded) == 2 and len(own) == 1 and draft.reads == "its own"  # plain generate's is the other one
    assert ours.speculation.target_calls < 14


def test_the_output_is_that_of_an_encoder_decoder_with_a_trace():
    model = family("T5").model(seed=seeds("T5", 1)[0])
    plain, ours = both(model, sources(), None, num_beams=2)
    assert isinstance(ours, GenerateBeamEncoderDecoderOutput) and list(ours.keys()) == [name for name in plain.keys() if name != CACHE]
    assert ours.speculation.target_calls > 0


@pytest.mark.parametrize("length", [40, 110])
@pytest.mark.parametrize("several", [1, 2])
def test_whisper_searches_in_beams(several, length):
    """Its mask stays that of the sounds that a call began with, whichever are left, and however often each is read."""
    model = whisper()
    model.generation_config.no_timestamps_token_id = 40
    features, mask = torch.randn((3, 8, length), generator=torch.Generator().manual_seed(4)), torch.ones(3, length, dtype=torch.long)
    mask[1, 41:], mask[2, length // 2 + 20 :] = 0, 0
    options = dict(attention_mask=mask, num_beams=3, num_return_sequences=several, max_new_tokens=14, return_timestamps=length > 40)
    text = model.generate(features, **options)
    assert torch.equal(hf_specdec.enable(model).generate(features, **options, speculative=True), text)


def test_a_model_whose_own_config_asks_for_beams_is_served():
    """As those for translation do."""
    model = family("Marian").model(seed=seeds("Marian", 1)[0])
    model.generation_config.num_beams = 4
    inputs = sources("marian")
    text = model.generate(**inputs, max_new_tokens=12)
    assert torch.equal(hf_specdec.enable(model).generate(**inputs, max_new_tokens=12, speculative=True), text)
