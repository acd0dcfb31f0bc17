"""Synthetic DFlash checkpoints in the published layouts, and a small forward of them written down here."""

from __future__ import annotations

import json
import math

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

from hf_specdec.drafts.features import hidden_states

H, I, V, HEADS, KV, D, LAYERS, BLOCK, WINDOW, THETA = 32, 40, 61, 4, 2, 8, 2, 5, 6, 5000.0
READS = [0, 2]
OWN = dict(architectures=["DFlashDraftModel"], model_type="qwen3", hidden_size=H, intermediate_size=I, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV,
           head_dim=D, vocab_size=V, rms_norm_eps=1e-6, rope_theta=THETA, max_position_embeddings=256, hidden_act="silu", num_target_layers=4)
ZLAB = {**OWN, "block_size": BLOCK, "dflash_config": {"mask_token_id": 1, "target_layer_ids": READS}}
WINDOWS = {**ZLAB, "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": WINDOW}
TWO = {**WINDOWS, "architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": {
    "block_size": BLOCK, "mask_token_id": 1, "target_layer_ids": READS, "conv_group_size": 4, "conv_kernel_size": 2, "selector_rank": 6, "selector_top_k": 7,
    "final_logit_softcapping": 20.0, "output_multiplier": 0.7, "input_embedding_scale": 1.5}}
SPECULATORS = {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "transformer_layer_config": {**OWN, "architectures": None}, "block_size": BLOCK, "mask_token_id": 1,
               "aux_hidden_state_layer_ids": [layer + 1 for layer in READS], "draft_vocab_size": 30, "sliding_window_non_causal": False}
ROPE = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("sliding_attention", THETA), ("full_attention", 9.0))}
BOTH = {**SPECULATORS, "speculators_model_type": "dflash2", "conv_group_size": 4, "conv_kernel_size": 2, "selector_rank": 6, "selector_top_k": 7,
        "transformer_layer_config": {**SPECULATORS["transformer_layer_config"], "rope_theta": None, "rope_parameters": ROPE}}
UNCAUSAL = {**WINDOWS, "dflash_config": {**WINDOWS["dflash_config"], "causal": False}}
SPARKS = {f"DSpark, {kind}": {**OWN, "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": 1, "target_layer_ids": READS, "num_anchors": 8, "markov_rank": 6,
                             "markov_head_type": kind, "enable_confidence_head": True, "confidence_head_with_markov": True, "layer_types": ["full_attention"] * LAYERS}
          for kind in ("vanilla", "gated", "rnn")}  # fmt: skip
HEADS_OF = dict(markov_rank=6, enable_confidence_head=True)
SPARKS["DSpark of speculators"] = {**SPECULATORS, **HEADS_OF, "speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "sample_from_anchor": True,
                                   "markov_head_type": "gated", "confidence_head_with_markov": True}
SPARKS["DSpark of speculators, behind the root"] = {**SPARKS["DSpark of speculators"], "sample_from_anchor": False, "markov_head_type": "rnn"}
SPARKS["DSpark of SpecForge"] = {**ZLAB, "architectures": ["DSparkDraftModel"], "dflash_config": {
    **ZLAB["dflash_config"], **HEADS_OF, "projector_type": "dspark", "markov_head_type": "vanilla", "confidence_head_with_markov": False}}
XPRESS = {"XPress": {**ZLAB, "architectures": ["Qwen3XPressModel"], "xpress_rank": 6, "xpress_mlp_hidden": 10, "xpress_block_size": BLOCK, "xpress_num_passes": 6, "sample_from_anchor": False}}
XPRESS["XPress of speculators"] = {**SPECULATORS, "speculators_model_type": "xpress", "architectures": ["XPressSpeculator"], "xpress_rank": 6, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6}
XPRESS["XPress of speculators, at the root's place"] = {**XPRESS["XPress of speculators"], "sample_from_anchor": True, "aux_hidden_state_layer_ids": [1, 4], "transformer_layer_config": {
    **SPECULATORS["transformer_layer_config"], "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": WINDOW}}
ANCHORED = {**SPECULATORS, "sample_from_anchor": True}
CONFIGS = {"z-lab": ZLAB, "with windows": WINDOWS, "causal": {**ZLAB, "is_causal": True}, "not causal in windows": UNCAUSAL,
           "with biases": {**ZLAB, "attention_bias": True}, "DFlash 2": TWO, "speculators": SPECULATORS, "DFlash 2 of speculators": BOTH, "at the root's place": ANCHORED,
           **SPARKS, **XPRESS}
