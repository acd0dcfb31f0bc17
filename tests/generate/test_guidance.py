"""guidance_scale: classifier-free guidance. Every candidate of a round has the scores that transformers' processor would have given it, so texts, scores and laws
are those of plain generate, whatever is drafted."""

import copy
import warnings
from collections import Counter

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, TextStreamer, UnbatchedClassifierFreeGuidanceLogitsProcessor

import hf_specdec
from hf_specdec import SpeculativeDecoder, integration
from hf_specdec.caches import CACHE
from hf_specdec.drafts import ModelTreeDraft
from tests import encoder_decoders, seeing
from tests.architectures import FAMILIES
from tests.conformance import law
from tests.conformance.builders import VARIANTS, make
from tests.helpers import FULL, KnowingTreeDraft, ScriptedDraft, generated, padded, perturbed, prompts, repetitive, small_vocabulary_llama, speculate, tiny_llama, word_tokenizer
from tests.pretend_gpu import PretendGpu

ROWS = prompts(5, seed=2) + repetitive(14) + prompts(3, seed=1)
NEGATIVE = prompts(6, seed=9) + prompts(3, seed=10) + prompts(9, seed=11)
NEW = 16
ONLY_HERE = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
MORE = dict(output_scores=True, output_logits=True)


def negative(rows=NEGATIVE, scale: float = 1.7) -> dict:
    given = padded(rows)
    return dict(guidance_scale=scale, negative_prompt_ids=given["input_ids"], negative_prompt_attention_mask=given["attention_mask"])


def stock(model, rows, **options):
    """Plain generate's output for rows together."""
    return model.generate(**padded(rows), **{**ONLY_HERE, **MORE, **options}, return_dict_in_generate=True)


def texts(out, rows) -> list[list[int]]:
    return out.sequences[:, max(map(len, rows)) :].tolist()


def check(model, rows, draft=None, k=4, **options):
    """Ours with text, scores and logits of plain generate's."""
    expected = stock(model, rows, **options)
    out = speculate(model, rows, draft, k, **{**ONLY_HERE, **MORE, **options})
    hf_specdec.disable(model)
    assert texts(out, rows) == texts(expected, rows)
    for ours, theirs in ((out.scores, expected.scores), (out.logits, expected.logits)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs):
            torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-4)
    return out


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("rows", [[1], [0, 1, 2]], ids=["alone", "ragged"])
@pytest.mark.parametrize("given", [True, False], ids=["negative prompt", "last token"])
@pytest.mark.parametrize("scale", [-0.5, 0, 0.5, 1.7, 3])
def test_text_scores_and_logits_are_plain_generates(scale, given, rows, k):
    model, own = tiny_llama(), [ROWS[i] for i in rows]
    options = negative([NEGATIVE[i] for i in rows], scale) if given else dict(guidance_scale=scale)
    finished = [row + text for row, text in zip(own, texts(stock(model, own, **options), own))]
    out = check(model, own, ScriptedDraft.knowing(finished, wrong=5), k, **options)
    assert 0 < out.speculation.acceptance_rate < 1 and out.speculation.lossless


def test_as_many_tokens_are_drafted_as_pay():
    model = tiny_llama()
    for draft in (None, perturbed(model), make("mixture", model, VARIANTS)):
        check(model, ROWS, draft, "auto", **negative())


