"""Every argument of `generate()` and of a GenerationConfig: heeded as plain generate heeds it, refused by name, or without meaning for the text."""

import inspect

import pytest
import torch
import transformers
from transformers import CompileConfig, GenerationConfig, GenerationMixin, MaxLengthCriteria, SynthIDTextWatermarkingConfig, TemperatureLogitsWarper, WatermarkingConfig

from hf_specdec.caches import CACHE
from tests.encoder_decoders import FAMILIES as READERS, sources
from tests.helpers import enabled, padded, perturbed, repetitive, tiny_llama

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
ROWS = repetitive(11, 11)  # of padding in prompts processors know nothing here: docs/usage.md
BASE = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
DRAWN = dict(do_sample=True)  # with what leaves one token alone
BEAMS = dict(num_beams=3)
DICT = dict(return_dict_in_generate=True)

# name -> the arguments of a call
HEEDED = {
    "max_length": dict(max_length=19, max_new_tokens=None), "max_new_tokens": dict(max_new_tokens=5), "min_length": dict(min_length=20, eos_token_id=[*range(1, 40)]),
    "min_new_tokens": dict(min_new_tokens=4, eos_token_id=[*range(1, 40)]), "early_stopping": dict(early_stopping=True, eos_token_id=[*range(1, 20)], **BEAMS),
    "max_time": dict(max_time=0.0), "do_sample": dict(top_k=1, **DRAWN), "num_beams": BEAMS, "num_return_sequences": dict(num_return_sequences=2, **BEAMS),
    "temperature": dict(temperature=1e-4, **DRAWN), "top_k": dict(top_k=1, **DRAWN), "top_p": dict(top_p=1e-6, **DRAWN), "min_p": dict(min_p=1.0, **DRAWN),
    "top_h": dict(top_h=1e-4, **DRAWN), "typical_p": dict(typical_p=1e-6, **DRAWN), "epsilon_cutoff": dict(epsilon_cutoff=0.9999, **DRAWN),
    "eta_cutoff": dict(eta_cutoff=0.9999, temperature=0.01, **DRAWN),
    "repetition_penalty": dict(repetition_penalty=1.5), "encoder_repetition_penalty": dict(encoder_repetition_penalty=3.0), "length_penalty": dict(length_penalty=-2.0, eos_token_id=[*range(1, 20)], **BEAMS),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=1), "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=1), "bad_words_ids": dict(bad_words_ids=[[token] for token in range(30)]),
    "renormalize_logits": dict(renormalize_logits=True, output_scores=True, **DICT), "forced_bos_token_id": dict(forced_bos_token_id=7), "forced_eos_token_id": dict(forced_eos_token_id=9),
    "remove_invalid_values": dict(remove_invalid_values=True), "exponential_decay_length_penalty": dict(exponential_decay_length_penalty=(3, 4.0), eos_token_id=5),
    "suppress_tokens": dict(suppress_tokens=[*range(30)]), "begin_suppress_tokens": dict(begin_suppress_tokens=[*range(55)]),
    "sequence_bias": dict(sequence_bias=[[[9], 30.0]]), "guidance_scale": dict(guidance_scale=1.7),
    "watermarking_config": dict(watermarking_config=WatermarkingConfig(bias=9.0)), "synthid": dict(watermarking_config=SynthIDTextWatermarkingConfig(keys=[654, 400], ngram_len=2, context_history_size=16)),
    "output_attentions": dict(output_attentions=True, **DICT), "output_hidden_states": dict(output_hidden_states=True, **DICT), "output_scores": dict(output_scores=True, **DICT),
    "output_logits": dict(output_logits=True, **DICT), "return_dict_in_generate": DICT, "pad_token_id": dict(pad_token_id=3, eos_token_id=[*range(1, 20)]),
    "eos_token_id": dict(eos_token_id=[*range(1, 20)]), "use_cache": dict(use_cache=False), "prefill_chunk_size": dict(prefill_chunk_size=4), "low_memory": dict(low_memory=True),
    "cache_implementation": dict(cache_implementation="static", **DICT), "max_cache_len": dict(cache_implementation="static", max_cache_len=50, **DICT),
    "generation_config": dict(generation_config=GenerationConfig(max_new_tokens=4, pad_token_id=0), max_new_tokens=None), "logits_processor": dict(logits_processor=[TemperatureLogitsWarper(0.5)], output_scores=True, **DICT),
    "stopping_criteria": dict(stopping_criteria=[MaxLengthCriteria(17)]), "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=lambda row, tokens: [3 + row, 8, 9 + len(tokens) % 3]),
    "negative_prompt_ids": dict(guidance_scale=1.7, negative_prompt_ids=torch.tensor([[1, 2, 3], [4, 5, 6]])),
    "negative_prompt_attention_mask": dict(guidance_scale=1.7, negative_prompt_ids=torch.tensor([[1, 2, 3], [4, 5, 6]]), negative_prompt_attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]])),
}
# What only other arguments give a meaning, here as in plain generate, and what says how transformers is to run it: the text is the same.
NO_MEANING = {
    "cache_config": dict(cache_config={"backend": "quanto"}), "compile_config": dict(compile_config=CompileConfig()), "disable_compile": dict(disable_compile=True),
    "speculation_type": dict(speculation_type="dflash"), "trust_remote_code": dict(trust_remote_code=False), "diversity_penalty": dict(diversity_penalty=0.0), "num_beam_groups": dict(num_beam_groups=1),
    "logits_to_keep": dict(logits_to_keep=2), "continuous_batching_config": dict(continuous_batching_config={}),
}
REFUSED = {
    "token_healing": True, "max_matching_ngram_size": 3, "assistant_ensemble_weight": 0.5, "penalty_alpha": 0.6,
    "dola_layers": "low", "constraints": [1], "force_words_ids": [[3]], "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.3, "assistant_lookbehind": 4, "target_lookbehind": 4,
    "synced_gpus": True, "num_beam_groups": 2, "diversity_penalty": 0.5,
}
ELSEWHERE = {  # and where they are tested
    "inputs", "num_assistant_tokens", "assistant_model", "streamer", "custom_generate",  # ours, or every test's
    "stop_strings",  # test_stopping
    "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp",  # test_stock_drafts, test_mtp
    "bos_token_id", "decoder_start_token_id",  # below
    "is_assistant",  # transformers sets it in the config of its own assistant
}


