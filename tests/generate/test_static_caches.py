"""Static caches: a call that only differs in where keys and values lie gives the same text, and hands back a cache of that kind."""

import copy
import inspect

import pytest
import torch
from transformers import EncoderDecoderCache, GenerationConfig, StaticCache

from hf_specdec import SpeculativeDecoder
from hf_specdec.caches import CACHE
from hf_specdec.drafts import NGramRecyclingDraft
from tests.architectures import FAMILIES
from tests.encoder_decoders import FAMILIES as READERS, sources
from tests.helpers import build, enabled, padded, perturbed, tiny_llama

ROWS = [[1, 2, 3, 1, 2, 7, 8, 1, 2], [4, 3], [5, 4, 5, 4, 5, 4, 5]]
SHARED = dict(max_new_tokens=15, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True)
STATIC = SHARED | dict(cache_implementation="static")
SMALL = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
KINDS = {
    "Llama": tiny_llama,
    "Gemma 3": lambda: build("gemma3_text", sliding_window=6, layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False, **SMALL),
    "Mistral": lambda: build("mistral", sliding_window=6, **SMALL),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def ours(model, inputs, draft=None, **options):
    return enabled(model).generate(**inputs, **options, speculative=True, assistant_model=draft, num_assistant_tokens=4)


def same_numbers(one: StaticCache, other: StaticCache, mask: torch.Tensor) -> None:
    """Of the last columns that both hold, and where `mask` [B, P] hides nothing; a sliding layer holds some of the last."""
    length = int(one.get_seq_length())
    shown = torch.cat([mask, mask.new_ones(len(mask), length - mask.shape[1])], dim=1).bool()
    assert type(one) is type(other) is StaticCache and length == int(other.get_seq_length())
    for own, theirs in zip(one.layers, other.layers):
        assert type(own) is type(theirs) and own.keys.shape == theirs.keys.shape
        held = min(length, own.keys.shape[2])
        for part, wanted in ((own.keys, theirs.keys), (own.values, theirs.values)):
            kept = shown[:, None, length - held :, None]
            torch.testing.assert_close(part[:, :, :held] * kept, wanted[:, :, :held] * kept, atol=2e-3, rtol=0)


@pytest.mark.share(1 / 2)
@every_kind
@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["alone", "batch"])
@pytest.mark.parametrize("draft", [lambda model: None, lambda model: perturbed(model, 0.02), lambda model: NGramRecyclingDraft()], ids=["lookup", "model", "tree"])
def test_by_name(kind, rows, draft):
    model, inputs = KINDS[kind](), padded(rows)
    theirs, out = copy.deepcopy(model).generate(**inputs, **STATIC), ours(model, inputs, draft(model), **STATIC)  # before 5.17, a model fills one cache again and again
    assert torch.equal(out.sequences, theirs.sequences) and out.speculation.proposed
    same_numbers(out[CACHE], theirs[CACHE], inputs["attention_mask"])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["sliding_window", "hybrid_chunked", "hybrid"])
def test_by_the_names_of_before_from_every_place_where_they_are_said(name):
    model, inputs = enabled(tiny_llama()), padded(ROWS)
    expected = model.generate(**inputs, **SHARED | dict(cache_implementation=name))
    said = GenerationConfig(**SHARED | dict(cache_implementation=name))
    for out in (ours(model, inputs, **SHARED | dict(cache_implementation=name)), model.generate(**inputs, generation_config=said, speculative=True),
                model.generate(**inputs, generation_config=said, custom_generate=SpeculativeDecoder())):
        assert torch.equal(out.sequences, expected.sequences) and type(out[CACHE]) is type(expected[CACHE])
    model.generation_config.cache_implementation = name
    assert torch.equal(ours(model, inputs, **SHARED).sequences, expected.sequences)


@pytest.mark.parametrize("more", [{}, {"return_dict_in_generate": False}, {"num_beams": 2}, {"output_attentions": True}], ids=["alone", "ids", "beams", "refused"])
def test_plain_generate_goes_on_after_such_a_call(more):
    model, inputs = enabled(tiny_llama()), padded(ROWS)
    expected = copy.deepcopy(model).generate(**inputs, **STATIC).sequences
    try:
        ours(model, inputs, **STATIC | more)
    except ValueError:
        assert "output_attentions" in more
    assert torch.equal(model.generate(**inputs, **STATIC).sequences, expected)


def test_sampled_and_in_beams():
    model, inputs = enabled(tiny_llama()), padded(ROWS)
    drawn = [model.generate(**inputs, **options | dict(do_sample=True), speculative={"seed": 3}, num_assistant_tokens=4).sequences for options in (SHARED, STATIC)]
    assert torch.equal(*drawn)
    assert torch.equal(ours(model, inputs, **STATIC, num_beams=3).sequences, model.generate(**inputs, **STATIC, num_beams=3).sequences)


