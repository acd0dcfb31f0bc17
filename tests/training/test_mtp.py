"""A prediction module that comes with a checkpoint, as a feature drafter: a synthetic checkpoint in the published layout, against transformers'
own module."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, modeling_layers

from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.feature_tree import FeatureTreeDraft
from hf_specdec.training import load_drafter
from hf_specdec.training.drafter import is_drafter

from ..helpers import build, generated, plain, speculate, tiny_llama
from .watched import Watched

needs_mtp = pytest.mark.skipif(not hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"), reason="this version of transformers has no MtpModel.forward_layer")
SIZE = dict(vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
            topk_group=1, max_position_embeddings=256, num_nextn_predict_layers=1)
ROWS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A GLM-4-MoE of two layers with its module in the third."""
    folder = tmp_path_factory.mktemp("glm")
    build("glm4_moe", 3, **SIZE).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    block = {name.replace("layers.1.", "layers.2."): 0.3 * torch.randn_like(tensor) for name, tensor in tensors.items() if "layers.1." in name}
    more = {"enorm.weight": 1 + 0.1 * torch.randn(32), "hnorm.weight": 1 + 0.1 * torch.randn(32), "eh_proj.weight": 0.2 * torch.randn(32, 64),
            "shared_head.norm.weight": 1 + 0.1 * torch.randn(32)}
    save_file(tensors | block | {f"model.layers.2.{name}": tensor for name, tensor in more.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    return folder


def loaded(folder):
    target = AutoModelForCausalLM.from_pretrained(folder).eval()
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]  # 46 and 92 in the published sizes
    return target


@needs_mtp
def test_it_drafts_what_transformers_own_module_says(checkpoint):
    target = loaded(checkpoint)
    reference = modeling_layers.MtpModel.from_pretrained(target)
    draft = load_drafter("mtp", target)
    assert is_drafter("mtp") and type(draft) is FeatureDraft
    watched, steps = Watched(draft.model, target), set()
    out = speculate(target, ROWS, watched, 3, max_new_tokens=10)
    assert generated(out, ROWS) == plain(target, ROWS, max_new_tokens=10)
    for step, rows, drafted, logits in watched.log:
        for b, row in enumerate(rows):
            ids = torch.tensor([row + [one[b] for one in drafted]])
            with torch.no_grad():
                states = target.model(input_ids=ids[:, : len(row) - 1]).last_hidden_state
                for _ in range(step + 1):
                    tokens = ids[:, 1 : states.shape[1] + 1]
                    after = reference.forward_layer(0, states, torch.arange(tokens.shape[1])[None], None, input_ids=tokens)
                    states = torch.cat([states, after[:, -1:]], dim=1)
                torch.testing.assert_close(logits[b, 0], target.lm_head(after[0, -1]), atol=1e-3, rtol=1e-3)
            steps.add(step)
    assert steps == {0, 1, 2}


@needs_mtp
def test_a_config_names_it_and_the_checkpoint_is_read_once(checkpoint, monkeypatch):
    target, read, real = loaded(checkpoint), [], modeling_layers.MtpModel.from_pretrained
    monkeypatch.setattr(modeling_layers.MtpModel, "from_pretrained", lambda *given, **named: read.append(given) or real(*given, **named))
    for _ in range(2):
        out = speculate(target, ROWS, None, 3, speculative={"draft": "mtp"})
        assert out.speculation.drafted and generated(out, ROWS) == plain(target, ROWS)
    assert len(read) == 1
    read.clear()  # it is kept
    gone = ref(target)
    out = speculate(target, ROWS, None, 3, use_mtp=True)
    assert out.speculation.config["draft"] == "mtp" and out.speculation.drafted and generated(out, ROWS) == plain(target, ROWS) and not read
    del target, out
    gc.collect()
    assert gone() is None


@needs_mtp
def test_its_trees_and_draws_are_exact(checkpoint):
    target = loaded(checkpoint)
    draft = load_drafter("mtp", target)
    tree = FeatureTreeDraft(draft.model, target, (3, 2))
    assert generated(speculate(target, ROWS, tree, 4), ROWS) == plain(target, ROWS)
    assert speculate(target, ROWS, draft, 4, seed=1, do_sample=True).speculation.proposed > 0


@needs_mtp
def test_a_checkpoint_without_the_weights_is_named(tmp_path):
    build("glm4_moe", 3, **SIZE).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no whole prediction module"):
        load_drafter("mtp", loaded(tmp_path))


def test_a_model_without_such_a_module_is_named():
    with pytest.raises(ValueError, match="num_mtp_layers"):
        load_drafter("mtp", tiny_llama())
