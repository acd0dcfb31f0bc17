"""Encoder-decoder targets: plain generate's text, one pass of the encoder, and what a draft model reads."""

import copy
import re

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerateEncoderDecoderOutput

import hf_specdec
from hf_specdec.compat import CACHE
from hf_specdec.drafts import Context, ModelDraft, PromptLookupDraft, RecyclingDraft, SuffixAutomatonDraft, UniformDraft
from hf_specdec.kinds import OWN_WAYS
from tests import encoder_decoders
from tests.architectures import offers
from tests.conformance.builders import ngram
from tests.encoder_decoders import FAMILIES, MAX_NEW, REFUSED, REQUIRED, family, outcome, plain, seeds, source, speculate
from tests.helpers import FULL, KnowingTreeDraft, assert_unchanged, perturbed, snapshot, tiny_llama

CASES = [(line, attn) for i, line in enumerate(FAMILIES) for attn in ("eager", "sdpa") if FULL or i < REQUIRED or attn == "eager"]


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize(("line", "attn"), CASES, ids=[f"{line.name}-{attn}" for line, attn in CASES])
def test_greedy_text_is_plain_generates_whatever_drafts(line, attn):
    if not offers(line, attn):
        pytest.skip(f"transformers has no {attn} attention for {line.name}")
    thorough = FAMILIES.index(line) < REQUIRED and attn == "eager"
    n = (12 if FULL else 2) if thorough else 1
    assert len(seeds(line.name, n, attn)) == n
    assert outcome(line, attn, n, ks=(1, 4, 7) if thorough else (4,)) == "exact"


@pytest.mark.parametrize("name", ["M2M100", "SeamlessM4T", "SeamlessM4T v2", "Speech2Text", "SpeechT5", "TrOCR (sinusoidal)", "ViT and RoBERTa"])
@pytest.mark.parametrize("start", [[2], [2, 0, 5]])
def test_a_decoder_that_leaves_padding_out_where_it_counts_gets_none_before_a_candidate(start, name):
    """Positions of a text that has the padding token in it."""
    options = dict(sequence_bias={(0,): 6.0}, no_repeat_ngram_size=2, output_logits=True, return_dict_in_generate=True, decoder_input_ids=torch.tensor([start]))
    model, inputs = model_and_source(name)
    expected = model.generate(**inputs, **options, max_new_tokens=MAX_NEW, do_sample=False, num_beams=1)
    assert 0 in expected.sequences[0, len(start) : -1]
    accepted = 0
    for draft in (ModelDraft(model), RecyclingDraft()):
        out = speculate(model, inputs, draft, **options)
        assert torch.equal(out.sequences, expected.sequences)
        torch.testing.assert_close(out.logits, expected.logits, atol=1e-4, rtol=1e-4)
        accepted += out.speculation.accepted
    assert accepted


def model_and_source(name="T5"):
    seed = seeds(name, 1)[0]
    return family(name).model(seed=seed), source(family(name).kind, seed)


def other(name="T5", seed=7, **settings):
    """An unrelated, smaller model of the family."""
    return family(name).model(seed=seed, **settings)


DRAFTS = {
    "smaller": lambda target: other(num_layers=1, num_decoder_layers=1, d_ff=24),
    "another width": lambda target: other(d_model=16, d_kv=4),
    "decoder-only": lambda target: tiny_llama(),
    "ngram": lambda target: ngram(target),
    "recycling": lambda target: RecyclingDraft(),
    "suffix automaton": lambda target: SuffixAutomatonDraft(),
    "uniform": lambda target: UniformDraft(),
}


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("k", [1, 5, "auto"])
@pytest.mark.parametrize("name", DRAFTS)
def test_every_other_draft_leaves_the_text_as_it_is(name, k):
    model, inputs = model_and_source()
    out = speculate(model, inputs, DRAFTS[name](model), k)
    assert torch.equal(out.sequences, plain(model, inputs))


# --- the encoder ------------------------------------------------------------------------------------------------------


def counted(module) -> list:
    """Grows by one with every forward of the module."""
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("name", ["T5", "BART", "Whisper"])
def test_the_encoder_runs_once_a_call_and_the_source_is_keyed_once(name):
    model, inputs = model_and_source(name)
    decoder = model.get_decoder()
    cross = decoder.block[0].layer[1].EncDecAttention.k if name == "T5" else decoder.layers[0].encoder_attn.k_proj
    draft = ModelDraft(perturbed(model))
    encoded, keyed = counted(model.get_encoder()), counted(cross)
    out = speculate(model, inputs, draft)
    assert out.speculation.target_calls > 3 and len(encoded) == 1 and len(keyed) == 1