def known(options: dict) -> dict:
    """Less what this version of transformers does not know."""
    config = GenerationConfig()
    return {name: value for name, value in options.items() if hasattr(config, name) or name not in ("top_h", "max_cache_len", "speculation_type", "continuous_batching_config")}


def run(model, options: dict, **more):
    torch.manual_seed(0)
    return model.generate(**padded(ROWS), **{**BASE, **known(options), **more})


def same(ours, theirs) -> None:
    assert type(theirs) is torch.Tensor or set(theirs.keys()) - {CACHE} == set(ours.keys()) - {CACHE}
    assert torch.equal(*(out if torch.is_tensor(out) else out.sequences for out in (ours, theirs)))
    for name in () if torch.is_tensor(theirs) else ("scores", "logits"):
        for own, other in zip(getattr(ours, name) or (), getattr(theirs, name) or ()):
            torch.testing.assert_close(own, other, atol=1e-3, rtol=1e-4)


def test_there_is_no_argument_that_nobody_has_looked_at():
    if VERSION > (5, 24):
        pytest.skip("a transformers that nobody has looked at")
    names = {*vars(GenerationConfig()), *inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs", "transformers_version"}
    assert {name for name in names if not name.startswith("_")} <= {*HEEDED, *NO_MEANING, *REFUSED, *ELSEWHERE}


@pytest.mark.share(1 / 2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HEEDED)
def test_what_is_heeded_is_heeded_as_in_plain_generate(name):
    model = enabled(tiny_llama(attn="eager"))
    theirs, draft = run(model, HEEDED[name]), None if name in ("early_stopping",) else perturbed(model, 0.02)
    ours = run(model, HEEDED[name], speculative=True, num_assistant_tokens=4, assistant_model=draft)
    same(ours, theirs)
    if name == "max_cache_len" and hasattr(GenerationConfig(), name):
        assert ours[CACHE].layers[0].keys.shape == theirs[CACHE].layers[0].keys.shape == (2, 2, 50, 8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NO_MEANING)
def test_what_has_no_meaning_changes_no_text(name):
    model = enabled(tiny_llama())
    assert torch.equal(run(model, NO_MEANING[name], speculative=True, num_assistant_tokens=4), run(model, {}))


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("by_config", [False, True], ids=["keyword", "config"])
def test_what_is_refused_is_refused_by_name(name, by_config):
    base = BASE | (dict(num_beams=2) if name in ("num_beam_groups", "diversity_penalty") else {})
    model, config = enabled(tiny_llama()), GenerationConfig(**base)
    if by_config and not hasattr(config, name):
        pytest.skip("no part of a config")
    setattr(config, name, REFUSED[name])
    with pytest.raises((ValueError, TypeError), match=name):
        model.generate(**padded(ROWS), **dict(generation_config=config) if by_config else {**base, name: REFUSED[name]}, speculative=True)


def test_a_call_without_a_prompt_begins_with_the_token_for_that():
    model = enabled(tiny_llama())
    options = dict(BASE, bos_token_id=5)
    assert torch.equal(model.generate(**options, speculative=True), model.generate(**options))
    line = READERS[0]
    reader = enabled(line.model())
    options = dict(BASE, decoder_start_token_id=11)
    assert torch.equal(reader.generate(**sources(line.kind), **options, speculative=True), reader.generate(**sources(line.kind), **options))