NAMES = {"token_embed.weight": "w1.weight", "readout.weight": "w2.weight", "mix_l": "mix.L"} | {f"mlp_{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def every(config) -> dict:
    """What a config says, wherever it says it."""
    return {**config, **config.get("transformer_layer_config", {}), **config.get("dflash_config", {})}


def checkpoint(config) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    shapes, two, kept = {"fc.weight": (H, len(READS) * H)}, "selector_rank" in every(config), config.get("draft_vocab_size", V)
    for i in range(LAYERS):
        own = {"self_attn.q_proj": (HEADS * D, H), "self_attn.k_proj": (KV * D, H), "self_attn.v_proj": (KV * D, H), "self_attn.o_proj": (H, HEADS * D), "mlp.gate_proj": (I, H),
               "mlp.up_proj": (I, H), "mlp.down_proj": (H, I)}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in own.items()}
        if every(config).get("attention_bias"):
            shapes |= {f"layers.{i}.{name}.bias": shape[:1] for name, shape in own.items() if "attn" in name}
        if two:
            for conv in ("attention_conv", "mlp_conv"):
                shapes |= {f"layers.{i}.{conv}.base_kernel": (2, 2, H), f"layers.{i}.{conv}.kernel_projection.weight": (2 * 2 * H // 4, H)}
    if two:
        shapes |= {f"candidate_selector.{name}": (kept, 6) for name in ("predecessor_codebook", "successor_codebook")} | {"candidate_selector.hidden_projection.weight": (6, H)}
    own = every(config)
    if "markov_rank" in own:
        more = {"gated": {"gate_proj": (6, H + 6)}, "rnn": {"joint_proj": (18, 12 + H)}}.get(own["markov_head_type"], {})
        shapes |= {"markov_head.markov_w1.weight": (V, 6), "markov_head.markov_w2.weight": (kept, 6)}
        shapes |= {"confidence_head.proj.weight": (1, H + (6 if own["confidence_head_with_markov"] else 0)), "confidence_head.proj.bias": (1,)}
        shapes |= {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
        for name, shape in more.items():
            shapes |= {f"markov_head.{name}.weight": shape, f"markov_head.{name}.bias": shape[:1]}
    if "xpress_rank" in own:
        inner = own.get("xpress_mlp_hidden", 12)
        parts = {"token_embed.weight": (V, 6), "readout.weight": (kept, 6), "mix_l": (6, BLOCK, BLOCK), "down_h.weight": (6, H), "down_g.weight": (6, H), "in_proj.weight": (6, 18),
                 "mlp_gate.weight": (inner, 6), "mlp_up.weight": (inner, 6), "mlp_down.weight": (6, inner)}  # fmt: skip
        shapes |= {f"refiner_head.{name}" if "xpress_mlp_ratio" in own else f"xpress_head.{NAMES.get(name, name)}": shape for name, shape in parts.items()}
    tensors = {name: torch.randn(shape) * (0.6 if any(word in name for word in ("candidate", "markov", "refiner", "xpress")) else 0.25) for name, shape in shapes.items()}
    norms = ["norm", "hidden_norm", *(f"layers.{i}.{name}" for i in range(LAYERS) for name in ("input_layernorm", "post_attention_layernorm"))]
    tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(H) for name in norms}
    tensors |= {f"layers.{i}.self_attn.{name}_norm.weight": 1 + 0.1 * torch.randn(D) for i in range(LAYERS) for name in "qk"}
    if kept < V:
        ids = torch.arange(kept) * 2
        known = torch.zeros(V, dtype=torch.bool)
        known[ids] = True
        tensors |= {"lm_head.weight": torch.randn(kept, H) * 0.3, "d2t": ids - torch.arange(kept), "t2d": known, "embed_tokens.weight": torch.randn(V, H)}
    return tensors


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- the reference --------------------------------------------------------------------------------------------------------------


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(x, places):
    """[L, n, d] at these places."""
    half = D // 2
    angle = places[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(x, seen, w, window, causal, from_root):
    """The block x [P, H] behind the states seen [n, H]; windows reach back from the root for all of it, or from each place."""
    n, both = len(seen), torch.cat([seen, x])
    places = torch.arange(len(both)).float()
    q, k, v = (linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias")).view(len(x), -1, D) for name, x in (("q", x), ("k", both), ("v", both)))
    q, k = rotated(norm(q, w["q_norm.weight"]), places[n:]), rotated(norm(k, w["k_norm.weight"]), places).repeat_interleave(HEADS // KV, dim=1)
    v = v.repeat_interleave(HEADS // KV, dim=1)
    ahead = places[None] - places[n:, None]
    visible = torch.ones_like(ahead, dtype=torch.bool) if window is None else (places >= n - window).expand_as(ahead) if from_root else ahead.abs() < window
    visible = visible & (ahead <= 0) if causal else visible
    scores = (torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(D)).masked_fill(~visible, -torch.inf)
    return linear(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(x), -1), w["o_proj.weight"], w.get("o_proj.bias"))


def convolved(x, inner, w):
    """inner(x) between the two convolutions of w, channel by channel; w {}: without."""
    if not w:
        return inner(x)
    dynamic = linear(x, w["kernel_projection.weight"]).view(len(x), 2, 2, H // 4)

    def one(x, which):
        return torch.stack([sum((w["base_kernel"][which, back] + dynamic[i, which, back].repeat_interleave(4)) * x[i - back] for back in range(2) if i >= back) for i in range(len(x))])

    return one(inner(one(x, 0)), 1)


def part(tensors, prefix):
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@torch.no_grad()
def block(target, config, tensors, row):
    """States [P, H] and logits [P, V] of the block behind a row, whose last token is its root."""
    own = every(config)
    with hidden_states(target, tuple(layer - 1 for layer in own.get("aux_hidden_state_layer_ids", [layer + 1 for layer in READS]))) as shown:
        target(input_ids=torch.tensor([row[:-1]]))
        seen = norm(linear(shown()[0], tensors["fc.weight"]), tensors["hidden_norm.weight"])
    tokens, embedding = torch.tensor([row[-1]] + [1] * (BLOCK - 1)), target.get_input_embeddings()
    scaled = "selector_rank" not in own and "draft_vocab_size" not in own
    x = embedding(tokens) if scaled else embedding.weight[tokens] * own.get("input_embedding_scale", 1.0)
    for i in range(LAYERS):
        w = part(tensors, f"layers.{i}.")
        slides = own.get("layer_types", ["full_attention"] * LAYERS)[i] == "sliding_attention"
        causal = own.get("is_causal", own.get("causal", slides))
        x = x + convolved(norm(x, w["input_layernorm.weight"]), lambda x: attention(x, seen, part(w, "self_attn."), WINDOW if slides else None, causal, "speculators_model_type" in own),
                          part(w, "attention_conv."))  # fmt: skip
        x = x + convolved(norm(x, w["post_attention_layernorm.weight"]), lambda x: linear(silu(linear(x, w["mlp.gate_proj.weight"])) * linear(x, w["mlp.up_proj.weight"]),
                          w["mlp.down_proj.weight"]), part(w, "mlp_conv."))  # fmt: skip
    x = norm(x, tensors["norm.weight"])
    if "draft_vocab_size" in own:
        return x, torch.full((BLOCK, V), -torch.inf).index_copy(1, torch.arange(30) * 2, linear(x, tensors["lm_head.weight"]))
    logits = target.lm_head(x) * own.get("output_multiplier", 1.0)
    return x, 20 * (logits / 20).tanh() if "final_logit_softcapping" in own else logits


def following(tensors, state, logits, before):
    """[V] at a place that comes after the token before, as DFlash 2 has it: minus infinity for all but the likeliest. A token that has no row in the codebooks has that of the last
    one before it that has."""
    first, second = (tensors[f"candidate_selector.{name}"] for name in ("predecessor_codebook", "successor_codebook"))
    rows, found = (torch.arange(V) // (1 if len(first) == V else 2)).clamp(max=len(first) - 1), logits.topk(7).indices
    extra = (first[rows[before]] * linear(state, tensors["candidate_selector.hidden_projection.weight"]) * second[rows[found]]).sum(-1)
    return torch.full((V,), -torch.inf).index_copy(0, found, logits[found] + extra)


def stepping(kind, w, state, before, carried):
    """The bias [V] of DSpark's Markov head after the token before, and what is carried to the next place."""
    bias = known = w["markov_w1.weight"][before]
    if kind == "gated":
        bias = linear(torch.cat([state, known]), w["gate_proj.weight"], w["gate_proj.bias"]).sigmoid() * known
    elif kind == "rnn":
        gate, candidate, out = linear(torch.cat([carried, known, state]), w["joint_proj.weight"], w["joint_proj.bias"]).view(3, 6)
        carried, bias = gate.sigmoid() * carried + (1 - gate.sigmoid()) * candidate.tanh(), out.tanh()
    return linear(bias, w["markov_w2.weight"]), carried


def refined(tensors, states, before):
    """The biases [P, V'] of XPress at the places of a block, which come after the tokens before, [P]; as the authors' module computes them, all at once."""
    w = part(tensors, "refiner_head.") or {own: tensors[f"xpress_head.{NAMES.get(own, own)}"] for own in (*NAMES, "down_h.weight", "down_g.weight", "in_proj.weight")}
    known = torch.cat([linear(states, w["down_h.weight"]), linear(states.mean(0), w["down_g.weight"]).expand(BLOCK, 6), w["token_embed.weight"][torch.tensor(before)]], -1)
    x = linear(known, w["in_proj.weight"])
    x = x + torch.stack([sum(w["mix_l"][:, k, j] * x[j] for j in range(k + 1)) for k in range(BLOCK)])
    return linear(x + linear(silu(linear(x, w["mlp_gate.weight"])) * linear(x, w["mlp_up.weight"]), w["mlp_down.weight"]), w["readout.weight"])


def jacobi(config, tensors, states, logits, row, passes):
    """The tokens that XPress drafts greedily in so many passes, as its authors go about it: all places at once, each time after the tokens of the time before."""
    first, tokens = first_place(config), logits.argmax(-1).tolist()
    for _ in range(passes):
        tokens = (logits + spread(refined(tensors, states, (row[-1 - first :] + tokens[first:])[:BLOCK]))).argmax(-1).tolist()
    return tokens[first:]


def spread(bias):
    """Biases [.., V'] as [.., V]."""
    return bias if bias.shape[-1] == V else torch.zeros(*bias.shape[:-1], V).index_copy(-1, torch.arange(30) * 2, bias)


def first_place(config):
    """Of the block, the place that says what comes behind the root."""
    return 0 if every(config).get("sample_from_anchor", "markov_rank" in every(config)) else 1


def trusted(config, tensors, states, root, tokens):
    """How likely each place's token is to be accepted, by the places' states and the token before each: the root, then these tokens."""
    out = []
    for state, before in zip(states[first_place(config) :], [root, *tokens]):
        known = tensors["markov_head.markov_w1.weight"][before] if every(config)["confidence_head_with_markov"] else torch.zeros(0)
        score = sum(weight * value for weight, value in zip(tensors["confidence_head.proj.weight"][0].tolist(), [*state.tolist(), *known.tolist()]))
        out.append(1 / (1 + math.exp(-score - float(tensors["confidence_head.proj.bias"]))))
    return out


def laws(config, tensors, states, logits, row, tokens):
    """Logits [V] of each place ahead whose forerunners are the row, the last of it the root, and these tokens, which may grow meanwhile."""
    own_config, carried, root = every(config), torch.zeros(6), row[-1]
    first = first_place(config)
    if first and own_config.get("markov_head_type") == "rnn":
        carried = stepping("rnn", part(tensors, "markov_head."), states[0], root, carried)[1]
    for i, (state, own) in enumerate(zip(states[first:], logits[first:])):
        if i > len(tokens):
            return
        before = tokens[i - 1] if i else root
        if "candidate_selector.predecessor_codebook" in tensors:
            yield following(tensors, state, own, before)
        elif "markov_rank" in own_config:
            bias, carried = stepping(own_config["markov_head_type"], part(tensors, "markov_head."), state, before, carried)
            yield own + spread(bias)
        elif "xpress_rank" in own_config:
            yield own + spread(refined(tensors, states, (row[-1 - first :] + tokens + [0] * BLOCK)[:BLOCK])[first + i])
        else:
            yield own


def path(config, tensors, states, logits, row):
    """The tokens that are drafted greedily."""
    tokens = []
    for scores in laws(config, tensors, states, logits, row, tokens):
        tokens.append(int(scores.argmax()))
    return tokens
