"""A cache in and out: a second turn continues from what the first has cached, under our generate and under plain generate."""

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, DynamicCache, StoppingCriteria, StoppingCriteriaList

import hf_specdec
from hf_specdec.compat import CACHE
from tests.architectures import FAMILIES
from tests.helpers import ScriptedDraft, build, enabled, padded, perturbed, plain, prompts, repetitive, speculate, tiny_llama

NAMES = ["Llama", "Mistral", "Gemma 3 (text)", "GPT-2", "Qwen2 (windowed layers)", "GPT-BigCode (one K/V head)", "BLOOM", "DeepSeek-V3"]
FIRST, SECOND = 15, 12


def made(name: str):
    family = next(line for line in FAMILIES if line.name == name)
    return family.model("eager")


def options(new: int, **more) -> dict:
    return dict(max_new_tokens=new, do_sample=False, pad_token_id=0, return_dict_in_generate=True, **more)


def ours(model, ids, cache, new=SECOND, draft=None, **more):
    mask = more.pop("attention_mask", torch.ones_like(ids))
    return enabled(model).generate(input_ids=ids, attention_mask=mask, **{CACHE: cache}, speculative=True, assistant_model=draft,
                                   num_assistant_tokens=4, **options(new, **more))


def stock(model, ids, cache=None, new=SECOND, **more):
    mask = more.pop("attention_mask", torch.ones_like(ids))
    return model.generate(input_ids=ids, attention_mask=mask, **{CACHE: cache}, **options(new, **more))


def next_turn(sequences, seed=8):
    """The conversation so far, and what the user says next."""
    return torch.cat([sequences, torch.tensor(prompts(*[5] * len(sequences), seed=seed))], dim=1)


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("draft", ["lookup", "model"])
@pytest.mark.parametrize("name", NAMES)
def test_two_turns_with_the_returned_cache_equal_plain_generate_from_scratch(name, draft):
    model, ids = made(name), torch.tensor(repetitive(14))
    drafting = perturbed(model) if draft == "model" else None
    first = ours(model, ids, None, FIRST, drafting)
    again = next_turn(first.sequences)
    second = ours(model, again, first[CACHE], draft=drafting)
    assert torch.equal(first.sequences, stock(model, ids, new=FIRST).sequences)
    assert torch.equal(second.sequences, stock(model, again).sequences)


@pytest.mark.parametrize("name", NAMES)
def test_the_returned_cache_continues_under_plain_generate(name):
    model, ids = made(name), torch.tensor(repetitive(14))
    first = ours(model, ids, None, FIRST, perturbed(model))
    again = next_turn(first.sequences)
    assert isinstance(first[CACHE], DynamicCache)
    assert torch.equal(stock(model, again, first[CACHE]).sequences, stock(model, again).sequences)


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_from_plain_generate_continues_under_ours(name):
    model, ids = made(name), torch.tensor(repetitive(14))
    first = stock(model, ids, new=FIRST)
    again = next_turn(first.sequences)
    assert torch.equal(ours(model, again, first[CACHE], draft=perturbed(model)).sequences, stock(model, again).sequences)


@pytest.mark.parametrize("name", [name for name in ("Llama", "MOSS-Transcribe") if any(line.name == name for line in FAMILIES)])
def test_the_cache_of_a_ragged_batch_goes_from_either_generate_to_either(name):
    """Also where plain generate counts padding as positions."""
    model, inputs = made(name), padded(prompts(12, 5, 8))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    first, theirs = ours(model, ids, None, FIRST, attention_mask=mask), stock(model, ids, new=FIRST, attention_mask=mask)
    assert torch.equal(first.sequences, theirs.sequences)
    again = next_turn(first.sequences)
    mask = torch.cat([mask, torch.ones(3, FIRST + 5, dtype=torch.long)], dim=1)
    expected = stock(model, again, attention_mask=mask).sequences
    for cache in (first[CACHE], theirs[CACHE]):
        assert torch.equal(stock(model, again, copy.deepcopy(cache), attention_mask=mask).sequences, expected)
        assert torch.equal(ours(model, again, cache, attention_mask=mask).sequences, expected)