def test_guidance_changes_the_text():
    model = tiny_llama()
    found = [texts(stock(model, ROWS, **options), ROWS) for options in ({}, dict(guidance_scale=1.7), negative(), negative(scale=0.5))]
    assert all(one != other for i, one in enumerate(found) for other in found[:i])


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("rows", [[1], [0, 1, 2]], ids=["alone", "ragged"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_draft(name, rows):
    model, rows = small_vocabulary_llama(2, 12), [[[1, 2, 3, 1, 2], [4, 3, 4, 3, 4], [5, 4, 5, 4, 5, 4, 5]][i] for i in rows]
    check(model, rows, make(name, model, VARIANTS), **negative([[7, 8, 9], [3], [5, 6]][: len(rows)], 1.5))


@pytest.mark.parametrize("rows", [[1], [0, 1, 2]], ids=["alone", "ragged"])
def test_trees_whose_paths_are_moved_into_place(rows):
    model, rows, given = tiny_llama(), [ROWS[i] for i in rows], negative([NEGATIVE[i] for i in rows])
    finished = [row + text for row, text in zip(rows, texts(stock(model, rows, **given), rows))]
    assert check(model, rows, KnowingTreeDraft(finished), 10, **given).speculation.accepted > 4 * len(rows)
    check(model, rows, ModelTreeDraft(perturbed(model)), 4, **given)


def test_the_model_itself_as_a_draft_is_not_guided():
    model = tiny_llama()
    guided, free = (check(model, ROWS, copy.deepcopy(model), **options).speculation for options in (negative(scale=3), {}))
    assert free.acceptance_rate == 1 and guided.acceptance_rate < 0.9


def line_of(name: str):
    return next((line for line in FAMILIES if line.name == name), None) or pytest.skip(f"this transformers has no {name}")


NAMES = ["Mistral", "Gemma 2", "GPT-2", "OPT", "BLOOM", "Llama 4 (text, chunked)", "Falcon (rotary)", "XGLM", "Qwen3.5 (text)", "LFM2", "Mamba 2"]
LINES = [line for line in FAMILIES if line.name in NAMES and (line.window != "states" or CACHE == "cache")]


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("given", [True, False], ids=["negative prompt", "last token"])
@pytest.mark.parametrize("rows", [[1], [0, 1, 2]], ids=["alone", "ragged"])
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_other_families(line, rows, given):
    """GPT-2 counts the padding of a negative prompt, OPT does not."""
    model, chosen = line.model("eager"), [NEGATIVE[i] for i in rows]
    check(model, [ROWS[i] for i in rows], perturbed(model), **(negative(chosen) if given else dict(guidance_scale=1.7)))


def behind_padding(row: list[int], count: int = 3) -> dict:
    return dict(negative_prompt_ids=torch.tensor([[0] * count + row]), negative_prompt_attention_mask=torch.tensor([[0] * count + [1] * len(row)]))


@pytest.mark.parametrize("name", ["GPT-2", "OPT", "BART (its decoder)", "Marian (its decoder)"])
def test_padding_before_a_negative_prompt_counts_where_it_does_in_plain_generate(name):
    """Also in those that are told no positions; in OPT it does not."""
    model, given = line_of(name).model("eager"), dict(guidance_scale=1.7)
    first = check(model, ROWS[1:2], perturbed(model), **given, **behind_padding(NEGATIVE[1])).scores[0]
    assert torch.allclose(first, stock(model, ROWS[1:2], **given, **behind_padding(NEGATIVE[1], 0)).scores[0], atol=2e-3) == (name == "OPT")


@pytest.mark.parametrize("name", ["GPT-2", "BART (its decoder)"])
def test_padding_before_a_negative_prompt_takes_up_positions(name):
    """128 of them, of which 120 are padding and 3 negative prompt: 6 new tokens, or an end before, whatever is drafted."""
    model, given = line_of(name).model("eager"), dict(guidance_scale=1.7, **behind_padding(NEGATIVE[1], 120))
    always = ScriptedDraft(lambda row: [1] * 16)
    text = texts(check(model, ROWS[1:2], always, 7, **given, max_new_tokens=6), ROWS[1:2])[0]
    ended = speculate(model, ROWS[1:2], always, 7, **{**ONLY_HERE, **given, "max_new_tokens": 30, "eos_token_id": text[4]})
    assert texts(ended, ROWS[1:2])[0] == text[: text.index(text[4]) + 1]
    refuses("^max_new_tokens: a text has outgrown the 8 positions that .* has for it", ROWS[1:2], model, **given, max_new_tokens=7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_processed_as_in_transformers(dtype):
    model = tiny_llama().to(dtype)
    given = negative(NEGATIVE[:1])
    theirs = stock(model, ROWS[:1], **given).scores[0]
    out = speculate(model, ROWS[:1], None, 4, **{**ONLY_HERE, **MORE, **given})
    assert out.scores[0].dtype == torch.float32 and torch.equal(out.scores[0], theirs)


# --- beside other options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [dict(repetition_penalty=1.4), dict(sequence_bias=[[[5], 3.0]]), dict(no_repeat_ngram_size=2), dict(bad_words_ids=[[3], [4, 5]]),
                                     dict(min_new_tokens=6, eos_token_id=list(range(1, 20))), dict(eos_token_id=list(range(1, 12))), dict(use_cache=False),
                                     dict(prefill_chunk_size=4)], ids=lambda options: next(iter(options)))  # fmt: skip
def test_other_options(options):
    alone = {"no_repeat_ngram_size"} | (set() if CACHE == "cache" else {"repetition_penalty"})  # plain generate finds what is repeated in padding, too
    rows = [0, 1, 2] if alone.isdisjoint(options) else [1]
    check(tiny_llama(), [ROWS[i] for i in rows], **negative([NEGATIVE[i] for i in rows]), **options) if "eos_token_id" not in options else ends(options)


def ends(options):
    """Rows that end at different times; what stands behind their ends is padding in both."""
    model = tiny_llama()
    expected = stock(model, ROWS, **negative(), **options)
    out = speculate(model, ROWS, perturbed(model), 4, **{**ONLY_HERE, **negative(), **options})
    assert torch.equal(out.sequences, expected.sequences) and len(set(out.speculation.new_tokens)) > 1


def test_no_guidance_is_none():
    model = tiny_llama()
    expected = stock(model, ROWS).sequences
    for options in (dict(guidance_scale=1), dict(guidance_scale=None), negative(scale=1), dict(negative_prompt_ids=torch.tensor([[3]]))):
        out = speculate(model, ROWS, None, 4, **{**ONLY_HERE, **options})
        assert torch.equal(out.sequences, expected) and out.speculation.target_calls == len(out.speculation.rounds)


def test_a_round_is_two_passes():
    out = speculate(tiny_llama(), ROWS, None, 4, **ONLY_HERE, **negative())
    assert out.speculation.target_calls == 2 * len(out.speculation.rounds) and out.speculation.to_json()


def test_said_by_a_config():
    model, given = tiny_llama(), negative()
    expected = stock(model, ROWS, **given).sequences
    del given["guidance_scale"]
    config = GenerationConfig(**ONLY_HERE, guidance_scale=1.7)
    assert torch.equal(hf_specdec.enable(model).generate(**padded(ROWS), generation_config=config, speculative=True, **given), expected)
    model.generation_config.guidance_scale = 1.7
    assert torch.equal(model.generate(**padded(ROWS), **ONLY_HERE, speculative=True, **given), expected)


def test_the_hook_and_a_processor_of_the_callers_own():
    model, given = tiny_llama(), negative()
    expected = stock(model, ROWS, **given).sequences
    assert torch.equal(model.generate(**padded(ROWS), **ONLY_HERE, **given, custom_generate=SpeculativeDecoder(perturbed(model))), expected)
    own = LogitsProcessorList([UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, model, given["negative_prompt_ids"], given["negative_prompt_attention_mask"])])
    for _ in range(2):  # plain generate uses it up
        assert torch.equal(integration.generate(model, **padded(ROWS), **ONLY_HERE, logits_processor=own), expected)