def test_a_draft_model_with_another_encoder_runs_its_own_once():
    model, inputs = model_and_source()
    draft = ModelDraft(perturbed(model))
    encoded = counted(draft.model.get_encoder())
    speculate(model, inputs, draft)
    assert len(encoded) == 1 and draft.reads == "its own"
    speculate(model, inputs, draft)
    assert len(encoded) == 2


def test_the_same_encoder_module_is_shared():
    model, inputs = model_and_source()
    small = other(num_decoder_layers=1)
    small.encoder = model.encoder
    encoded, draft = counted(model.encoder), ModelDraft(small)
    speculate(model, inputs, draft)
    assert len(encoded) == 1 and draft.reads == "the target's: the same module"


def test_an_encoder_with_equal_parameters_is_shared_and_one_that_differs_in_a_single_number_is_not():
    model, inputs = model_and_source("Whisper")
    small = other("Whisper", decoder_layers=1)
    small.model.encoder.load_state_dict(model.model.encoder.state_dict())
    encoded, draft = counted(small.model.encoder), ModelDraft(small)
    text = plain(model, inputs)
    assert torch.equal(speculate(model, inputs, draft).sequences, text)
    assert encoded == [] and draft.reads == "the target's: equal parameters"
    with torch.no_grad():
        small.model.encoder.layers[1].fc1.bias[0] += 1e-3
    assert torch.equal(speculate(model, inputs, draft).sequences, text)
    assert len(encoded) == 1 and draft.reads == "its own"


