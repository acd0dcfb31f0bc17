"""A drafter in EAGLE-3's form: what is stored is what vLLM's loader asks for, it reads back as what it was, and training learns it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.features import fused, inputs
from hf_specdec.training import FeatureRunConfig, build_drafter, load_drafter
from hf_specdec.training.drafter import save as save_own
from hf_specdec.training.eagle3 import Eagle3RunConfig, Eagle3Trainer, build, save
from hf_specdec.training.export import export

from ..helpers import generated, plain, speculate, tiny_llama

IDS, READS, H, V = torch.arange(1, 61, 2), (0, 1, 2), 32, 61
ROWS = [[5, 6, 7, 8, 9], [11, 12, 13]]


@pytest.fixture(scope="module")
def deep():
    return tiny_llama(3, num_hidden_layers=4)


def made(target):
    draft = build(target, 3, IDS, READS)
    torch.manual_seed(0)
    for parameter in [*draft.base_model.layers.parameters(), draft.feature_fuse.weight, *draft.feature_norm.parameters()]:
        parameter.data += 0.1 * torch.randn_like(parameter)
    return draft


def test_names_and_shapes_are_those_that_vllm_loads(deep, tmp_path):
    """vllm/model_executor/models/llama_eagle3.py, 0.32: midlayer is layers.0, its q, k and v read 2 H, d2t holds offsets; no embedding, which it shares."""
    stored = load_file(save(made(deep), tmp_path) / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    kv, inner = deep.config.num_key_value_heads * deep.config.head_dim, deep.config.intermediate_size
    layer = {"self_attn.q_proj": (H, 2 * H), "self_attn.k_proj": (kv, 2 * H), "self_attn.v_proj": (kv, 2 * H), "self_attn.o_proj": (H, H),
             "mlp.gate_proj": (inner, H), "mlp.up_proj": (inner, H), "mlp.down_proj": (H, inner), "input_layernorm": (H,), "hidden_norm": (H,),
             "post_attention_layernorm": (H,)}
    expected = {f"midlayer.{name}.weight": shape for name, shape in layer.items()} | {f"fc_norm.{i}.weight": (H,) for i in range(3)}
    expected |= {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (len(IDS), H), "d2t": (len(IDS),), "t2d": (V,)}
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected
    assert torch.equal(torch.arange(len(IDS)) + stored["d2t"], IDS) and stored["d2t"].dtype == torch.int64
    assert torch.equal(stored["t2d"].nonzero()[:, 0], IDS) and stored["t2d"].dtype == torch.bool
    assert {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(IDS), "vocab_size": V, "num_hidden_layers": 1, "fc_norm": True}.items() <= config.items()
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]  # as vLLM counts them, from the embedding on
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # SGLang's way


def test_it_reads_back_as_what_it_was_and_is_exported_as_it_lies(deep, tmp_path):
    draft = made(deep)
    again = load_drafter(save(draft, tmp_path / "drafter"), deep)
    assert isinstance(again, FeatureDraft) and again.layers == READS
    states, tokens = torch.randn(1, 5, 3 * H), torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        found, expected = (_logits(model, states, tokens) for model in (again.model, draft))
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    assert found.isfinite().sum() == 5 * len(IDS)
    assert export(str(tmp_path / "drafter"), deep, tmp_path / "out", 4) == {"method": "eagle3", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 4}
    assert generated(speculate(deep, ROWS, again, 3, max_new_tokens=10), ROWS) == plain(deep, ROWS, max_new_tokens=10)


def _logits(model, states, tokens):
    return model(inputs_embeds=inputs(model, fused(model, states), tokens)).logits


def test_training_lowers_the_loss_and_moves_every_weight_of_its_own(anyones_data, deep, tmp_path):
    config = Eagle3RunConfig(head=40, steps=12, batch_tokens=256, lr=3e-3, warmup=2, unroll=2, precision="float32")
    trainer = Eagle3Trainer(deep, anyones_data, tmp_path / "run", config, "tiny")
    before, shared = [p.detach().clone() for p in trainer.own], deep.get_input_embeddings().weight.detach().clone()
    losses = [trainer.step() for _ in range(12)]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert all(not torch.equal(old, new) for old, new in zip(before, trainer.own))
    assert torch.equal(shared, deep.get_input_embeddings().weight)
    trainer.progress.history.append(trainer.measure())
    trainer.keep()
    assert load_drafter(trainer.finish(), deep).layers == (1, 2, 3)  # the checkpoint beside it is not taken for weights
    assert Eagle3Trainer(deep, anyones_data, tmp_path / "run", config, "tiny").progress.history


def test_what_cannot_be_in_this_form_is_refused(deep, tmp_path):
    with pytest.raises(ValueError, match="rising order"):
        build(deep, 3, IDS, (0, 2, 4))
    with pytest.raises(ValueError, match="one layer"):
        Eagle3RunConfig(layers=(0, -1))
    assert not isinstance(FeatureRunConfig(), Eagle3RunConfig)
    save_own(build_drafter(deep, [1], None, (0, 1, 2)), tmp_path / "own", "tiny")
    with pytest.raises(ValueError, match="--eagle3"):
        export(str(tmp_path / "own"), deep, tmp_path / "out", 4)
    folder = save(made(deep), tmp_path / "cut")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("fc_norm.1.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="fc_norm"):
        load_drafter(folder, deep)
