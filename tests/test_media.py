"""Prompts that show images or sounds beside their text: the answers are plain generate's, whatever drafts, in ragged batches, too."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from hf_specdec import SpeculativeDecoder, enable, integration, mx, parts, passes
from hf_specdec.cached_model import CachedModel
from hf_specdec.drafts import CascadeDraft, EarlyExitDraft, HorizontalCascadeDraft, MixtureDraft, ModelDraft, ModelTreeDraft, PromptLookupDraft
from hf_specdec.media import TRIED, Media, ahead, media_in, untried
from hf_specdec.mx.kernels import cpu
from tests.helpers import FULL, OLD_TORCH, perturbed, tiny_llama
from tests.seeing import FAMILIES, IMAGE, LINES, VERSION, drafts_for

NEW = 20
BY_NAME = {family.name: family for family in FAMILIES}
needs_kernels = pytest.mark.skipif(cpu.library() is None, reason="the kernels are not available")
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
counts_by_axes = pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3-VL"])


def plain(model, inputs, **settings):
    return model.generate(**inputs, max_new_tokens=NEW, **settings)


def ours(model, inputs, draft=None, k=4, **settings):
    return integration.generate(model, **inputs, max_new_tokens=NEW, assistant_model=draft, num_assistant_tokens=k, return_dict_in_generate=True, **settings)


def other_pictures(family, inputs):
    """The same text with other images."""
    fresh, shown = family.prompts(len(inputs["input_ids"]), seed=9), family.shows(1, torch.Generator())[1]
    return {**inputs, **{name: fresh[name] for name in shown if fresh[name].is_floating_point()}}


@pytest.mark.share(1)
@every_family
def test_the_type_is_known_to_see(family):
    assert untried(family.model().config, {name: value for name, value in family.prompts(1).items() if name not in ("input_ids", "attention_mask")}) is None


@pytest.mark.skipif(VERSION < (5, 24), reason="not all of them are in this transformers")
def test_no_type_is_said_to_be_tried_that_is_not_here():
    kinds = {"image": set(), "video": set(), "sound": set()}
    for family in LINES:
        names = family.prompts(1).keys() - {"input_ids"}
        heard = any(name in ("audio_input_features", "input_values") or name.startswith("input_") for name in names)
        kinds["video" if "pixel_values_videos" in names else "sound" if heard else "image"].add(family.kind)
    assert kinds == TRIED


@pytest.mark.share(1 / 2)
@every_family
def test_the_answer_depends_on_what_is_shown(family):
    model, inputs = family.model(), family.prompts(1)
    first = [model.generate(**shown, max_new_tokens=1, output_logits=True, return_dict_in_generate=True).logits[0]
             for shown in (inputs, other_pictures(family, inputs))]
    assert float((first[0] - first[1]).nan_to_num(0.0).abs().max()) > 0.01  # where both are minus infinity there is none


@pytest.mark.share(1 / 2)
@every_family
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_answers_are_those_of_plain_generate(family, rows):
    model, inputs = family.model(), family.prompts(rows)
    if rows > 1 and not family.ragged:
        with pytest.raises(ValueError, match="enerate the rows one by one"):
            ours(model, inputs)
        return
    reference = plain(model, inputs)
    drafts = [None, *([perturbed(model, 0.02)] if drafts_for(model, rows) else []), *([MixtureDraft(), ModelTreeDraft(model)] if family.trees else [])]
    for draft in drafts:
        assert torch.equal(ours(model, inputs, draft).sequences, reference), type(draft).__name__


@pytest.mark.share(1 / 3)
@every_family
def test_a_draft_of_the_same_kind_sees_what_the_target_sees(family):
    model, inputs = family.model(), family.prompts(1, seed=1)
    out = ours(model, inputs, copy.deepcopy(model))
    assert torch.equal(out.sequences, plain(model, inputs)) and out.speculation.acceptance_rate > 0.99


@pytest.mark.parametrize("name, setting", [("Perception LM", {"projector_pooling_ratio": 1}), ("MiniCPM-OCR", {"downsample_mode": "16x"}),
                                           ("LLaVA-NeXT-Video (video)", {"spatial_pool_stride": 1})], ids=lambda value: value if isinstance(value, str) else "")
def test_a_draft_that_makes_other_tokens_of_an_image_reads_the_text_alone(name, setting):
    if name not in BY_NAME:
        pytest.skip("this transformers has no such model")
    family = BY_NAME[name]
    model, inputs, draft = family.model(), family.prompts(1), replace(family, settings={**family.settings, **setting}).model()
    assert torch.equal(ours(model, inputs, draft).sequences, plain(model, inputs))


@pytest.mark.parametrize("both", [False, True], ids=["target", "both"])
def test_a_draft_sees_what_an_enabled_target_sees(both):
    family = BY_NAME["LLaVA"]
    model, inputs = enable(copy.deepcopy(family.model())), family.prompts(1, seed=1)
    draft = enable(copy.deepcopy(model)) if both else family.model()
    out = model.generate(**inputs, max_new_tokens=NEW, speculative=True, assistant_model=draft, num_assistant_tokens=4, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain(family.model(), inputs)) and out.speculation.acceptance_rate > 0.99


@pytest.mark.share(1 / 3)
@every_family
def test_two_images_in_a_prompt(family):
    model, inputs = family.model(), family.prompts(1, seed=2, images=2)
    assert torch.equal(ours(model, inputs).sequences, plain(model, inputs))


def test_a_batch_that_ends_at_different_lengths():
    family = BY_NAME["Qwen2.5-VL"]
    model, inputs = family.model(), family.prompts(3)
    reference = plain(model, inputs)
    ends = [int(reference[b, inputs["input_ids"].shape[1] + 3 * b + 1]) for b in range(3)]
    out = ours(model, inputs, MixtureDraft(), eos_token_id=ends, pad_token_id=0)
    assert torch.equal(out.sequences, plain(model, inputs, eos_token_id=ends, pad_token_id=0))


@pytest.mark.parametrize("name", ["LLaVA", "Qwen2-VL"])
@pytest.mark.parametrize("make", [lambda model: ModelDraft(model), lambda model: EarlyExitDraft(model, 1), lambda model: CascadeDraft(perturbed(model, 0.02), PromptLookupDraft())],
                         ids=["model", "early exit", "cascade"])
def test_drafts_made_of_models(name, make):
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(3, seed=3)
    assert torch.equal(ours(model, inputs, make(model)).sequences, plain(model, inputs))


@pytest.mark.parametrize("name", ["LLaVA", "Qwen2-VL"])
def test_a_draft_that_comes_in_after_a_row_has_gone(name):
    """Its first pass is over fewer prompts than the call had, so that it cannot be shown anything."""
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(2, seed=3)
    first = int(plain(model, inputs)[0, inputs["input_ids"].shape[1]])

    class Late(ModelDraft):
        def propose(self, context, k):
            return super().propose(context, [own if len(context.rows) == 1 else 0 for own in k])

    settings = dict(eos_token_id=first, pad_token_id=0)
    assert torch.equal(ours(model, inputs, Late(copy.deepcopy(model)), **settings).sequences, plain(model, inputs, **settings))


@pytest.mark.parametrize("name", [name for name in ("LLaVA", "Qwen2-VL", "LFM3-VL") if name in BY_NAME])
def test_a_draft_that_comes_in_where_another_has_drafted_for_some_rows(name):
    """The texts of some rows are their prompts, those of others are longer."""
    family = BY_NAME[name]
    model = family.model()
    for seed in (1, 4):
        inputs = family.prompts(2, seed=seed)
        assert torch.equal(ours(model, inputs, HorizontalCascadeDraft(PromptLookupDraft(), ModelDraft(copy.deepcopy(model))), k=1).sequences, plain(model, inputs))


@pytest.mark.parametrize("name", [name for name in ("LLaVA", "Qwen2-VL", "Qwen3.5-MoE") if name in BY_NAME])
def test_a_draft_that_comes_in_after_an_image_mark_was_written(name):
    """Its first pass is over such a mark, too, which shows nothing."""
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(1, seed=3)
    begin = inputs["input_ids"].shape[1]

    class Late(ModelDraft):
        def propose(self, context, k):
            return super().propose(context, k if len(context.rows[0]) > begin else [0])

    settings = dict(prefix_allowed_tokens_fn=lambda b, ids: [IMAGE] if len(ids) == begin else list(range(61)))
    out = ours(model, inputs, Late(copy.deepcopy(model)), **settings)
    assert torch.equal(out.sequences, plain(model, inputs, **settings)) and out.speculation.acceptance_rate > 0.99


@counts_by_axes
def test_several_answers_to_one_image(name):
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(2)
    out = integration.generate(model, **inputs, max_new_tokens=NEW, assistant_model=copy.deepcopy(model), do_sample=True, num_return_sequences=3, top_k=4,
                               speculative={"seed": 5, "num_assistant_tokens": 3}, return_dict_in_generate=True)
    assert len(out.sequences) == 6 and out.speculation.acceptance_rate > 0.99


@pytest.mark.parametrize("name", ["LLaVA", "Qwen2-VL"])
def test_samples_follow_the_law_of_the_model_that_sees(name):
    """Pairs of tokens of 3,000 answers against p(x) p(y | x) from passes without a cache; those of another image are rejected."""
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(1, seed=4)
    n, top = 3000, 3

    def law(shown):
        """By pairs of tokens, their probability under top-k."""
        pairs = {}
        for x, p in next_of(shown, []):
            for y, q in next_of(shown, [x]):
                pairs[x, y] = p * q
        return pairs

    @torch.no_grad()
    def next_of(shown, tokens):
        out = model.generate(**shown, max_new_tokens=1 + len(tokens), output_scores=True, return_dict_in_generate=True,
                             prefix_allowed_tokens_fn=lambda b, ids: tokens[len(ids) - shown["input_ids"].shape[1]:][:1] or list(range(61)))
        values, ids = out.scores[-1][0].softmax(-1).topk(top)
        values = values.double()
        return list(zip(ids.tolist(), (values / values.sum()).tolist()))

    out = integration.generate(model, **inputs, max_new_tokens=2, assistant_model=perturbed(model, 0.01), do_sample=True, num_return_sequences=n, top_k=top,
                               speculative={"seed": 11, "num_assistant_tokens": 1}, return_dict_in_generate=True)
    assert 0.02 < out.speculation.acceptance_rate < 0.995
    pairs = [tuple(row) for row in out.sequences[:, -2:].tolist()]

    def p_value(expected):
        if set(pairs) - set(expected):
            return 0.0
        total = sum(expected.values())
        return chisquare([pairs.count(pair) for pair in expected], [n * p / total for p in expected.values()]).pvalue

    assert p_value(law(inputs)) > 1e-3
    assert p_value(law(other_pictures(family, inputs))) < 1e-6


def test_processors_read_the_whole_prompt():
    family = BY_NAME["LLaVA"]
    model, inputs = family.model(), family.prompts(1)
    settings = dict(repetition_penalty=1.3, no_repeat_ngram_size=2)
    assert torch.equal(ours(model, inputs, MixtureDraft(), **settings).sequences, plain(model, inputs, **settings))


@pytest.mark.parametrize("name", [name for name in ("Gemma 3", "Qwen3-VL", "EXAONE 4.5") if name in BY_NAME])
def test_scores_logits_and_the_cache_that_comes_back(name):
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(2)
    settings = dict(output_scores=True, output_logits=True)
    reference, out = plain(model, inputs, return_dict_in_generate=True, **settings), ours(model, inputs, MixtureDraft(), **settings)
    for one, other in zip(reference.logits, out.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-3)
    told = {name: value for name, value in inputs.items() if name in ("input_ids", "attention_mask")}
    more = torch.cat([reference.sequences, torch.tensor([[7, 9, 11]] * 2)], dim=1)
    mask = torch.cat([told["attention_mask"], torch.ones(2, NEW + 3, dtype=torch.long)], dim=1)
    cache = lambda output: {key: getattr(output, key) for key in ("cache", "past_key_values") if getattr(output, key, None) is not None}  # noqa: E731
    name_of, held = next(iter(cache(reference).items()))
    wanted = model.generate(input_ids=more, attention_mask=mask, max_new_tokens=9, **{name_of: copy.deepcopy(held)})
    for made in (held, cache(out)[name_of]):  # a second turn, of text, goes on from either, with either generate
        assert torch.equal(model.generate(input_ids=more, attention_mask=mask, max_new_tokens=9, **{name_of: copy.deepcopy(made)}), wanted)
        assert torch.equal(integration.generate(model, input_ids=more, attention_mask=mask, max_new_tokens=9, **{name_of: made}), wanted)


@counts_by_axes
def test_the_decoding_method_without_enabling(name):
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(2)
    for draft in (None, copy.deepcopy(model)):
        out = model.generate(**inputs, max_new_tokens=NEW, custom_generate=SpeculativeDecoder(draft, {"num_assistant_tokens": 4}))
        assert torch.equal(out, plain(model, inputs))


def test_positions_behind_an_image():
    family = BY_NAME["Qwen2-VL"]
    model, inputs = family.model(), family.prompts(2)
    shown = media_in(model.config, {name: value for name, value in inputs.items() if name != "input_ids"})
    columns = [row.nonzero()[:, 0].tolist() for row in inputs["attention_mask"]]
    positions = model._prepare_position_ids_for_generation(inputs["input_ids"], {"attention_mask": inputs["attention_mask"], **shown})
    assert ahead(positions, columns, inputs["input_ids"].shape[1]) == [-4, -2] == model.model.rope_deltas[:, 0].tolist()  # 8 tokens of an image take 4 positions, 4 take 2
    with torch.no_grad():
        cached = CachedModel(model, 64)
        cached.look(Media(model, shown, inputs["input_ids"], columns, positions))
        rows = [inputs["input_ids"][b, own].tolist() for b, own in enumerate(columns)]
        logits = cached.score(rows)[:, 0]
        assert torch.allclose(logits, model(**inputs, position_ids=positions[1:]).logits[:, -1], atol=1e-4)


# --- images at which all of the text looks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("look", ["all", "none", "part"])
def test_a_text_looks_at_what_the_last_token_of_its_prompt_looks_at(look):
    model, inputs = BY_NAME["Mllama"].model(), BY_NAME["Mllama"].prompts(3, seed=5)
    seen = inputs["cross_attention_mask"].clone()
    seen[:, -1, :, {"all": 2, "none": 0, "part": 1}[look] :] = 0
    inputs = {**inputs, "cross_attention_mask": seen}
    ends = plain(model, inputs)[:, inputs["input_ids"].shape[1] + 4 :]
    for draft in (None, perturbed(model, 0.02), MixtureDraft(), EarlyExitDraft(model, 2), EarlyExitDraft(model, 1)):
        assert torch.equal(ours(model, inputs, draft).sequences, plain(model, inputs))
        for settings in (dict(eos_token_id=int(ends[1, 0]), pad_token_id=0), dict(eos_token_id=ends[:, 2].tolist(), pad_token_id=0)):
            assert torch.equal(ours(model, inputs, draft, **settings).sequences, plain(model, inputs, **settings))


def test_the_cache_that_comes_back_holds_the_image():
    model, inputs = BY_NAME["Mllama"].model(), BY_NAME["Mllama"].prompts(2)
    out, reference = ours(model, inputs), plain(model, inputs, return_dict_in_generate=True)
    key = next(name for name in ("cache", "past_key_values") if getattr(out, name, None) is not None)
    more = torch.cat([out.sequences, torch.tensor([[7, 9, 11]] * 2)], dim=1)
    told = {"input_ids": more, "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, NEW + 3).long()], dim=1)}
    told["cross_attention_mask"] = torch.cat([inputs["cross_attention_mask"], inputs["cross_attention_mask"][:, -1:].expand(-1, NEW + 3, -1, -1)], dim=1)
    texts = [model.generate(**told, max_new_tokens=9, **{key: copy.deepcopy(getattr(made, key))}) for made in (out, reference)]
    assert torch.equal(*texts)
    with pytest.raises(ValueError, match="holds an image, which the text behind it goes on seeing"):
        ours(model, {name: told[name] for name in ("input_ids", "attention_mask")}, **{key: getattr(out, key)})


def test_images_without_what_says_which_tokens_look_at_them():
    model, inputs = BY_NAME["Mllama"].model(), BY_NAME["Mllama"].prompts(1)
    with pytest.raises(ValueError, match="pixel_values and cross_attention_mask beside each other.*speculative=False"):
        ours(model, {**inputs, "cross_attention_mask": None})


# --- prompts that are read in both directions ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PaliGemma", "PaliGemma 2"])
@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_that_are_read_in_both_directions_whatever_is_said_of_their_tokens(name, shown, rows):
    """Zeros are what its processor makes of a prompt, ones of what is to be read as text, and without any it is a matter of the attention."""
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(rows, seed=6)
    ids = inputs["input_ids"]
    if not shown:
        inputs = {"input_ids": ids.where(ids != IMAGE, 7), "attention_mask": inputs["attention_mask"]}
    ends = torch.arange(ids.shape[1]).expand_as(ids) >= ids.shape[1] - 3
    answers = []
    for marks in (None, torch.zeros_like(ids), torch.ones_like(ids), ends.long()):
        said = {**inputs, "token_type_ids": marks}
        answers.append(plain(model, said))
        for draft in [None, perturbed(model, 0.02)] + ([MixtureDraft()] if family.trees else []):
            assert torch.equal(ours(model, said, draft).sequences, answers[-1]), type(draft).__name__
    assert not torch.equal(answers[1], answers[2]) and not torch.equal(answers[1], answers[3])


@pytest.mark.parametrize("name", ["PaliGemma", "PaliGemma 2"])
def test_a_later_turn_behind_a_prompt_that_was_read_in_both_directions(name):
    family = BY_NAME[name]
    model, inputs = family.model(), family.prompts(2, seed=7)
    held = ours(model, inputs, k=3)
    key = next(name for name in ("cache", "past_key_values") if getattr(held, name, None) is not None)
    told = {"input_ids": torch.cat([held.sequences, torch.tensor([[7, 9, 11]] * 2)], dim=1)}
    told["attention_mask"] = (told["input_ids"] != 0).long()
    told["attention_mask"][:, inputs["input_ids"].shape[1] :] = 1
    wanted = model.generate(**told, max_new_tokens=9, **{key: copy.deepcopy(getattr(plain(model, inputs, return_dict_in_generate=True), key))})
    assert torch.equal(integration.generate(model, **told, max_new_tokens=9, **{key: getattr(held, key)}), wanted)


@pytest.mark.skipif("VibeVoice-ASR" not in BY_NAME, reason="not in this transformers")
@pytest.mark.parametrize("rows", [1, 3])
def test_the_noise_of_a_sound_is_that_of_plain_generate_whatever_the_draft_hears(rows):
    family = BY_NAME["VibeVoice-ASR"]
    model, inputs = copy.deepcopy(family.model()), family.prompts(rows)
    model.config.acoustic_tokenizer_encoder_config.vae_std = 0.6

    def heard(seed, answer):
        torch.manual_seed(seed)
        return answer()

    reference = heard(7, lambda: plain(model, inputs))
    assert not torch.equal(reference, heard(8, lambda: plain(model, inputs)))
    for draft in (None, copy.deepcopy(model), perturbed(model, 0.02)):
        out = heard(7, lambda: ours(model, inputs, draft))  # noqa: B023
        assert torch.equal(out.sequences, reference)


# --- what is refused ----------------------------------------------------------------------------------------------------


def test_a_type_that_nobody_has_tried_is_refused(monkeypatch):
    family = BY_NAME["LLaVA"]
    monkeypatch.setitem(TRIED, "image", frozenset())
    with pytest.raises(ValueError, match="^(pixel_values|image features): .*not supported with speculative=True for a model of type 'llava'"):
        ours(family.model(), family.prompts(1))


def test_what_a_type_was_not_shown_in_the_tests_is_refused():
    family = BY_NAME["LLaVA"]
    assert untried(family.model().config, {"pixel_values_videos": torch.ones(1)}) == "pixel_values_videos"
    assert untried(family.model().config, {"pixel_values": torch.ones(1)}) is None
    assert untried(family.model().config, {"input_features": torch.ones(1)}) == "input_features"
    assert untried(family.model().config, {"mm_encoder_outputs": {"video": 1, "image": 2}}) == "video features"


def test_a_filled_cache_beside_an_image_is_refused():
    family = BY_NAME["LLaVA"]
    model, inputs = family.model(), family.prompts(1)
    out = plain(model, inputs, return_dict_in_generate=True)
    key = "cache" if getattr(out, "cache", None) is not None else "past_key_values"
    longer = {**inputs, "input_ids": torch.cat([out.sequences, torch.tensor([[3]])], 1)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    with pytest.raises(ValueError, match="Pass the whole conversation without the cache"):
        ours(model, longer, **{key: getattr(out, key)})


def test_a_prompt_that_ends_within_an_image():
    positions = torch.tensor([[[0, 1, 2]], [[0, 1, 1]], [[0, 1, 2]]])
    with pytest.raises(ValueError, match="ends with an image"):
        ahead(positions, [[0, 1, 2]], 3)
    assert ahead(positions[:, :, :2], [[0, 1]], 2) == [0]


def test_positions_of_the_last_columns_and_of_all_rows_alike():
    assert ahead(torch.tensor([[7, 8]]), [[0, 1, 2, 3], [1, 2, 3]], 4) == [5, 6]
    assert ahead(None, [[0]], 1) == []


def test_text_alone_is_what_it_was():
    family = BY_NAME["Qwen2-VL"]
    model = family.model()
    ids = torch.tensor([[1, 5, 7, 9, 5, 7]])
    assert IMAGE not in ids and torch.equal(ours(model, {"input_ids": ids}).sequences, plain(model, {"input_ids": ids}))


# --- the rest of the package on such models ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LLaVA", "Qwen2-VL", "SmolVLM"])
def test_layers_are_those_of_the_text_where_what_sees_has_as_many(name):
    model = BY_NAME[name].model()
    path, layers = parts.decoder_layers(model)
    assert path.startswith(parts.text_part(model)[0]) and layers is model.get_decoder().layers
    view, inputs = EarlyExitDraft(model, 1), BY_NAME[name].prompts(1)
    assert ours(model, inputs, view).speculation.acceptance_rate < 0.9  # one layer of two is another model


def test_what_reads_images_is_no_part_of_what_a_token_costs():
    model = BY_NAME["SmolVLM"].model()
    text = sum(p.nbytes for part in (model.get_decoder(), model.get_output_embeddings()) for p in part.parameters())
    assert parts.bytes_per_token(model) == text < sum(p.nbytes for p in model.parameters())
    assert parts.read_once(tiny_llama()) == set()


def test_what_a_token_costs_is_counted_in_bytes():
    """Weights in a format are numbers of bytes, dense ones of other sizes: c of a model that drafts for itself in a format is their ratio."""
    model = tiny_llama().to(torch.bfloat16)
    packed = mx.compress(copy.deepcopy(model), "mxint8", measure=False)
    c = ModelDraft(packed).relative_cost(model)
    assert c == sum(p.nbytes for p in packed.parameters()) / sum(p.nbytes for p in model.parameters()) and 0.5 < c < 1
    assert ModelDraft(tiny_llama()).relative_cost(model) == 2


@needs_kernels
@pytest.mark.parametrize("name", ["Gemma 3", "Qwen2-VL"])
def test_weights_of_the_text_are_compressed_and_those_that_read_images_stay(name, tmp_path):
    family = BY_NAME[name]
    model, inputs = copy.deepcopy(family.model()), family.prompts(2)
    mx.compress(model, "mxfp6_e2m3", measure=False)
    apart = parts.read_once(model)
    found = {name for name, module in model.named_modules() if isinstance(module, mx.MXLinear)}
    assert found and all(name.startswith(parts.text_part(model)[0]) for name in found)
    assert {layer.note for layer in model.mx_report.layers if layer.format is None} == {"it reads images or sounds, once a prompt",
                                                                                         "the output head: pass lm_head=FORMAT to compress it"}
    assert apart == parts.read_once(model) != set()
    assert torch.equal(ours(model, inputs, MixtureDraft()).sequences, plain(model, inputs))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert {name for name, module in again.named_modules() if isinstance(module, mx.MXLinear)} == found
    assert torch.equal(plain(again, inputs), plain(model, inputs))


@needs_kernels
@pytest.mark.parametrize("name", ["Gemma 3", "Qwen2-VL", "LLaVA"])
def test_in_bfloat16_with_row_invariant_kernels_no_answer_forks(name):
    family = BY_NAME[name]
    model, inputs = copy.deepcopy(family.model()).to(torch.bfloat16), family.prompts(2)
    inputs = {key: value.to(torch.bfloat16) if value.is_floating_point() else value for key, value in inputs.items()}
    mx.row_invariant(model)
    assert torch.equal(ours(model, inputs, MixtureDraft()).sequences, plain(model, inputs))


@pytest.mark.share(1 / 2)
@pytest.mark.skipif(OLD_TORCH, reason="this torch does not compile the model: docs/performance.md")
@pytest.mark.parametrize("name", ["LLaVA", "Qwen2-VL"])
def test_compiled_passes_behind_a_prompt_that_shows_something(name, recwarn, monkeypatch):
    """torch traces, and its code generator is left out where not all cases are asked for."""
    if not FULL:
        monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "aot_eager"})
    family = BY_NAME[name]
    model, inputs = copy.deepcopy(family.model()), family.prompts(1)
    plain(model, inputs)  # transformers leaves hooks on what reads images
    out = integration.generate(model, **inputs, max_new_tokens=NEW, speculative={"compile": "model", "num_assistant_tokens": 3}, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain(model, inputs))
    assert not [str(one.message) for one in recwarn if "without compile" in str(one.message)]
