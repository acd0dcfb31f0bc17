"""Models composed of an encoder and a decoder that are models by themselves, and encoders of images: positions, what is read beside a text, and what is refused."""

import copy
import re

import pytest
import torch

import hf_specdec
from hf_specdec import compat
from hf_specdec.caches import CACHE
from hf_specdec.drafts import ModelDraft
from tests import encoder_decoders
from tests.encoder_decoders import Family, composed, family, plain, seeds, source, sources, speculate
from tests.helpers import perturbed, tiny_llama

BERT = encoder_decoders._BERT | encoder_decoders._READS


def seeing(decoder: dict, **encoder) -> Family:
    """ViT with that decoder."""
    return Family("ViT with another", "vision-encoder-decoder", composed(encoder_decoders._VIT | encoder, decoder))


def refused(words: str, call):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        call()


@pytest.mark.parametrize("name", ["TrOCR", "Donut", "ViT and GPT-2", "ViT and RoBERTa", "UDOP", "Florence-2", "Wav2Vec2 and mBART", "BERT twice"])
def test_a_draft_with_an_encoder_of_its_own_reads_all_that_the_targets_encoder_has_read(name):
    """A twin of the target is always right, so it sees the images, boxes and words of every row."""
    line, seed = family(name), seeds(name, 1)[0]
    model, inputs = line.model(seed=seed), sources(line.kind, seed)
    twin = copy.deepcopy(model)
    twin.get_encoder().unequal = torch.nn.Parameter(torch.zeros(1))
    draft = ModelDraft(twin)
    out = speculate(model, inputs, draft)
    assert draft.reads == "its own" and out.speculation.acceptance_rate == 1.0 and torch.equal(out.sequences, plain(model, inputs))
    sampled = [speculate(model, inputs, draft, seed=3, do_sample=True, num_return_sequences=2) for _ in range(2)]
    assert torch.equal(sampled[0].sequences, sampled[1].sequences) and sampled[0].speculation.acceptance_rate > 0.9


@pytest.mark.parametrize("name", ["TrOCR", "ViT and GPT-2"])
def test_a_decoder_only_draft_and_a_smaller_model_leave_the_text_as_it_is(name):
    line, seed = family(name), seeds(name, 1)[0]
    model, inputs = line.model(seed=seed), sources(line.kind, seed)
    for draft in (tiny_llama(), family("Donut").model(seed=4), seeing(encoder_decoders._GPT2 | {"n_layer": 1, "n_embd": 16}).model(seed=5)):
        hf_specdec.enable(model)
        ours = model.generate(**inputs, assistant_model=draft, speculative=True, max_new_tokens=12, do_sample=False)
        assert torch.equal(ours, plain(hf_specdec.disable(model), inputs, max_new_tokens=12))


def test_what_the_encoder_is_told_beside_an_image_goes_to_the_encoders():
    """Images of another size than ViT was made for."""
    model = family("ViT and BERT").model(seed=seeds("ViT and BERT", 1)[0])
    inputs = {"pixel_values": torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0)), "interpolate_pos_encoding": True}
    for draft in (ModelDraft(perturbed(model, 0.03)), None):
        assert torch.equal(speculate(model, inputs, draft).sequences, plain(model, inputs))


@pytest.mark.parametrize(("kind", "places"), [("bert", 20), ("roberta", 19)])  # RoBERTa's padding token is 0, so it begins at 1
def test_the_context_is_the_decoders_and_may_be_filled(kind, places):
    line = seeing(dict(BERT, model_type=kind, max_position_embeddings=20))
    model, inputs = line.model(seed=1), sources(line.kind, rows=3)
    assert compat.traits_of(model, "target").max_positions == places
    text = plain(model, inputs, max_new_tokens=places)
    for draft in (ModelDraft(perturbed(model, 0.03)), ModelDraft(model), None):
        assert torch.equal(speculate(model, inputs, draft, 7, max_new_tokens=places).sequences, text)
    refused(f"outgrown the {places} positions", lambda: speculate(model, inputs, None, max_new_tokens=places + 9))


@pytest.mark.parametrize("name", ["Donut", "ViT and GPT-2"])
def test_padding_that_counts_as_text_is_refused_and_longer_starts_are_not(name):
    line = family(name)
    model, inputs = line.model(seed=1), sources(line.kind, rows=2)
    starts = torch.tensor([[2, 9, 7], [2, 11, 5]])
    for draft in (ModelDraft(perturbed(model, 0.03)), None):
        assert torch.equal(speculate(model, inputs, draft, decoder_input_ids=starts).sequences, plain(model, inputs, decoder_input_ids=starts))
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    refused("decoder_attention_mask: VisionEncoderDecoderModel counts padding", lambda: speculate(model, inputs, None, decoder_input_ids=starts, decoder_attention_mask=mask))


@pytest.mark.skipif(CACHE != "cache", reason="before transformers 5.24 RoFormer is refused as a decoder, too")
def test_a_batch_that_a_decoder_gives_other_logits_than_single_rows_is_refused():
    line = seeing(dict(BERT, model_type="roformer"))
    model = line.model(seed=1)
    for draft in (ModelDraft(perturbed(model, 0.03)), None):
        assert torch.equal(speculate(model, source(line.kind), draft).sequences, plain(model, source(line.kind)))
    refused("VisionEncoderDecoderModel gives a row other logits in a ragged batch.*one by one", lambda: speculate(model, sources(line.kind, rows=2)))


PROPHETNET = dict(encoder_decoders._COMPOSED, model_type="prophetnet", hidden_size=32, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=4,
                  num_decoder_attention_heads=4, **encoder_decoders._READS)  # fmt: skip
LLAMA = dict(encoder_decoders._COMPOSED, model_type="llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)


@pytest.mark.parametrize(("decoder", "why"), [
    (dict(encoder_decoders._BERT), "a decoder BertLMHeadModel reads its text in both directions"),
    (PROPHETNET, "a decoder ProphetNetForCausalLM reads one token at a time from a cache"),
    (LLAMA, "a decoder LlamaForCausalLM was not made to look at an encoder (no encoder_hidden_states="),
], ids=["both ways", "own way", "blind"])  # fmt: skip
def test_decoders_that_cannot_be_rolled_back_are_refused_by_name(decoder, why):
    refused(f"model: VisionEncoderDecoderModel with {re.escape(why)}.*speculative=False", lambda: hf_specdec.enable(seeing(decoder).model()))


def test_a_draft_that_reads_something_else_than_the_target_is_refused():
    model = family("TrOCR").model(seed=1)
    refused("assistant_model: T5For.*reads input_ids, and the target's reads pixel_values", lambda: speculate(model, source("vision-encoder-decoder"), family("T5").model()))