@pytest.mark.parametrize("name", NAMES)
def test_an_explicit_cache_is_filled_in_place_over_two_turns(name):
    model, ids = made(name), torch.tensor(repetitive(14))
    cache = DynamicCache(config=model.config)
    first = ours(model, ids, cache, FIRST)
    assert first[CACHE] is cache and cache.get_seq_length() == first.sequences.shape[1] - 1
    again = next_turn(first.sequences)
    second = ours(model, again, cache)
    assert torch.equal(second.sequences, stock(model, again).sequences)
    assert cache.get_seq_length() == second.sequences.shape[1] - 1


def test_a_layer_that_is_passed_over_without_an_image_holds_nothing_in_the_returned_cache_either():
    model, ids = made("Mllama"), torch.tensor(repetitive(14))
    mine, theirs = ours(model, ids, None, FIRST, perturbed(model)), stock(model, ids, new=FIRST)
    assert torch.equal(mine.sequences, theirs.sequences)
    assert [layer.keys is None for layer in mine[CACHE].layers] == [layer.keys is None for layer in theirs[CACHE].layers] == [False, True, False]
    again = next_turn(mine.sequences)
    assert torch.equal(stock(model, again, copy.deepcopy(mine[CACHE])).sequences, stock(model, again).sequences)
    for cache in (mine[CACHE], theirs[CACHE]):
        assert torch.equal(ours(model, again, cache).sequences, stock(model, again).sequences)
    seen = stock(model, ids, new=FIRST)[CACHE]
    seen.update(torch.zeros(1, 2, 17, 8), torch.zeros(1, 2, 17, 8), 1)
    with pytest.raises(ValueError, match="holds an image.*speculative=False"):
        ours(model, again, seen)
    with pytest.warns(UserWarning, match="target: .* runs without compile=True: it passes over layers"):
        assert torch.equal(speculate(model, ids.tolist(), speculative={"compile": True}, max_new_tokens=FIRST).sequences, theirs.sequences)


@pytest.mark.skipif("deepseek_v32" not in CONFIG_MAPPING or CACHE != "cache", reason="this transformers has no indexed attention")
def test_the_cache_of_a_model_that_keeps_the_keys_of_an_indexer_is_neither_taken_nor_handed_back():
    model, ids = made("DeepSeek-V3.2"), torch.tensor(repetitive(14))
    theirs = stock(model, ids, new=FIRST)
    mine = ours(model, ids, None, FIRST, perturbed(model))
    assert torch.equal(mine.sequences, theirs.sequences) and mine.get(CACHE) is None
    with pytest.raises(ValueError, match="DynamicCache of a model that keeps the keys of an indexer cannot be continued.*the whole text as input_ids"):
        ours(model, next_turn(theirs.sequences), theirs[CACHE])
    with pytest.warns(UserWarning, match="target: .* runs without compile=True: it keeps the keys of an indexer"):
        assert torch.equal(speculate(model, ids.tolist(), speculative={"compile": True}, max_new_tokens=FIRST).sequences, theirs.sequences)


def test_an_explicit_cache_is_filled_where_only_the_tensor_is_asked_for():
    model, ids = made("Llama"), torch.tensor(repetitive(14))
    cache = DynamicCache()
    out = enabled(model).generate(input_ids=ids, **{CACHE: cache}, speculative=True, max_new_tokens=FIRST, do_sample=False, pad_token_id=0)
    assert cache.get_seq_length() == out.shape[1] - 1
    again = next_turn(out)
    assert torch.equal(stock(model, again, cache).sequences, stock(model, again).sequences)


def test_a_cache_filled_through_the_decoder_object_continues_too():
    model, ids = made("Llama"), torch.tensor(repetitive(14))
    cache = DynamicCache()
    decoder = hf_specdec.SpeculativeDecoder(perturbed(model))
    out = model.generate(input_ids=ids, **{CACHE: cache}, custom_generate=decoder, **options(FIRST))
    again = next_turn(out.sequences)
    assert torch.equal(stock(model, again, out[CACHE]).sequences, stock(model, again).sequences)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "GPT-BigCode (one K/V head)"])
def test_the_returned_keys_and_values_are_plain_generates(name):
    model, ids = made(name), torch.tensor(repetitive(14))
    mine, theirs = ours(model, ids, None, FIRST, perturbed(model))[CACHE], stock(model, ids, new=FIRST)[CACHE]
    assert len(mine.layers) == len(theirs.layers)
    for a, b in zip(mine.layers, theirs.layers):
        assert torch.allclose(a.keys, b.keys, atol=1e-4) and torch.allclose(a.values, b.values, atol=1e-4)