def test_a_draft_reads_what_its_own_encoder_makes_of_the_source():
    """A copy of the target with its own copy of the encoder is always right, so it reads the right thing with the right mask."""
    model, _ = model_and_source()
    inputs = {"input_ids": torch.tensor([[9, 8, 7, 6, 5, 0, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])}
    twin = copy.deepcopy(model)
    twin.encoder.unequal = torch.nn.Parameter(torch.zeros(1))
    draft = ModelDraft(twin)
    out = speculate(model, inputs, draft)
    assert draft.reads == "its own" and out.speculation.acceptance_rate == 1.0
    assert torch.equal(out.sequences, plain(model, inputs))
    assert not torch.equal(out.sequences, plain(model, {"input_ids": inputs["input_ids"]}))


def test_given_encoder_outputs_are_used_and_no_encoder_runs():
    model, inputs = model_and_source()
    outputs = model.get_encoder()(**inputs)
    text, drafts = plain(model, inputs), (None, ModelDraft(copy.deepcopy(model)))
    encoded = counted(model.get_encoder())
    for draft in drafts:
        assert torch.equal(speculate(model, {"encoder_outputs": outputs}, draft).sequences, text)
    assert encoded == [] and drafts[1].reads == "the target's: equal parameters"


# --- lookup in the source -----------------------------------------------------------------------------------------------


class Watching(PromptLookupDraft):
    def start(self, context: Context) -> None:
        super().start(context)
        self.texts = [list(row) for row in context.texts]


def test_lookups_look_into_what_the_encoder_has_read_too():
    model, _ = model_and_source()
    inputs = {"input_ids": torch.tensor([[9, 8, 7, 6, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}
    draft = Watching()
    speculate(model, inputs, draft)
    assert draft.texts == [[9, 8, 7, 6, 0]]  # the source without padding, the decoder's first token


def test_a_text_that_is_copied_from_the_source_is_drafted():
    model, inputs = model_and_source()
    text = plain(model, inputs)
    source_of_it = torch.cat([torch.tensor([[40, 41]]), text[:, 1:]], dim=1)
    outputs = model.get_encoder()(**inputs)
    accepted = []
    for ids in (source_of_it, torch.tensor([[1, 2]])):
        model.encoder.forward = lambda *_, **__: outputs  # whatever is read: the text stays the same
        out = speculate(model, {"input_ids": ids}, PromptLookupDraft(), 7)
        del model.encoder.forward
        assert torch.equal(out.sequences, text)
        accepted.append(out.speculation.accepted)
    assert accepted[0] > accepted[1] and accepted[0] >= MAX_NEW // 2


def test_a_source_in_another_vocabulary_is_not_looked_into():
    marian = family("Marian").model(seed=0, decoder_vocab_size=61, share_encoder_decoder_embeddings=False)
    draft, inputs = Watching(), source("marian")
    out = speculate(marian, inputs, draft)
    assert draft.texts == [[2]] and torch.equal(out.sequences, plain(marian, inputs))
    draft = Watching()
    speculate(family("Whisper").model(), source("whisper"), draft)
    assert len(draft.texts[0]) == 1


# --- what generate is asked for ------------------------------------------------------------------------------------------


class Ends(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= 9 and int(input_ids[0, -1]) % 2 == 0])


OPTIONS = {
    "repetition penalty": dict(repetition_penalty=1.8),
    "no repeated 2-gram": dict(no_repeat_ngram_size=2),
    "min_length and eos": dict(min_length=12, eos_token_id=list(range(3, 30))),
    "eos": dict(eos_token_id=list(range(3, 20))),
    "forced bos": dict(forced_bos_token_id=11),
    "forced eos": dict(forced_eos_token_id=5, eos_token_id=5),
    "max_length": dict(max_length=9, max_new_tokens=None),
    "one token": dict(max_new_tokens=1),
    "decoder_input_ids": dict(decoder_input_ids=torch.tensor([[0, 14, 15, 16]])),
    "decoder_start_token_id": dict(decoder_start_token_id=17),
    "encoder repetition penalty": dict(encoder_repetition_penalty=1.5),
    "no 1-gram of the encoder": dict(encoder_no_repeat_ngram_size=1),
    "suppressed": dict(suppress_tokens=list(range(3, 40)), begin_suppress_tokens=[44, 45]),
    "criterion": dict(stopping_criteria=StoppingCriteriaList([Ends()])),
    "bad words": dict(bad_words_ids=[[20], [21, 22]]),
}


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["T5", "BART"])
def test_options_act_token_by_token(name, option):
    model, inputs = model_and_source(name)
    text = plain(model, inputs, **OPTIONS[option])
    for draft in (ModelDraft(perturbed(model, 0.03)), None):
        assert torch.equal(speculate(model, inputs, draft, 5, **OPTIONS[option]).sequences, text)


def test_the_output_has_the_fields_of_plain_generates():
    model, inputs = model_and_source("BART")
    options = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.3, max_new_tokens=15)
    theirs = model.generate(**inputs, do_sample=False, **options)
    ours = speculate(model, inputs, ModelDraft(perturbed(model)), **options)
    assert isinstance(ours, GenerateEncoderDecoderOutput) and list(ours.keys()) == list(theirs.keys())
    assert torch.equal(ours.sequences, theirs.sequences) and ours.speculation.new_tokens == [15]
    for name in ("scores", "logits"):
        assert len(ours[name]) == 15 and all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours[name], theirs[name]))
    for part in ("self_attention_cache", "cross_attention_cache"):
        for a, b in zip(getattr(ours[CACHE], part).layers, getattr(theirs[CACHE], part).layers):
            assert torch.allclose(a.keys, b.keys, atol=1e-4) and torch.allclose(a.values, b.values, atol=1e-4)


def test_a_plain_tensor_comes_back_from_an_enabled_model_called_by_position():
    model, inputs = model_and_source()
    text = plain(model, inputs)
    hf_specdec.enable(model)
    out = model.generate(inputs["input_ids"], assistant_model=perturbed(model), speculative=True, max_new_tokens=MAX_NEW)
    assert torch.equal(out, text)
    assert torch.equal(hf_specdec.disable(model).generate(**inputs, max_new_tokens=MAX_NEW, custom_generate=hf_specdec.SpeculativeDecoder()), text)


class Streamer:
    def __init__(self):
        self.seen, self.ended = [], False

    def put(self, value):
        self.seen += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_the_tokens_of_the_decoder():
    model, inputs = model_and_source()
    ours, theirs = Streamer(), Streamer()
    speculate(model, inputs, streamer=ours)
    model.generate(**inputs, max_new_tokens=MAX_NEW, streamer=theirs)
    assert ours.seen == theirs.seen and ours.ended


def test_the_decoders_context_may_be_filled_to_its_end():
    model, inputs = family("BART").model(seed=1, max_position_embeddings=20), source()
    text = plain(model, inputs, max_new_tokens=20)
    for draft in (ModelDraft(perturbed(model, 0.02)), None):
        assert torch.equal(speculate(model, inputs, draft, 7, max_new_tokens=20).sequences, text)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_text_that_outgrows_a_table_of_positions_ends_in_an_error_that_says_so(num_beams):
    model = family("BART").model(seed=1, max_position_embeddings=20)
    refused("max_new_tokens: a text has outgrown the 20 positions that BartFor.*may have 21 tokens at most",
            lambda: speculate(model, source(), num_beams=num_beams, max_new_tokens=30))


