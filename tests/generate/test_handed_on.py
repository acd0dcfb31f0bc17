"""Models whose own `generate` hands what it has read to that of a language model inside (BLIP-2 and its kind): enabling them is enabling that."""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch
import transformers
from transformers import AutoConfig

from hf_specdec import SpeculativeDecoder, disable, enable
from hf_specdec.drafts import MixtureDraft
from tests.helpers import VOCAB, perturbed

IMAGE, NEW = 60, 20
_EYE = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4)
_FORMER = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, encoder_hidden_size=16, vocab_size=VOCAB, cross_attention_frequency=1)
_OPT = dict(model_type="opt", vocab_size=VOCAB, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256)
_T5 = dict(model_type="t5", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, decoder_start_token_id=0)
_SAID = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
KINDS = {  # name: class, model type, language model
    "BLIP-2": ("Blip2ForConditionalGeneration", "blip-2", _OPT),
    "BLIP-2 (T5)": ("Blip2ForConditionalGeneration", "blip-2", _T5),
    "InstructBLIP": ("InstructBlipForConditionalGeneration", "instructblip", _OPT),
    "InstructBLIP (T5)": ("InstructBlipForConditionalGeneration", "instructblip", _T5),
    "InstructBLIP (video)": ("InstructBlipVideoForConditionalGeneration", "instructblipvideo", _OPT),
}
every_kind = pytest.mark.parametrize("name", KINDS)


@lru_cache(maxsize=None)
def made(name: str):
    kind, model_type, text = KINDS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, text_config={**text, **_SAID}, vision_config=_EYE, qformer_config=_FORMER, num_query_tokens=4, image_token_index=IMAGE,
                                  video_token_index=IMAGE, use_decoder_only_language_model=text is _OPT)
    model = getattr(transformers, kind)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3 if text is _OPT else 0.6)
    for one in (model, model.language_model):
        one.generation_config.do_sample, one.generation_config.eos_token_id, one.generation_config.pad_token_id = False, None, 0
    return model


def shown(name: str, rows: int, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    frames = (4,) if "video" in name else ()
    texts = [[IMAGE] * (16 if frames else 4) + torch.randint(3, 50, (4 + 2 * b,), generator=generator).tolist() for b in range(rows)]
    width = max(map(len, texts))
    inputs = {"input_ids": torch.tensor([[0] * (width - len(row)) + row for row in texts]),
              "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in texts]),
              "pixel_values": torch.randn(rows, *frames, 3, 16, 16, generator=generator)}
    asked = {"qformer_input_ids": torch.randint(3, 50, (rows, 5), generator=generator)} if "Instruct" in name else {}
    return inputs | asked


@every_kind
@pytest.mark.parametrize("rows", [1, 3])
def test_the_text_is_plain_generates(name, rows):
    model, enabled = made(name), enable(copy.deepcopy(made(name)))
    decoder_only = KINDS[name][2] is _OPT
    for seed in (0, 1):
        inputs = shown(name, rows, seed)
        reference = model.generate(**inputs, max_new_tokens=NEW)
        assert not torch.equal(reference, model.generate(**{**inputs, "pixel_values": inputs["pixel_values"] + 1}, max_new_tokens=NEW))
        for draft in [None, copy.deepcopy(model), *([perturbed(model, 0.02), perturbed(model, 0.02).language_model, MixtureDraft()] if decoder_only else [])]:
            out = enabled.generate(**inputs, max_new_tokens=NEW, speculative=True, assistant_model=draft, num_assistant_tokens=4, return_dict_in_generate=True)
            assert torch.equal(out.sequences, reference), type(draft).__name__
        assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, custom_generate=SpeculativeDecoder(copy.deepcopy(model))), reference)
        assert torch.equal(enabled.generate(**inputs, max_new_tokens=NEW), reference)


def test_a_draft_of_the_same_kind_sees_what_the_target_sees():
    model, inputs = enable(copy.deepcopy(made("BLIP-2"))), shown("BLIP-2", 2)
    for draft in (copy.deepcopy(made("BLIP-2")), enable(copy.deepcopy(made("BLIP-2"))), copy.deepcopy(model.language_model)):
        out = model.generate(**inputs, max_new_tokens=NEW, speculative=True, assistant_model=draft, num_assistant_tokens=4, return_dict_in_generate=True)
        assert out.speculation.acceptance_rate > 0.99
    assert type(disable(model)) is type(made("BLIP-2"))


def test_an_image_without_a_prompt():
    model, inputs = made("BLIP-2"), {"pixel_values": shown("BLIP-2", 3)["pixel_values"]}
    out = enable(copy.deepcopy(model)).generate(**inputs, max_new_tokens=NEW, speculative=True)
    assert torch.equal(out, model.generate(**inputs, max_new_tokens=NEW))


_KOSMOS = dict(vocab_size=VOCAB, embed_dim=32, layers=1, ffn_dim=64, attention_heads=4, max_position_embeddings=64)
REFUSED = {
    "Kosmos-2.5": ("Kosmos2_5ForConditionalGeneration", "kosmos-2.5", dict(latent_query_num=4, text_config=_KOSMOS, vision_config=dict(
        hidden_size=16, patch_embed_hidden_size=16, intermediate_size=24, head_dim=8, num_hidden_layers=1, num_attention_heads=2, max_num_patches=16)),
        "Kosmos2_5ForConditionalGeneration counts positions by what is in its cache"),
    "Kosmos-2": ("Kosmos2ForConditionalGeneration", "kosmos-2", dict(text_config=_KOSMOS, vision_config=_EYE, latent_query_num=4),
                 "Kosmos2TextForCausalLM counts positions by what is in its cache"),
    "Idefics": ("IdeficsForVisionText2Text", "idefics", dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vision_config=dict(
            embed_dim=16, image_size=16, intermediate_size=24, patch_size=4, num_hidden_layers=2, num_attention_heads=2)), "is shown its images anew with every token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_counts_or_looks_in_a_way_of_its_own_is_refused(name):
    kind, model_type, settings, why = REFUSED[name]
    model = getattr(transformers, kind)(AutoConfig.for_model(model_type, **settings))
    with pytest.raises(ValueError, match=f"{why}.*speculative=False"):
        enable(model)