def test_several_answers_to_a_prompt():
    """Without a negative prompt; transformers does not repeat one."""
    model = tiny_llama()
    options = dict(guidance_scale=1.7, do_sample=True, num_return_sequences=3, max_new_tokens=8)
    out = speculate(model, ROWS[:2], None, 4, seed=1, **options)
    assert len(out.sequences) == 6 and [each[-8:] for each in out.sequences.tolist()] == [
        text for i, row in enumerate(ROWS[:2]) for j in range(3) for text in generated(speculate(model, [row], None, 4, seed=1 + 3 * i + j, do_sample=True, guidance_scale=1.7,
                                                                                                 max_new_tokens=8), [row])]  # fmt: skip


def test_the_cache_that_comes_back_is_that_of_the_text_and_one_is_taken():
    model, given = tiny_llama(), negative()
    first = speculate(model, ROWS, None, 4, **ONLY_HERE, **given)
    hf_specdec.disable(model)
    expected, cache = stock(model, ROWS, **given), getattr(first, CACHE)
    for ours, theirs in zip(cache.layers, getattr(expected, CACHE).layers):
        assert ours.keys.shape == theirs.keys.shape
        torch.testing.assert_close(ours.keys[0, :, 9:], theirs.keys[0, :, 9:], atol=1e-4, rtol=1e-4)
    text = ROWS[1]
    with torch.no_grad():
        known = getattr(model(torch.tensor([text[:6]]), use_cache=True), CACHE)
    assert isinstance(known, DynamicCache)
    out = speculate(model, [text], None, 4, **{**ONLY_HERE, CACHE: known}, **negative(NEGATIVE[:1]))
    assert texts(out, [text]) == texts(stock(tiny_llama(), [text], **negative(NEGATIVE[:1])), [text])