def test_models_are_left_as_they_were():
    model, inputs = model_and_source("Whisper")
    draft = perturbed(model)
    before = snapshot(model), snapshot(draft)
    speculate(model, inputs, draft)
    assert_unchanged(model, before[0])
    assert_unchanged(draft, before[1])


# --- what cannot be done ------------------------------------------------------------------------------------------------


def refused(words: str, call):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        call()


@pytest.mark.parametrize("name", ["T5", "BART", "Marian"])
def test_token_ids_that_encoder_or_decoder_does_not_have_are_refused(name):
    model = family(name).model(seed=1)

    def call(**given):
        return hf_specdec.enable(model).generate(speculative=True, max_new_tokens=4, **given)

    refused("input_ids has token ids from 5 to 99; the model's go from 0 to 60", lambda: call(input_ids=torch.tensor([[5, 99]])))
    refused("inputs has token ids from -5 to 5; the model's go from 0 to 60", lambda: call(inputs=torch.tensor([[5, -5]])))
    refused("input_ids: expected token ids int64, got torch.float32", lambda: call(input_ids=torch.ones(1, 4)))
    refused(r"attention_mask has the shape \[1, 1\] and input_ids \[1, 2\]", lambda: call(input_ids=torch.tensor([[5, 9]]), attention_mask=torch.ones(1, 1)))
    refused("decoder_input_ids has token ids from . to 99", lambda: call(input_ids=torch.tensor([[5, 9]]), decoder_input_ids=torch.tensor([[2, 99]])))


def test_trees_and_caches_are_refused():
    model, inputs = model_and_source()
    text = plain(model, inputs)
    refused("branches of a tree.*chains", lambda: speculate(model, inputs, KnowingTreeDraft(text.tolist()), 10))
    cache = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)[CACHE]
    refused(f"{CACHE}: the EncoderDecoderCache.*decoder_input_ids", lambda: speculate(model, inputs, **{CACHE: cache}, decoder_input_ids=text))
    embeds = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
    assert torch.equal(speculate(model, embeds).sequences, text)
    refused("or embeddings.*input_ids.*with the target's encoder", lambda: speculate(model, embeds, perturbed(model)))
    refused("output_hidden_states=True.*use_cache=False", lambda: speculate(model, inputs, output_hidden_states=True, num_beams=2, use_cache=False))


@pytest.mark.parametrize(("name", "kind", "settings"), REFUSED, ids=[line[0] for line in REFUSED])
def test_families_that_cannot_be_rolled_back_or_have_not_been_tried_are_refused(name, kind, settings):
    model = encoder_decoders.refused(kind, **settings)
    why = f"{re.escape(OWN_WAYS[kind])}, so its passes" if kind in OWN_WAYS else f"is an encoder-decoder model of type '{kind}'.*'bart'.*'t5'"
    refused(f"model: {type(model).__name__} {why}.*speculative=False", lambda: hf_specdec.enable(model))


def test_passes_over_more_tokens_than_an_expert_takes_are_refused():
    """Switch Transformers: plain decoding never has as many in a pass, and another text where they are left out."""
    model, inputs = family("Switch Transformers").model(seed=1, num_experts=2, expert_capacity=5), source()
    text = plain(model, inputs)
    assert torch.equal(speculate(model, inputs, ModelDraft(model), 4).sequences, text)
    refused("takes 5 tokens of a pass.*over 6 tokens could differ.*smaller num_assistant_tokens", lambda: speculate(model, inputs, None, 5))
    refused("over 7 tokens could differ", lambda: speculate(model, inputs, None, 4, decoder_input_ids=torch.tensor([[0, 5, 6]])))
    refused("over 17 tokens.*smaller max_auto_tokens", lambda: speculate(model, inputs, None, "auto"))


