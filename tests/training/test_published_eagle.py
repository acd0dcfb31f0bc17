"""EAGLE-3 checkpoints of several layers, and of Qwen3's, against a forward written down here."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import linear

from hf_specdec.training import load_drafter

from ..helpers import generated, plain, speculate, tiny_llama
from .test_published import HEADS, KV, ROWS, H, V, check_against, eagle, eagle3, layer, mlp, norm, part, random, rotated, write

D = H // HEADS


@pytest.fixture(scope="module")
def deep():
    return tiny_llama(3, num_hidden_layers=8)


def made(target, layers: int, normed: bool) -> dict[str, torch.Tensor]:
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in eagle3(target).items()}
    for i in range(1, layers):
        tensors |= {f"layers.{i}.{name}": tensor + random(*tensor.shape) / 4 for name, tensor in (layer(H) | {"input_layernorm.weight": 1 + random(H)}).items()}
    return tensors | {f"layers.{i}.self_attn.{name}_norm.weight": 1 + random(D) for i in range(layers) for name in "qk" if normed}


def attention(x, w):
    """Causal, x [L, width]; queries and keys are normed head by head where there are weights for it."""
    q, k, v = (linear(x, w[f"self_attn.{name}_proj.weight"]).view(len(x), -1, D) for name in "qkv")
    if "self_attn.q_norm.weight" in w:
        q, k = norm(q, w["self_attn.q_norm.weight"]), norm(k, w["self_attn.k_norm.weight"])
    q, k, v = rotated(q), rotated(k).repeat_interleave(HEADS // KV, dim=1), v.repeat_interleave(HEADS // KV, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(D)
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return linear(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(x), H), w["self_attn.o_proj.weight"])


def forward(target, tensors, embedded, states):
    """Next states [L, H] and logits [L, V]; states are those of three layers the first time."""
    x = linear(states, tensors["fc.weight"]) if states.shape[-1] == 3 * H else states
    for i in range(8):
        w = part(tensors, f"layers.{i}.")
        if w:
            normed = norm(x if i else embedded, w["input_layernorm.weight"])
            x = x + attention(normed if i else torch.cat([normed, norm(x, w["hidden_norm.weight"])], -1), w)
            x = x + mlp(norm(x, w["post_attention_layernorm.weight"]), w)
    few = linear(norm(x, tensors["norm.weight"]), tensors["lm_head.weight"])
    return x, torch.full((len(x), V), -torch.inf).index_copy(1, torch.arange(len(few[0])) + tensors["d2t"], few)


@pytest.mark.parametrize(("layers", "normed", "said"), [
    (2, False, {}), (3, False, {"num_hidden_layers": 1}), (1, True, {"model_type": "qwen3"}), (2, True, {"model_type": "qwen3", "use_sliding_window": False}), (1, True, {}),
    (1, False, {"model_type": "qwen3"}), (1, False, {"model_type": "qwen2"})])  # fmt: skip
def test_eagle3_of_several_layers_and_of_qwen3s(deep, tmp_path, layers, normed, said):
    tensors = made(deep, layers, normed)
    folder = write(tmp_path, tensors, draft_vocab_size=31, head_dim=D, **said)
    check_against(forward, deep, tensors, folder, (1, 3, 4))
    out = speculate(deep, ROWS, load_drafter(folder, deep), 4)
    assert generated(out, ROWS) == plain(deep, ROWS) and out.speculation.proposed > 0


def test_as_speculators_writes_it(deep, tmp_path):
    """Its shape stands in transformer_layer_config."""
    tensors = made(deep, 2, True)
    folder = write(tmp_path, tensors, speculators_model_type="eagle3", model_type="speculator_model", hidden_size=None,
                   transformer_layer_config={"model_type": "qwen3", "hidden_size": H, "head_dim": D, "layer_types": ["full_attention"] * 2})
    check_against(forward, deep, tensors, folder, (1, 3, 4))


def test_windows_are_refused(deep, tmp_path):
    for i, said in enumerate(({"use_sliding_window": True}, {"layer_types": ["sliding_attention"]})):
        with pytest.raises(ValueError, match="sliding windows, which are not read"):
            load_drafter(write(tmp_path / str(i), made(deep, 1, True), model_type="qwen3", head_dim=D, **said), deep)


def test_a_layer_that_is_not_whole_is_named(deep, tmp_path):
    tensors = made(deep, 2, False)
    del tensors["layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match="has no layers.1.mlp.up_proj.weight"):
        load_drafter(write(tmp_path, tensors), deep)


def test_eagle_of_qwen2_is_read(deep, tmp_path):
    biases = {f"layers.0.self_attn.{name}_proj.bias": random(H if name == "q" else KV * D) for name in "qkv"}
    draft = load_drafter(write(tmp_path, eagle(deep) | biases, model_type="qwen2"), deep)
    assert torch.equal(draft.model.base_model.layers[0].self_attn.v_proj.bias, biases["layers.0.self_attn.v_proj.bias"])
    assert generated(speculate(deep, ROWS, draft, 4), ROWS) == plain(deep, ROWS)