def test_hidden_states_are_those_of_the_text():
    model, options = tiny_llama(), dict(output_hidden_states=True)
    out, expected = speculate(model, ROWS[1:2], None, 4, **ONLY_HERE, **negative(NEGATIVE[:1]), **options), stock(tiny_llama(), ROWS[1:2], **negative(NEGATIVE[:1]), **options)
    for ours, theirs in zip(out.hidden_states, expected.hidden_states):
        for one, other in zip(ours, theirs):
            torch.testing.assert_close(one, other, atol=2e-3, rtol=0)


def test_a_negative_prompt_may_be_longer_than_the_context_leaves_room_for_drafts():
    """Twenty positions, a prompt of 3 tokens and a negative prompt of 9: texts of 11 new tokens fill them."""
    model = tiny_llama(max_position_embeddings=20)
    check(model, [[1, 2, 3]], **{**negative(NEGATIVE[2:]), "max_new_tokens": 11})


def test_streamers_see_the_text():
    model = tiny_llama()
    tokenizer = word_tokenizer(range(61))
    seen = []
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    streamer.on_finalized_text = lambda text, stream_end=False: seen.append(text)
    out = hf_specdec.enable(model).generate(**padded(ROWS[:1]), **ONLY_HERE, **negative(NEGATIVE[:1]), speculative=True, streamer=streamer)
    assert "".join(seen).split() == tokenizer.decode(out[0, 5:]).split()


@pytest.mark.parametrize("draft", ["model", "model_tree", "prompt_lookup"])
def test_on_a_stand_in_for_a_gpu_no_devices_are_mixed(draft):
    texts = []
    with PretendGpu() as gpu:
        for put in (lambda thing: thing, gpu.put):
            target = small_vocabulary_llama(2, vocab=12)
            own = make(draft, target, VARIANTS)
            for part in (getattr(own, "model", None),):
                part is None or put(part)
            given = {name: put(value) if torch.is_tensor(value) else value for name, value in negative([[7, 8, 9], [3]], 1.5).items()}
            out = integration.generate(put(target), **put(padded([[1, 2, 3, 1, 2], [4, 3]])), **{**ONLY_HERE, "do_sample": True}, **given, speculative={"seed": 3},
                                       assistant_model=own, num_assistant_tokens=4)  # fmt: skip
            texts.append(out.tolist())
    assert texts[0] == texts[1]


@pytest.mark.share(0)
def test_compiled_passes():
    model, given = tiny_llama(), negative()
    expected = texts(stock(model, ROWS, **given), ROWS)
    out = speculate(model, ROWS, perturbed(model), 3, **ONLY_HERE, **given, speculative={"compile": True})
    assert texts(out, ROWS) == expected and out.speculation.accepted


# --- laws -------------------------------------------------------------------------------------------------------------

ROW, OTHER = [1, 2, 3, 1, 2], [4, 0, 3]
N = 8_000 if FULL else 2_000