@pytest.mark.parametrize("name", ["T5", "BART", "T5Gemma", "Pegasus"])
def test_of_encoder_decoders(name):
    line = next(line for line in READERS if line.name == name)
    model, inputs = enabled(line.model()), sources(line.kind)
    theirs, out = copy.deepcopy(model).generate(**inputs, **STATIC), ours(model, inputs, perturbed(model, 0.02), **STATIC)
    assert torch.equal(out.sequences, theirs.sequences)
    own, other = out[CACHE], theirs[CACHE]
    assert type(own) is type(other) is EncoderDecoderCache and own.is_updated == other.is_updated
    same_numbers(own.self_attention_cache, other.self_attention_cache, torch.ones(3, 1).long())
    for part, wanted in zip(own.cross_attention_cache.layers, other.cross_attention_cache.layers):
        torch.testing.assert_close(part.keys, wanted.keys, atol=2e-3, rtol=0)
        torch.testing.assert_close(part.values, wanted.values, atol=2e-3, rtol=0)


@pytest.mark.share(1 / 8)
@pytest.mark.parametrize("line", [line for line in FAMILIES if line.window == "states" and not line.name.startswith("Inkling")], ids=lambda line: line.name)
def test_of_models_that_carry_states(line):
    """(What plain generate writes of Inkling goes by its cache.)"""
    model, inputs = line.model("eager"), padded(ROWS[:1])
    if "encoder_outputs" in inspect.signature(model.forward).parameters:
        pytest.skip("a decoder of what an encoder has read")
    theirs, out = copy.deepcopy(model).generate(**inputs, **STATIC), ours(model, inputs, perturbed(model, 0.02), **STATIC)
    assert torch.equal(out.sequences, theirs.sequences) and type(out[CACHE]) is type(theirs[CACHE])
    for own, other in zip(out[CACHE].layers, theirs[CACHE].layers):
        for name in ("conv_states", "recurrent_states"):
            for part, wanted in zip(getattr(own, name, {}).values(), getattr(other, name, {}).values()):
                assert (part is None) == (wanted is None)
                assert part is None or torch.allclose(part, wanted, atol=1e-2)


@every_kind
@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["alone", "batch"])
def test_a_caller_s_own_is_read_and_filled_in_place_over_two_turns_of_either_generate(kind, rows):
    model, inputs = enabled(KINDS[kind]()), padded(rows)
    cache = StaticCache(config=model.config, max_cache_len=80)
    first = ours(model, inputs, perturbed(model, 0.02), **{CACHE: cache}, **SHARED)
    assert first[CACHE] is cache and torch.equal(first.sequences, model.generate(**inputs, **SHARED).sequences)
    more = torch.tensor([[9, 8, 7]] * len(rows))
    again = dict(input_ids=torch.cat([first.sequences, more], dim=1), attention_mask=torch.cat([inputs["attention_mask"], torch.ones(len(rows), 18).long()], dim=1))
    expected, places = model.generate(**again, **SHARED).sequences, [layer.keys.data_ptr() for layer in cache.layers]
    for generate in (model.generate, lambda **options: ours(model, {}, **options)):
        taken = copy.deepcopy(cache)
        assert torch.equal(generate(**again, **{CACHE: taken}, **SHARED).sequences, expected)
    assert torch.equal(ours(model, again, **{CACHE: cache}, **SHARED).sequences, expected)
    assert [layer.keys.data_ptr() for layer in cache.layers] == places and int(cache.get_seq_length()) == expected.shape[1] - 1


def test_one_of_another_dtype_or_another_text_is_seen():
    """What is in it counts, and it keeps its numbers' format."""
    model, inputs = enabled(tiny_llama()), padded(ROWS[:1])
    first = model.generate(**inputs, **STATIC | dict(max_new_tokens=4))
    cache = StaticCache(config=model.config, max_cache_len=60)
    for index, layer in enumerate(first[CACHE].layers):
        cache.update(layer.keys[:, :, :12].bfloat16(), -layer.values[:, :, :12].bfloat16(), index)
    out = ours(model, dict(input_ids=first.sequences), **{CACHE: cache}, **SHARED)
    assert not torch.equal(out.sequences, model.generate(first.sequences, **SHARED).sequences)
    assert cache.layers[0].keys.dtype == torch.bfloat16 and int(cache.get_seq_length()) == out.sequences.shape[1] - 1


def test_one_that_is_too_short_is_refused_before_any_work():
    model, inputs = enabled(tiny_llama()), padded(ROWS)
    cache = StaticCache(config=model.config, max_cache_len=22)
    with pytest.raises(ValueError, match="StaticCache has room for 22 tokens and the call may need 23. Pass one with max_cache_len=23, or lower max_new_tokens"):
        ours(model, inputs, **{CACHE: cache}, **SHARED)
    assert int(cache.get_seq_length()) == 0
    assert int(ours(model, inputs, **{CACHE: cache}, **SHARED | dict(max_new_tokens=14))[CACHE].get_seq_length()) == 22


def test_hidden_states_are_the_same_and_attentions_over_empty_columns_are_refused():
    model, inputs = enabled(tiny_llama(attn="eager")), padded(ROWS[:1])
    theirs, out = model.generate(**inputs, **STATIC, output_hidden_states=True), ours(model, inputs, **STATIC, output_hidden_states=True)
    for own, other in zip(out.hidden_states, theirs.hidden_states):
        torch.testing.assert_close(own, other, atol=2e-3, rtol=0)
    with pytest.raises(ValueError, match="output_attentions=True: not available over all columns of a static cache"):
        ours(model, inputs, **STATIC, output_attentions=True)