def test_the_returned_cache_can_be_cropped():
    model, ids = made("Llama"), torch.tensor(repetitive(14))
    first = ours(model, ids, None, FIRST)
    whole = first[CACHE].get_seq_length()
    again = next_turn(first.sequences[:, :20])
    first[CACHE].crop(-(whole - 20))
    assert torch.equal(stock(model, again, first[CACHE]).sequences, stock(model, again).sequences)


@pytest.mark.parametrize("place", [0, 3, 6])
def test_after_eos_in_a_block_the_cache_holds_the_text_and_nothing_of_the_rest_of_the_block(place):
    model, row = tiny_llama(6), repetitive(9)
    (text,) = plain(model, row)
    first = speculate(model, row, ScriptedDraft.knowing([row[0] + text]), 7, eos_token_id=text[place])
    again = next_turn(first.sequences)
    assert first[CACHE].get_seq_length() == first.sequences.shape[1] - 1
    assert torch.equal(ours(model, again, first[CACHE]).sequences, stock(model, again).sequences)


def test_a_cache_of_all_but_the_last_token_is_enough():
    model, ids = made("Llama"), torch.tensor(repetitive(14))
    with torch.no_grad():
        cache = model(input_ids=ids[:, :-1], use_cache=True)[CACHE]
    assert torch.equal(ours(model, ids, cache).sequences, stock(model, ids).sequences)


def test_scores_of_a_second_turn_are_those_of_its_own_tokens():
    model, ids = made("Llama"), torch.tensor(repetitive(14))
    first = ours(model, ids, None, FIRST)
    again = next_turn(first.sequences)
    mine, theirs = ours(model, again, first[CACHE], output_scores=True), stock(model, again, output_scores=True)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(mine.scores, theirs.scores, strict=True))


# --- ragged batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 3 (text)", "GPT-2"])
@pytest.mark.parametrize("then", ["ours", "plain"])
def test_a_ragged_batch_goes_on_in_a_second_turn(name, then):
    model, rows = made(name), repetitive(13) + prompts(2, 7, seed=2)
    inputs = padded(rows)
    first = enabled(model).generate(**inputs, speculative=True, assistant_model=perturbed(model), num_assistant_tokens=4, **options(FIRST))
    again = next_turn(first.sequences)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, again.shape[1] - 13, dtype=torch.long)], dim=1)
    run = ours if then == "ours" else stock
    second = run(model, again, first[CACHE], attention_mask=mask)
    texts = [ids[keep.bool()].tolist() for ids, keep in zip(again, mask)]
    assert second.sequences[:, again.shape[1]:].tolist() == plain(model, texts, max_new_tokens=SECOND)


def test_rows_that_ended_early_go_on_in_a_second_turn_with_their_padding_masked():
    model, rows = made("Llama"), repetitive(13) + prompts(2, 7, seed=2)
    inputs = padded(rows)
    eos = plain(model, rows)[1][4]
    first = speculate(model, rows, perturbed(model), 4, eos_token_id=eos)
    counts = torch.tensor(first.speculation.new_tokens)[:, None]
    mask = torch.cat([inputs["attention_mask"], (torch.arange(first.sequences.shape[1] - 13) < counts).long(), torch.ones(3, 5, dtype=torch.long)], dim=1)
    again = next_turn(first.sequences)
    texts = [ids[keep.bool()].tolist() for ids, keep in zip(again, mask)]
    assert len(set(first.speculation.new_tokens)) > 1
    second = ours(model, again, first[CACHE], attention_mask=mask)
    assert second.sequences[:, again.shape[1]:].tolist() == plain(model, texts, max_new_tokens=SECOND)


@pytest.mark.parametrize("name", ["Mistral", "Gemma 3 (text)"])
def test_a_cache_of_plain_generate_that_has_dropped_what_a_window_reaches_is_refused(name):
    model, rows = made(name), repetitive(14) + prompts(9, seed=2)
    inputs, mask = padded(rows), torch.ones((2, 34), dtype=torch.long)
    mask[:, :14] = inputs["attention_mask"]
    first = model.generate(**inputs, **options(FIRST))
    again = next_turn(first.sequences)
    texts = [ids[keep.bool()].tolist() for ids, keep in zip(again, mask)]
    second = ours(model, again, first[CACHE], attention_mask=mask)
    assert second.sequences[:, 34:].tolist() == plain(model, texts, max_new_tokens=SECOND)
    mask[1, 24:29] = 0  # as if the row had ended
    with pytest.raises(ValueError, match=f"{CACHE}: its sliding layers hold the last 7 columns.*padding among them.*Leave it out"):
        ours(model, again, model.generate(**inputs, **options(FIRST))[CACHE], attention_mask=mask)


