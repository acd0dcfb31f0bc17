"""Quantised caches: what transformers' own layers quantise together, and when, is what they quantise in plain generate; so is the text, and the cache that comes back.

The backends of transformers' names may not be installed: a stand-in of its own class takes the place of quanto's. That of "fp8" is transformers' own.
"""

import random
from unittest.mock import patch

import pytest
import torch
from transformers import GenerationConfig, QuantizedCache, cache_utils

from hf_specdec import SpeculativeDecoder
from hf_specdec.caches import CACHE
from hf_specdec.drafts import EarlyExitDraft, NGramRecyclingDraft
from hf_specdec.quantised_cache import QuantisedLayer
from tests.helpers import build, enabled, padded, perturbed, tiny_llama

SHARED = dict(max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True)
SMALL = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
KINDS = {"Llama": tiny_llama, "Qwen3": lambda seed: build("qwen3", seed=seed, head_dim=8, **SMALL), "Phi 3": lambda seed: build("phi3", seed=seed, pad_token_id=0, **SMALL)}
FP8 = pytest.param({"backend": "fp8"}, id="fp8", marks=pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="newer than this transformers"))
LENGTHS = [*(pytest.param({"backend": "quanto", "nbits": 4, "residual_length": n}, id=str(n)) for n in (1, 2, 5, 8, 128)), FP8]
DRAFTS = {"lookup": lambda model: None, "model": lambda model: perturbed(model, 0.02), "tree": lambda model: NGramRecyclingDraft(), "early exit": lambda model: EarlyExitDraft(model, 1)}


class FourBits(cache_utils.QuantizedLayer):
    """Groups of 8 numbers between their least and their most."""

    def _quantize(self, tensor, axis):
        groups = tensor.reshape(-1, 8)
        least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        step = ((most - least) / 15).clamp(min=1e-9)
        return ((groups - least) / step).round(), step, least, tensor.shape

    def _dequantize(self, q_tensor):
        numbers, step, least, shape = q_tensor
        return (numbers * step + least).reshape(shape)


@pytest.fixture(autouse=True)
def stand_in():
    with patch.object(cache_utils, "QuantoQuantizedLayer", FourBits):
        yield


def prompt(seed):
    rng = random.Random(seed)
    return [[rng.randrange(1, 60) for _ in range(rng.randint(1, 12))] * 2]


def ours(model, inputs, draft=None, **options):
    return enabled(model).generate(**inputs, **SHARED | options, speculative=True, assistant_model=draft, num_assistant_tokens=4)


def by_name(config, **more):
    return dict(cache_implementation="quantized", cache_config=dict(config), **more)  # older versions of transformers write into it


def same_numbers(one, other):
    assert type(one) is type(other) is QuantizedCache
    for own, theirs in zip(one.layers, other.layers):
        assert type(own) is type(theirs) and own.cumulative_length == theirs.cumulative_length and own.keys.shape == theirs.keys.shape
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(own, name), getattr(theirs, name), atol=2e-3, rtol=0)
            torch.testing.assert_close(*(part._dequantize(getattr(part, f"_quantized_{name}")) for part in (own, theirs)), atol=2e-3, rtol=0)