@torch.no_grad()
def joint(model, row, other, tokens: int, scale: float, temperature: float = 1.0) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `row`, guided by `other`, in float64."""
    exact, laws = copy.deepcopy(model).double(), {(): 1.0}
    for _ in range(tokens):
        going = list(laws)
        text, free = (exact(input_ids=torch.tensor([[*begin, *more] for more in going]), use_cache=False).logits[:, -1].log_softmax(-1) for begin in (row, other))
        found = ((free + scale * (text - free)) / temperature).softmax(-1)
        laws = {(*more, token): laws[more] * float(p) for more, row_of in zip(going, found) for token, p in enumerate(row_of)}
    return laws


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("name", ["model", "prompt_lookup", "tree", "model_tree", "uniform", "ngram"])
@pytest.mark.parametrize("given", [True, False], ids=["negative prompt", "last token"])
def test_the_sampled_law_is_the_guided_one_and_no_other(name, given, generous):
    target, other = small_vocabulary_llama(2, law.VOCAB), OTHER if given else ROW[-1:]
    options = dict(guidance_scale=1.8) | (dict(negative_prompt_ids=torch.tensor([OTHER])) if given else {})
    found, draft = Counter(), make(name, target, VARIANTS)
    accepted, size = 0, 1_000
    for begin in range(0, N, size):
        own = {name: value.expand(size, -1) if torch.is_tensor(value) else value for name, value in options.items()}
        out = speculate(target, [ROW] * size, draft, 3, seed=begin, do_sample=True, temperature=0.9, top_k=0, max_new_tokens=4, **own)
        found.update(tuple(text[:3]) for text in generated(out, [ROW] * size))
        accepted += out.speculation.accepted
    hf_specdec.disable(target)
    right = joint(target, ROW, other, 3, 1.8, 0.9)
    assert accepted and law.worst_p_value([found], [right], 3) > law.THRESHOLD
    for wrong in (joint(target, ROW, other, 3, 1.0, 0.9), joint(target, ROW, [5, 5] if given else OTHER, 3, 1.8, 0.9)):  # no guidance, guidance by another text
        assert law.worst_p_value([found], [wrong], 3) < law.THRESHOLD


# --- refusals ---------------------------------------------------------------------------------------------------------


def refuses(match: str, rows=ROWS, model=None, **options):
    with pytest.raises(ValueError, match=match):
        integration.generate(model or tiny_llama(), **padded(rows), **{**ONLY_HERE, **options})


IDS = padded(NEGATIVE)["input_ids"]
REFUSALS = {
    "too few rows": (dict(negative_prompt_ids=IDS[:1]), r"^negative_prompt_ids: expected token ids int64 \[3, L\].*got \[1, 9\]. Repeat it"),
    "no batch": (dict(negative_prompt_ids=IDS[0]), r"^negative_prompt_ids: .*got \[9\]"),
    "a list": (dict(negative_prompt_ids=NEGATIVE), "^negative_prompt_ids: .*got list"),
    "nothing": (dict(negative_prompt_ids=IDS[:, :0]), r"^negative_prompt_ids: .*got \[3, 0\]"),
    "unknown tokens": (dict(negative_prompt_ids=IDS + 60), "^negative_prompt_ids has token ids from"),
    "numbers": (dict(negative_prompt_ids=IDS.float()), "^negative_prompt_ids: expected token ids int64, got torch.float32"),
    "a mask of another shape": (dict(negative_prompt_ids=IDS, negative_prompt_attention_mask=torch.ones(3, 8)), r"^negative_prompt_attention_mask: .*\[3, 9\], got \[3, 8\]"),
    "a mask alone": (dict(negative_prompt_attention_mask=torch.ones(3, 8)), r"^negative_prompt_attention_mask: .*\[3, 1\], got \[3, 8\]"),
    "padding on the right": (dict(negative_prompt_ids=IDS, negative_prompt_attention_mask=torch.ones_like(IDS).index_fill(1, torch.tensor([8]), 0)),
                             '^negative_prompt_attention_mask: .*padding_side = "left"'),
    "padding in between": (dict(negative_prompt_ids=IDS, negative_prompt_attention_mask=torch.ones_like(IDS).index_fill(1, torch.tensor([4]), 0)),
                           "^negative_prompt_attention_mask: .*on the left"),
    "padding alone": (dict(negative_prompt_ids=IDS, negative_prompt_attention_mask=torch.zeros_like(IDS)), "^negative_prompt_attention_mask: .*a token in every row"),
    "no number": (dict(guidance_scale="high"), "^guidance_scale='high': expected a number"),
    "infinite": (dict(guidance_scale=float("inf")), "^guidance_scale=inf: expected a number"),
    "beams": (dict(num_beams=2), "^guidance_scale=1.5: guidance of num_beams=2 .*Use num_beams=1"),
    "too long": (dict(negative_prompt_ids=IDS.repeat(1, 40)), "^negative_prompt_ids: the negative prompt has 360 tokens and the target's context is 256"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_guided_is_refused(name):
    options, match = REFUSALS[name]
    refuses(match, **{"guidance_scale": 1.5, **options})


def test_processors_that_guide_elsewhere_are_refused():
    model, used = tiny_llama(), UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, tiny_llama())
    refuses("^logits_processor: .*asks another model.*Pass guidance_scale", model=model, logits_processor=LogitsProcessorList([used]))
    used = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)
    stock(model, ROWS, logits_processor=LogitsProcessorList([used]))
    refuses("^logits_processor: .*goes on from an earlier call", model=model, logits_processor=LogitsProcessorList([used]))
    behind = LogitsProcessorList([UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)])
    refuses("^logits_processor: .*ClassifierFreeGuidance.*Drop it", model=model, logits_processor=behind, repetition_penalty=1.2)


@pytest.mark.parametrize("name", ["RWKV", "OpenAI GPT", "RoBERTa (as a decoder)", "Bamba", "Mamba", "Falcon-Mamba"])
def test_families_that_are_not_guided(name):
    refuses("^guidance_scale=1.5: guidance of .* is not there with speculative=True. Drop it", ROWS[:1], line_of(name).model("eager"), guidance_scale=1.5)


def test_a_model_whose_outputs_hold_no_cache_is_not_guided():
    line = next((line for line in seeing.FAMILIES if line.name == "Granite 4 Vision"), None) or pytest.skip("this transformers has none")
    refuses("^guidance_scale=1.5: guidance of .*reads a text otherwise in the passes that guide plain", [[7, 8, 9]], line.model(), guidance_scale=1.5)


@pytest.mark.parametrize("name", ["GIT", "RoFormer (as a decoder)"])
def test_models_that_look_at_the_padding_of_a_negative_prompt(name):
    model = line_of(name).model("eager")
    refuses("^negative_prompt_attention_mask: .* looks at the padding .*one row at a time", ROWS[:1], model, guidance_scale=1.5, **behind_padding(NEGATIVE[1]))
    check(model, ROWS[:1], guidance_scale=1.5, **behind_padding(NEGATIVE[1], 0))


def test_encoder_decoders_and_embeddings_are_not_guided():
    line = next(line for line in encoder_decoders.FAMILIES if line.name == "T5")
    refuses("^guidance_scale=1.5: guidance of T5", ROWS[:1], line.model("eager"), guidance_scale=1.5)
    model = tiny_llama()
    embeds = model.get_input_embeddings()(torch.tensor(ROWS[:1])).detach()
    with pytest.raises(ValueError, match="^guidance_scale=1.5: guidance of prompts with images, sounds or embeddings"):
        integration.generate(model, inputs_embeds=embeds, **ONLY_HERE, **negative(NEGATIVE[:1], 1.5))


def test_a_call_that_is_refused_draws_no_numbers_and_leaves_the_model_alone():
    model = hf_specdec.enable(tiny_llama(), speculative=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        text = model.generate(**padded(ROWS), **ONLY_HERE, guidance_scale=1.5, num_beams=2)
    assert any("without speculation" in str(one.message) for one in seen)
    assert torch.equal(text, tiny_llama().generate(**padded(ROWS), **ONLY_HERE, guidance_scale=1.5, num_beams=2))