class LastAt(StoppingCriteria):
    """Row by row, by the first token of its prompt: how many tokens it gets."""

    def __init__(self, lengths: dict[int, int]):
        self.lengths = lengths

    def __call__(self, input_ids, scores, **more):
        return torch.tensor([len(row) >= self.lengths[row[0]] for row in input_ids.tolist()])


@pytest.mark.parametrize("counts", [(12, 6, 3), (4, 12, 12), (12, 11, 10), (9, 9, 9), (5, 5, 12)])
@pytest.mark.parametrize("known", [0, 1, 2])
def test_whichever_row_ends_first_the_next_turn_goes_on_and_no_pass_is_made_for_the_cache_alone(counts, known):
    """One row is drafted for and ends rounds before the others, though it may be the longest."""
    model, rows = tiny_llama(6), [[5, *prompts(6, seed=3)[0]], [6, *prompts(4, seed=4)[0]], [7, *prompts(9, seed=5)[0]]]
    draft = ScriptedDraft.knowing([rows[known] + plain(model, [rows[known]], max_new_tokens=16)[0]])
    lengths = {row[0]: len(row) + count for row, count in zip(rows, counts)}
    passes, inputs = [], padded(rows)
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    first = enabled(model).generate(**inputs, speculative=True, assistant_model=draft, num_assistant_tokens=7,
                                    stopping_criteria=StoppingCriteriaList([LastAt(lengths)]), **options(16))
    hook.remove()
    trace = first.speculation
    assert trace.new_tokens == list(counts) and trace.target_calls == len(trace.rounds)
    assert len(passes) - len(trace.rounds) <= 1  # where several rows end with the last round
    width, most = inputs["input_ids"].shape[1], max(counts)
    mask = torch.cat([inputs["attention_mask"], (torch.arange(most) < torch.tensor(counts)[:, None]).long(), torch.ones(3, 5, dtype=torch.long)], dim=1)
    again = next_turn(first.sequences)
    assert again.shape[1] == width + most + 5
    texts = [ids[keep.bool()].tolist() for ids, keep in zip(again, mask)]
    second = ours(model, again, first[CACHE], attention_mask=mask)
    assert second.sequences[:, again.shape[1]:].tolist() == plain(model, texts, max_new_tokens=SECOND)


def test_holes_in_a_mask_are_read_as_padding():
    model, (row,) = made("Llama"), prompts(8)
    ids, mask = torch.tensor([row[:3] + [0, 0] + row[3:]]), torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1, 1]])
    assert ours(model, ids, None, attention_mask=mask).sequences[:, 10:].tolist() == plain(model, [row], max_new_tokens=SECOND)


def test_a_call_with_use_cache_false_gives_the_same_text():
    model, row = made("Llama"), repetitive(14)
    out = speculate(model, row, None, 4, use_cache=False)
    assert out.sequences[0, 14:].tolist() == plain(model, row)[0]
    assert getattr(out, CACHE) is None  # as in a plain call


@pytest.mark.parametrize("held", [0, 9])
def test_a_cache_beside_use_cache_false_is_refused_as_plain_generate_makes_another_text_of_the_two(held):
    model, ids = tiny_llama(6), torch.tensor(repetitive(14))
    cache = filled(model, ids[:, :held]) if held else DynamicCache()
    with pytest.raises(ValueError, match=f"use_cache=False beside {CACHE}.*one of the two"):
        ours(model, ids, cache, use_cache=False)
    assert cache.get_seq_length() == held


# --- caches that are not the call's ---------------------------------------------------------------------------------------


def filled(model, ids) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache})
    return cache


@pytest.mark.parametrize(("held", "rows"), [(3, 1), (1, 3)])
def test_a_cache_of_another_number_of_rows_is_refused(held, rows):
    model, ids = tiny_llama(6), torch.tensor(repetitive(14))
    cache = filled(model, ids[:, :9].repeat(held, 1))
    with pytest.raises(ValueError, match=f"{CACHE} holds {held} rows and the call has {rows}.*leave it out"):
        ours(model, ids.repeat(rows, 1), cache)
    assert cache.get_seq_length() == 9 and len(cache.layers[0].keys) == held