@pytest.mark.share(1 / 8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", LENGTHS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_by_name(kind, config, draft):
    for seed in range(3):
        model, inputs = KINDS[kind](seed), padded(prompt(seed))
        theirs = model.generate(**inputs, **SHARED, **by_name(config))
        out = ours(model, inputs, DRAFTS[draft](model), **by_name(config))
        assert torch.equal(out.sequences, theirs.sequences) and (out.speculation.proposed or config.get("residual_length") == 1)
        same_numbers(out[CACHE], theirs[CACHE])


def _of_others(self, count, own=QuantisedLayer.hand_over):
    self.keys, self.values = (torch.cat([part[:, :, :1], part[:, :, :-1]], dim=2) for part in (self.keys, self.values))
    own(self, count)


STEPS = {"room": (QuantisedLayer, "room", lambda self, length: 64), "others": (QuantisedLayer, "hand_over", _of_others),
         "never": (QuantisedLayer, "_left", lambda self, apart: 64)}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_what_leaves_out_a_step_is_seen(step):
    """A negative control: with passes beyond the token that quantises, with others than the committed tokens quantised, and without any, texts are others."""
    for seed in range(8):
        model, inputs, config = tiny_llama(seed), padded(prompt(seed)), {"backend": "quanto", "residual_length": 5}
        expected = model.generate(**inputs, **SHARED, **by_name(config))
        with patch.object(*STEPS[step]):
            if not torch.equal(ours(model, inputs, perturbed(model, 0.1), **by_name(config)).sequences, expected.sequences):
                return
    pytest.fail("nothing is seen of it")


def test_a_text_of_a_quantised_cache_is_another_one():
    assert any(not torch.equal(*(model.generate(**padded(prompt(seed)), **SHARED, **given).sequences for given in ({}, by_name({"backend": "quanto", "residual_length": 8}))))
               for seed in range(3) for model in [tiny_llama(seed)])  # fmt: skip


@pytest.mark.parametrize("config", [LENGTHS[2], FP8])
def test_sampled_tokens_follow_the_law_that_plain_generate_draws_them_from(config):
    """The logits that each was drawn from are those that its text gets token by token, with a quantised cache."""
    model, (row,) = tiny_llama(3), prompt(3)
    out = ours(model, padded([row]), perturbed(model, 0.02), **by_name(config, do_sample=True, output_logits=True))
    cache, ids = QuantizedCache(config=model.config, **config), out.sequences
    logits = [model(ids[:, : len(row)], **{CACHE: cache}).logits[:, -1]]
    logits += [model(ids[:, i : i + 1], **{CACHE: cache}).logits[:, -1] for i in range(len(row), ids.shape[1] - 1)]
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(logits), atol=2e-3, rtol=0)
    assert out.speculation.accepted


def test_pieces_of_a_prompt_are_quantised_as_they_are_read():
    for seed, chunk in ((0, 3), (1, 4), (2, 7), (3, 5)):
        model, inputs, options = tiny_llama(seed), padded([prompt(seed)[0] * 3]), by_name({"backend": "quanto", "residual_length": 6}, prefill_chunk_size=chunk)
        theirs, out = model.generate(**inputs, **SHARED, **options), ours(model, inputs, **options)
        assert torch.equal(out.sequences, theirs.sequences)
        same_numbers(out[CACHE], theirs[CACHE])


@pytest.mark.parametrize("config", [LENGTHS[2], LENGTHS[4], FP8])
def test_a_caller_s_own_is_filled_and_continued_by_either_generate(config):
    for seed in range(3):
        model, inputs = enabled(tiny_llama(seed)), padded(prompt(seed))
        caches = [QuantizedCache(config=model.config, **config) for _ in range(2)]
        generates = model.generate, lambda **given: model.generate(**given, speculative=True, num_assistant_tokens=4)
        for order in ((0, 1), (1, 0), (1, 1)):
            caches = [QuantizedCache(config=model.config, **config) for _ in range(2)]
            texts = []
            for turns, cache in zip(((0, 0), order), caches):
                first = generates[turns[0]](**inputs, **SHARED, **{CACHE: cache})
                again = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
                second = generates[turns[1]](input_ids=again, attention_mask=torch.ones_like(again), **SHARED, **{CACHE: cache})
                assert first[CACHE] is second[CACHE] is cache
                texts.append(second.sequences)
            assert torch.equal(*texts)
            same_numbers(*caches)


def test_from_every_place_where_it_is_said():
    model, inputs, given = enabled(tiny_llama(1)), padded(prompt(1)), by_name({"backend": "quanto", "residual_length": 8})
    expected = model.generate(**inputs, **SHARED, **given).sequences
    said = GenerationConfig(**SHARED, **given)
    assert torch.equal(model.generate(**inputs, generation_config=said, speculative=True).sequences, expected)
    assert torch.equal(model.generate(**inputs, generation_config=said, custom_generate=SpeculativeDecoder()).sequences, expected)
    model.generation_config.cache_implementation, model.generation_config.cache_config = given.values()
    assert torch.equal(ours(model, inputs).sequences, expected)


def test_a_call_that_breaks_leaves_a_caller_s_own_as_it_was():
    model, inputs = enabled(tiny_llama(1)), padded(prompt(1))
    cache = QuantizedCache(config=model.config, backend="quanto", residual_length=4)
    streamed = []

    def streamer(row, tokens, drafted):
        streamed.append(tokens)
        if len(streamed) > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(**inputs, **SHARED, **{CACHE: cache}, speculative=True, streamer=streamer)
    assert cache.get_seq_length() == 0 and torch.equal(ours(model, inputs, **{CACHE: cache}).sequences, model.generate(**inputs, **SHARED, **by_name({"residual_length": 4})).sequences)
