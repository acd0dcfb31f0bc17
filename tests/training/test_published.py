"""Published checkpoints: synthetic ones in the published layouts, against small forwards written down here."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

from hf_specdec.drafts.feature_tree import FeatureTreeDraft
from hf_specdec.drafts.features import fused, hidden_states, inputs
from hf_specdec.drafts.medusa import MedusaDraft
from hf_specdec.training import load_drafter
from hf_specdec.training.drafter import is_drafter

from ..helpers import generated, plain, speculate, tiny_llama
from .watched import Watched

H, I, V, HEADS, KV, THETA = 32, 40, 61, 4, 2, 5000.0
CONFIG = dict(model_type="llama", hidden_size=H, intermediate_size=I, num_attention_heads=HEADS, num_key_value_heads=KV, num_hidden_layers=1,
              vocab_size=V, rms_norm_eps=1e-5, rope_theta=THETA, max_position_embeddings=256, hidden_act="silu")
IDS = "eagle_aux_hidden_state_layer_ids"
ROWS = [[5, 6, 7, 8, 9], [11, 12, 13]]


@pytest.fixture(scope="module")
def deep():
    return tiny_llama(3, num_hidden_layers=8)


def random(*shape):
    return torch.randn(shape) * 0.15


def layer(width: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    d = H // HEADS
    sizes = {"self_attn.q_proj": (H, width), "self_attn.k_proj": (KV * d, width), "self_attn.v_proj": (KV * d, width), "self_attn.o_proj": (H, H),
             "mlp.gate_proj": (I, H), "mlp.up_proj": (I, H), "mlp.down_proj": (H, I)}
    return {f"{name}.weight": random(*shape) for name, shape in sizes.items()} | {"post_attention_layernorm.weight": 1 + random(H)}


def eagle(target) -> dict[str, torch.Tensor]:
    parts = {f"layers.0.{name}": tensor for name, tensor in layer(H).items()}
    return parts | {"fc.weight": random(H, 2 * H), "fc.bias": random(H), "embed_tokens.weight": target.get_input_embeddings().weight.detach().clone()}


def eagle3(target, ids=None) -> dict[str, torch.Tensor]:
    ids = torch.arange(0, V, 2) if ids is None else ids
    parts = layer(2 * H) | {"hidden_norm.weight": 1 + random(H), "input_layernorm.weight": 1 + random(H)}
    known = torch.zeros(V, dtype=torch.bool)
    known[ids] = True
    return {f"midlayer.{name}": tensor for name, tensor in parts.items()} | {
        "fc.weight": random(H, 3 * H), "norm.weight": 1 + random(H), "lm_head.weight": random(len(ids), H),
        "d2t": ids - torch.arange(len(ids)), "t2d": known}


def write(folder, tensors, **config):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


# --- the reference --------------------------------------------------------------------------------------------------------------


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x):
    """[L, n, d] at the positions 0..L-1."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(x, w):
    """x [L, width]: causal attention with grouped keys and values."""
    d, n = H // HEADS, len(x)
    q, k, v = (linear(x, w[f"self_attn.{name}_proj.weight"]).view(n, -1, d) for name in "qkv")
    k, v = (part.repeat_interleave(HEADS // KV, dim=1) for part in (rotated(k), v))
    scores = torch.einsum("ihd,jhd->hij", rotated(q), k) / math.sqrt(d)
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    return linear(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(n, H), w["self_attn.o_proj.weight"])


def mlp(x, w):
    inner = silu(linear(x, w["mlp.gate_proj.weight"])) * linear(x, w["mlp.up_proj.weight"])
    return linear(inner, w["mlp.down_proj.weight"])


def part(tensors, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def eagle_forward(target, tensors, embedded, states):
    """Next states [L, H] and logits [L, V] of EAGLE."""
    w = part(tensors, "layers.0.")
    x = linear(torch.cat([embedded, states], -1), tensors["fc.weight"], tensors["fc.bias"])
    x = x + attention(x, w)
    x = x + mlp(norm(x, w["post_attention_layernorm.weight"]), w)
    return x, target.lm_head(x)


def eagle3_forward(target, tensors, embedded, states):
    """Next states [L, H] and logits [L, V] of EAGLE-3; states are those of three layers the first time."""
    w = part(tensors, "midlayer.")
    x = linear(states, tensors["fc.weight"]) if states.shape[-1] == 3 * H else states
    both = torch.cat([norm(embedded, w["input_layernorm.weight"]), norm(x, w["hidden_norm.weight"])], -1)
    x = x + attention(both, w)
    x = x + mlp(norm(x, w["post_attention_layernorm.weight"]), w)
    few = linear(norm(x, tensors["norm.weight"]), tensors["lm_head.weight"])
    ids = torch.arange(len(few[0])) + tensors["d2t"]
    return x, torch.full((len(x), V), -torch.inf).index_copy(1, ids, few)


@torch.no_grad()
def check_against(forward, target, tensors, folder, layers):
    loaded = load_drafter(folder, target)
    assert loaded.layers == layers and is_drafter(folder)
    draft, steps = Watched(loaded.model, target), set()
    speculate(target, ROWS, draft, 3, max_new_tokens=10)
    judged = [(step, [*row, *(one[b] for one in drafted)], logits[b, 0])
              for step, rows, drafted, logits in draft.log for b, row in enumerate(rows)]
    for step, tokens, logits in judged:
        ids = torch.tensor(tokens)
        with hidden_states(target, layers) as seen:
            target(input_ids=ids[None, : len(ids) - 1 - step])
            states = seen()[0]
        embedded, own = target.get_input_embeddings()(ids[1:]), []
        known = states if states.shape[-1] == H else linear(states, tensors["fc.weight"])
        for _ in range(step):  # its own states from there on
            own.append(forward(target, tensors, embedded[: len(known) + len(own)], torch.cat([known, *own]))[0][-1:])
        expected = forward(target, tensors, embedded, torch.cat([known, *own]))[1][-1]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
        steps.add(step)
    assert steps == {0, 1, 2}


def test_an_eagle_checkpoint_computes_what_its_paper_says(deep, tmp_path):
    tensors = eagle(deep)
    check_against(eagle_forward, deep, tensors, write(tmp_path, tensors), (8,))


@pytest.mark.parametrize(("named", "layers"), [
    ({}, (1, 3, 4)),
    ({IDS: [1, 3, 7]}, (0, 2, 6)),  # speculators and vLLM count from the embedding on
    ({"eagle_config": {IDS: [1, 7, 3]}}, (1, 3, 7)),  # SpecForge, SGLang and ModelOpt say which layers put them out
    ({"eagle_config": {IDS: [1, 3, 7]}, "hf_specdec_notes": {}}, (0, 2, 6)),  # what this package has written before
])
def test_an_eagle3_checkpoint_computes_what_its_paper_says(deep, tmp_path, named, layers):
    tensors = eagle3(deep)
    check_against(eagle3_forward, deep, tensors, write(tmp_path, tensors, draft_vocab_size=31, **named), layers)


@pytest.mark.parametrize("make", [eagle, eagle3])
def test_output_is_the_targets_own(deep, tmp_path, make):
    loaded = load_drafter(write(tmp_path, make(deep)), deep)
    for draft in (loaded, FeatureTreeDraft(loaded.model, deep)):
        out = speculate(deep, ROWS, draft, 4)
        assert generated(out, ROWS) == plain(deep, ROWS) and out.speculation.proposed > 0


@torch.no_grad()
def test_eagle3_goes_on_from_the_state_behind_the_norm_where_the_config_says_so(deep, tmp_path):
    tensors = eagle3(deep)
    plain_one, normed = (load_drafter(write(tmp_path / name, tensors, norm_output=name == "normed"), deep).model for name in ("plain", "normed"))
    x = torch.randn(1, 4, 2 * H)
    before, after = (model.base_model(inputs_embeds=x).last_hidden_state for model in (plain_one, normed))
    torch.testing.assert_close(after, norm(before, tensors["norm.weight"]))
    torch.testing.assert_close(normed(inputs_embeds=x).logits, plain_one(inputs_embeds=x).logits)


@torch.no_grad()
def test_eagle3_norms_all_states_as_one_where_the_config_says_so(deep, tmp_path):
    tensors = eagle3(deep) | {"input_norm.weight": 1 + random(3 * H)}
    for name, said in (("a", {"norm_before_fc": True}), ("b", {"eagle_config": {"norm_before_fc": True}})):
        model, states = load_drafter(write(tmp_path / name, tensors, **said), deep).model, torch.randn(2, 5, 3 * H)
        torch.testing.assert_close(fused(model, states), linear(norm(states, tensors["input_norm.weight"]), tensors["fc.weight"]))
    with pytest.raises(ValueError, match="input_norm"):
        load_drafter(write(tmp_path / "c", eagle3(deep), norm_before_fc=True), deep)


def test_an_eagle3_checkpoint_may_be_narrower_than_its_target(deep, tmp_path):
    def cut(tensor):  # every H becomes 24, but for what fc reads; heads of 6
        return tensor[tuple(slice({H: 24, 2 * H: 48, KV * H // HEADS: 12}.get(size, size)) for size in tensor.shape)]

    tensors = {name: cut(tensor) if tensor.is_floating_point() and name != "fc.weight" else tensor for name, tensor in eagle3(deep).items()}
    tensors |= {"fc.weight": random(24, 3 * H), "embed_tokens.weight": random(V, 24)}
    draft = load_drafter(write(tmp_path / "a", tensors, hidden_size=24, target_hidden_size=H), deep)
    states, tokens = torch.randn(1, 4, 3 * H), torch.tensor([[5, 6, 7, 8]])
    expected = torch.cat([linear(states, tensors["fc.weight"]), tensors["embed_tokens.weight"][tokens]], dim=-1)
    torch.testing.assert_close(inputs(draft.model, fused(draft.model, states), tokens), expected)
    out = speculate(deep, ROWS, draft, 4)
    assert generated(out, ROWS) == plain(deep, ROWS) and out.speculation.proposed > 0
    tensors.pop("embed_tokens.weight")
    with pytest.raises(ValueError, match="embed_tokens.weight has shape none"):
        load_drafter(write(tmp_path / "b", tensors, hidden_size=24, target_hidden_size=H), deep)


def test_an_eagle_checkpoint_may_have_biases_in_q_k_and_v_alone(deep, tmp_path):
    """As those of Qwen2, whose config says qkv_bias."""
    biases = {f"layers.0.self_attn.{name}_proj.bias": random(H if name == "q" else KV * H // HEADS) for name in "qkv"}
    attention = load_drafter(write(tmp_path, eagle(deep) | biases, qkv_bias=True), deep).model.base_model.layers[0].self_attn
    assert torch.equal(attention.k_proj.bias, biases["layers.0.self_attn.k_proj.bias"]) and attention.o_proj.bias is None


@pytest.mark.parametrize("said", [{"logit_scale": 0.5}, {"eagle_config": {"use_aux_hidden_state": False}}])
def test_what_an_eagle3_config_says_and_nobody_reads_is_refused(deep, tmp_path, said):
    with pytest.raises(ValueError, match="not read"):
        load_drafter(write(tmp_path, eagle3(deep), **said), deep)


def test_an_embedding_of_its_own_is_used(deep, tmp_path):
    tensors = eagle(deep) | {"embed_tokens.weight": random(V, H)}
    own = load_drafter(write(tmp_path, tensors), deep).model.get_input_embeddings()
    assert torch.equal(own.weight, tensors["embed_tokens.weight"]) and own is not deep.get_input_embeddings()


@pytest.mark.parametrize(("change", "config", "message"), [
    ({"fc.weight": torch.zeros(H, 5 * H)}, {}, "fc.weight has shape"),
    ({"layers.0.mlp.up_proj.weight": None}, {}, "has no layers.0.mlp.up_proj.weight"),
    ({"embedding_layernorm.weight": torch.ones(H)}, {}, "does not map: embedding_layernorm.weight"),
    ({"embed_tokens.weight": torch.zeros(V + 1, H)}, {}, "embed_tokens.weight has shape"),
    ({"layers.0.mlp.up_proj.weight": torch.zeros(I + 1, H)}, {}, "up_proj.weight has shape"),
    ({}, {"hidden_size": 64}, "hidden_size 64 does not map"),
    ({}, {"model_type": "gpt2"}, "Llama family"),
])
def test_what_does_not_map_is_named(deep, tmp_path, change, config, message):
    tensors = {name: tensor for name, tensor in (eagle(deep) | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        load_drafter(write(tmp_path, tensors, **config), deep)


def test_an_eagle3_checkpoint_needs_its_head_and_a_deep_enough_target(deep, tmp_path):
    tensors = eagle3(deep)
    with pytest.raises(ValueError, match="this target has 2 layers"):
        load_drafter(write(tmp_path / "a", tensors), tiny_llama(3))
    with pytest.raises(ValueError, match="d2t do not fit"):
        load_drafter(write(tmp_path / "b", tensors | {"d2t": tensors["d2t"] + 40}), deep)
    with pytest.raises(ValueError, match="no lm_head.weight"):
        load_drafter(write(tmp_path / "c", {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}), deep)


# --- Medusa ---------------------------------------------------------------------------------------------------------------------


def medusa(heads: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {name: tensor for i in range(heads) for name, tensor in (
        (f"{i}.0.linear.weight", random(H, H)), (f"{i}.0.linear.bias", random(H)), (f"{i}.1.weight", random(V, H)))}


def write_medusa(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x"} | config))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_heads_compute_what_their_paper_says(deep, tmp_path, prefix):
    tensors = medusa()
    folder = write_medusa(tmp_path, {prefix + name: tensor for name, tensor in tensors.items()})
    draft, states = load_drafter(folder, deep), torch.randn(5, H)
    assert isinstance(draft, MedusaDraft) and is_drafter(folder)
    for i in range(3):
        x = states + silu(linear(states, tensors[f"{i}.0.linear.weight"], tensors[f"{i}.0.linear.bias"]))
        torch.testing.assert_close(draft.heads(states)[:, i], linear(x, tensors[f"{i}.1.weight"]))
    out = speculate(deep, ROWS, MedusaDraft(draft.heads, deep, (3, 2, 1)), 4)
    assert generated(out, ROWS) == plain(deep, ROWS)


def test_medusa_checkpoints_that_do_not_fit_are_refused(deep, tmp_path):
    tensors = medusa()
    with pytest.raises(ValueError, match="speaks of 5 heads"):
        load_drafter(write_medusa(tmp_path / "a", tensors, medusa_num_heads=5), deep)
    with pytest.raises(ValueError, match="output head"):
        load_drafter(write_medusa(tmp_path / "b", tensors | {"1.1.weight": torch.zeros(V + 3, H)}), deep)
    with pytest.raises(ValueError, match="does not map: extra"):
        load_drafter(write_medusa(tmp_path / "c", tensors | {"extra": torch.zeros(1)}), deep)


def test_pickles_are_not_opened(deep, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"not read")
    with pytest.raises(ValueError, match="is a pickle"):
        load_drafter(tmp_path, deep)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(ValueError, match="is a pickle"):
        load_drafter(tmp_path, deep)
