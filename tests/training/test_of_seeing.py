"""Drafters of models that read images or sounds, too: made of what writes their text."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.kinds import WRITES_LIKE
from hf_specdec.training import FeatureRunConfig, RunConfig, build_drafter, load_drafter, prepare, train
from hf_specdec.training.drafter import save

from .. import seeing
from ..helpers import enabled
from .conftest import chat_tokenizer

HERE = {family.kind: family for family in reversed(seeing.FAMILIES)}
OTHERWISE = {"gemma4_unified", "paligemma"}  # writes marks of images here, which it embeds as padding; reads its prompt in both directions


@pytest.mark.share(1 / 5)
@pytest.mark.parametrize("kind", sorted(HERE))
def test_all_layers_together_write_the_targets_text_or_are_refused_by_name(kind):
    family = HERE[kind]
    model, ids = enabled(family.model()), torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    options = dict(max_new_tokens=16, do_sample=False, pad_token_id=0, eos_token_id=None, speculative={"num_assistant_tokens": 3}, return_dict_in_generate=True)
    layers = list(range(model.config.get_text_config().num_hidden_layers))
    try:
        draft = build_drafter(model, layers)
    except ValueError as error:
        assert any(words in str(error) for words in ("makes no model like what writes the text", "hands out no output head", "is of another kind than layer")), error
        return
    assert (not hasattr(draft.config, "vision_config") or kind == "phi4_multimodal") and draft.get_input_embeddings() is model.get_input_embeddings()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **options)
    assert kind in OTHERWISE or out.speculation.acceptance_rate == 1.0
    shown = family.prompts(1)
    wanted = model.generate(**shown, max_new_tokens=16, pad_token_id=0)
    assert torch.equal(model.generate(**shown, assistant_model=draft, **options).sequences, wanted)
    try:
        reader = build_drafter(model, [0, 1][: len(layers)], None, (0, 1))
    except ValueError as error:
        assert any(words in str(error) for words in ("several states per token", "second embedding of every token", "is of another kind", "none of them is attention", "reads images itself")), error
        return
    out = model.generate(**shown, assistant_model=FeatureDraft(reader, model), **options)
    assert torch.equal(out.sequences, wanted) and out.speculation.proposed


LIKE_ANOTHER = ("emu3 glm46v glm4v glm4v_moe glm_ocr glmga granite4_vision granite_docling hunyuan_vl molmo2 paddleocr_vl qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker "
                "qwen3_vl qwen3_vl_moe").split()


@pytest.mark.parametrize("kind", [kind for kind in LIKE_ANOTHER if kind in HERE])
def test_a_text_model_that_writes_like_another_computes_what_that_one_does(kind, tmp_path):
    model, ids = HERE[kind].model(), torch.tensor([[5, 6, 7, 8, 5, 6, 7]])
    assert model.config.get_text_config().model_type in WRITES_LIKE
    save(draft := build_drafter(model, list(range(model.config.get_text_config().num_hidden_layers))), tmp_path, "target")
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert torch.allclose(draft(ids).logits, logits, atol=1e-5) and torch.allclose(load_drafter(tmp_path, model)(ids).logits, logits, atol=0.2)


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2_vl", "glm4v"])
def test_one_is_trained_and_comes_back(kind, tmp_path):
    model, tokenizer = enabled(HERE[kind].model()), chat_tokenizer()
    prepare(tmp_path / "data", model, tokenizer, tokens=600, rows=8, new_tokens=16, seed=5)
    config = dict(steps=3, batch_tokens=128, warmup=1)
    for made, name in ((RunConfig(layers=(0,), **config), "layers"), (FeatureRunConfig(layers=(0,), reads=(0, 1), **config), "reads")):
        train(model, tokenizer, tmp_path / "data", tmp_path / name, made)
        shown = HERE[kind].prompts(1)
        out = model.generate(**shown, max_new_tokens=12, pad_token_id=0, speculative={"num_assistant_tokens": 3}, assistant_model=load_drafter(tmp_path / name, model),
                             return_dict_in_generate=True)
        assert torch.equal(out.sequences, model.generate(**shown, max_new_tokens=12, pad_token_id=0)) and out.speculation.proposed


def test_what_is_stored_says_that_it_writes_text(tmp_path):
    model = HERE["llava"].model()
    save(draft := build_drafter(model, [1]), tmp_path, "target")
    again = load_drafter(tmp_path, model)
    assert again.config.model_type == "llama" and torch.allclose(again(torch.tensor([[5, 6, 7]])).logits, draft(torch.tensor([[5, 6, 7]])).logits, atol=0.05)