def test_a_draft_that_cannot_read_the_source_is_refused():
    model, inputs = model_and_source()
    llama = tiny_llama()
    ids = torch.tensor([[3, 4, 5]])
    refused("assistant_model: T5ForConditionalGeneration is an encoder-decoder.*target, which has no encoder.*decoder-only draft",
            lambda: hf_specdec.enable(llama).generate(ids, assistant_model=model, speculative=True, max_new_tokens=4))
    outputs = model.get_encoder()(**inputs)
    refused("assistant_model: .*encoder of its own.*encoder_outputs.*input_ids", lambda: speculate(model, {"encoder_outputs": outputs}, perturbed(model)))
    refused("vocabulary of 30 tokens", lambda: speculate(model, inputs, other(vocab_size=30)))
    text = {"input_ids": torch.tensor([[60, 5, 6]])}
    refused("knows token ids below 58.*the input has 60", lambda: speculate(model, text, other(vocab_size=58)))
    whisper, heard = model_and_source("Whisper")
    refused("reads features of 16 mel bins, and these have 8", lambda: speculate(whisper, heard, other("Whisper", num_mel_bins=16)))


def test_a_feature_drafter_is_refused():
    from hf_specdec.drafts.feature import FeatureDraft
    from hf_specdec.drafts.features import attach

    model, inputs = model_and_source()
    drafter = tiny_llama()
    attach(drafter, (1,))
    refused("feature drafter.*decoder-only target", lambda: speculate(model, inputs, FeatureDraft(drafter, model)))


def test_a_prefilled_processor_list_is_taken():
    model, inputs = model_and_source()
    assert torch.equal(speculate(model, inputs, logits_processor=LogitsProcessorList()).sequences, plain(model, inputs))


# --- Whisper's own generate ---------------------------------------------------------------------------------------------


def whisper():
    model = family("Whisper").model(seed=0, eos_token_id=60, suppress_tokens=[5, 6], begin_suppress_tokens=[7])
    generation = model.generation_config
    generation.suppress_tokens, generation.begin_suppress_tokens = [5, 6], [7]
    return model


def test_whispers_own_generate_takes_the_features_by_position_and_gives_the_trace_with_its_output():
    model, features = whisper(), source("whisper")["input_features"]
    text = model.generate(features, max_new_tokens=MAX_NEW)
    hf_specdec.enable(model)
    for draft in (None, ModelDraft(perturbed(model, 0.03))):
        assert torch.equal(model.generate(features, max_new_tokens=MAX_NEW, assistant_model=draft, speculative=True), text)
        out = model.generate(features, max_new_tokens=MAX_NEW, assistant_model=draft, speculative=True, return_dict_in_generate=True)
        assert isinstance(out, GenerateEncoderDecoderOutput) and torch.equal(out.sequences[0, 1:], text[0])
        assert out.speculation.new_tokens == [text.shape[1]]


def test_long_recordings_with_time_stamps_are_transcribed_piece_by_piece():
    model = whisper()
    model.generation_config.no_timestamps_token_id = 40
    features = torch.randn((1, 8, 110), generator=torch.Generator().manual_seed(0))
    options = dict(max_new_tokens=18, attention_mask=torch.ones(1, 110, dtype=torch.long), return_timestamps=True)
    text, encoded = model.generate(features, **options), counted(model.get_encoder())
    out = hf_specdec.enable(model).generate(features, **options, speculative=True)
    assert torch.equal(out, text) and len(encoded) > 1


@pytest.mark.parametrize("width", [32, 16])
def test_a_draft_that_has_a_decoder_alone_reads_the_targets_encoder_outputs(width):
    from transformers import WhisperForCausalLM

    model, features = whisper(), source("whisper")
    draft = ModelDraft(WhisperForCausalLM(copy.deepcopy(whisper().config)).eval())
    if width == 32:
        draft.model.model.decoder.load_state_dict(model.model.decoder.state_dict())
        draft.model.set_output_embeddings(copy.deepcopy(model.proj_out))
        out = speculate(model, features, draft)
        assert draft.reads == "the target's: it has no encoder of its own" and out.speculation.acceptance_rate == 1.0
        assert torch.equal(out.sequences, plain(model, features))
    else:
        draft = ModelDraft(WhisperForCausalLM(family("Whisper").model(d_model=16).config).eval())
        refused("width of 16 and no encoder of its own.*has 32", lambda: speculate(model, features, draft))


def test_labels_are_passed_over_as_in_plain_generate():
    """Seq2SeqTrainer hands them to generate."""
    model, inputs = family("T5").model(seed=1), source()
    labels = torch.tensor([[5, 6, 7]])
    expected = plain(model, inputs, labels=labels)
    assert torch.equal(speculate(model, inputs, None, 4, labels=labels).sequences, expected) and torch.equal(expected, plain(model, inputs))