def test_a_cache_serves_several_returned_sequences_once_it_holds_as_many_rows_as_in_a_plain_call():
    model, ids = tiny_llama(6), torch.tensor(repetitive(14))
    alike = dict(do_sample=True, top_k=1, num_return_sequences=3, pad_token_id=0, max_new_tokens=SECOND)
    cache = filled(model, ids[:, :9])
    with pytest.raises(ValueError, match=f"{CACHE} holds 1 rows and the call has 3.*batch_repeat_interleave"):
        enabled(model).generate(ids, **{CACHE: cache}, speculative=True, **alike)
    cache.batch_repeat_interleave(3)
    out = enabled(model).generate(ids, **{CACHE: cache}, speculative=True, **alike)
    assert out[:, 14:].tolist() == plain(model, ids.tolist(), max_new_tokens=SECOND) * 3


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_of_another_number_of_layers_is_refused(layers):
    model, ids = tiny_llama(6), torch.tensor(repetitive(14))
    with pytest.raises(ValueError, match=f"{CACHE} holds {layers} layers and the target has 2.*leave it out"):
        ours(model, ids, filled(tiny_llama(6, num_hidden_layers=layers), ids[:, :9]))


def test_the_cache_of_a_padded_batch_is_refused_where_positions_are_counted_from_its_length():
    """Plain generate counts the padding, ours does not: each makes another text of the other's cache."""
    model, inputs = made("Pegasus (its decoder)"), padded(prompts(12, 5))
    first = stock(model, inputs["input_ids"], new=FIRST, attention_mask=inputs["attention_mask"])
    again, mask = next_turn(first.sequences), torch.cat([inputs["attention_mask"], torch.ones(2, FIRST + 5, dtype=torch.long)], dim=1)
    with pytest.raises(ValueError, match=f"{CACHE}: PegasusForCausalLM counts the positions.*one by one"):
        ours(model, again, first[CACHE], attention_mask=mask)
    assert torch.equal(ours(model, again[:1], first_row(first[CACHE])).sequences, stock(model, again[:1], first_row(first[CACHE])).sequences)


def first_row(cache):
    one = copy.deepcopy(cache)
    one.batch_select_indices(torch.tensor([0]))
    return one


def test_a_decoder_whose_config_counts_the_layers_of_an_encoder_takes_its_own_cache():
    sizes = dict(vocab_size=61, d_model=32, encoder_layers=3, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
                 decoder_ffn_dim=48, forced_eos_token_id=None)
    model, ids = build("bart", attn="eager", **sizes), torch.tensor(repetitive(14))
    assert torch.equal(ours(model, ids, filled(model, ids[:, :9])).sequences, stock(model, ids).sequences)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cache_in_another_dtype_is_read_in_the_models_own(dtype):
    model, ids = tiny_llama(6), torch.tensor(repetitive(14))
    cache, rounded = filled(model, ids[:, :9]), filled(model, ids[:, :9])
    for own, other in zip(cache.layers, rounded.layers):
        own.keys, own.values = own.keys.to(dtype), own.values.to(dtype)
        other.keys, other.values = own.keys.float(), own.values.float()
    assert torch.equal(ours(model, ids, cache).sequences, stock(model, ids, rounded).sequences)


SHARING = dict(vocab_size=61, vocab_size_per_layer_input=61, hidden_size=32, hidden_size_per_layer_input=8, intermediate_size=48, num_hidden_layers=4,
               num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=8, max_position_embeddings=128,
               layer_types=["sliding_attention", "full_attention"] * 2)


@pytest.mark.parametrize("shared", [0, 2])
def test_layers_that_read_anothers_keys_and_values_have_no_part_in_the_cache(shared):
    model, ids = build("gemma4_text", **SHARING, num_kv_shared_layers=shared), torch.tensor(repetitive(14))
    cache = None
    for turn in range(3):
        out = (stock if turn == 0 else ours)(model, ids, cache)
        assert torch.equal(out.sequences, stock(model, ids).sequences)
        ids, cache = next_turn(out.sequences), out[CACHE]
    assert torch.equal(stock(model, ids, cache).sequences, stock(model, ids).sequences)
