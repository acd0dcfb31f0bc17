"""Published drafters of DFlash's kind: synthetic checkpoints in the published layouts, against a small forward written down here."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu
from transformers import CONFIG_MAPPING, AutoConfig

from hf_specdec import SpeculativeConfig, enable, mx
from hf_specdec.assistants import auto_class
from hf_specdec.drafts import DFlashDraft, MixtureDraft
from hf_specdec.drafts.features import hidden_states
from hf_specdec.loading import loaded
from hf_specdec.training import load_drafter
from hf_specdec.training.drafter import is_drafter
from tests.architectures import FAMILIES

from ..helpers import Logged, generated, plain, repetitive, speculate, tiny_llama

pytestmark = pytest.mark.skipif("muse_glimmer_assistant" not in CONFIG_MAPPING, reason="this version of transformers has no assistant of the kind")
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
SPARKS = {f"DSpark, {kind}": {**OWN, "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": 1, "target_layer_ids": READS, "num_anchors": 8, "markov_rank": 6,
                             "markov_head_type": kind, "enable_confidence_head": True, "confidence_head_with_markov": True, "layer_types": ["full_attention"] * LAYERS}
          for kind in ("vanilla", "gated", "rnn")}  # fmt: skip
CONFIGS = {"z-lab": ZLAB, "with windows": WINDOWS, "causal": {**ZLAB, "is_causal": True}, "DFlash 2": TWO, "speculators": SPECULATORS, **SPARKS}
every_layout = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class BlockLog(Logged, DFlashDraft):
    pass


@pytest.fixture(scope="module")
def target():
    return tiny_llama(3, num_hidden_layers=4)


def checkpoint(config) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    shapes = {"fc.weight": (H, len(READS) * H)}
    for i in range(LAYERS):
        own = {"self_attn.q_proj": (HEADS * D, H), "self_attn.k_proj": (KV * D, H), "self_attn.v_proj": (KV * D, H), "self_attn.o_proj": (H, HEADS * D), "mlp.gate_proj": (I, H),
               "mlp.up_proj": (I, H), "mlp.down_proj": (H, I)}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in own.items()}
        if config is TWO:
            for conv in ("attention_conv", "mlp_conv"):
                shapes |= {f"layers.{i}.{conv}.base_kernel": (2, 2, H), f"layers.{i}.{conv}.kernel_projection.weight": (2 * 2 * H // 4, H)}
    if config is TWO:
        shapes |= {f"candidate_selector.{name}": (V, 6) for name in ("predecessor_codebook", "successor_codebook")} | {"candidate_selector.hidden_projection.weight": (6, H)}
    if "markov_rank" in config:
        more = {"gated": {"gate_proj": (6, H + 6)}, "rnn": {"joint_proj": (18, 12 + H)}}.get(config["markov_head_type"], {})
        shapes |= {"markov_head.markov_w1.weight": (V, 6), "markov_head.markov_w2.weight": (V, 6), "confidence_head.proj.weight": (1, H + 6), "confidence_head.proj.bias": (1,)}
        shapes |= {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
        for name, shape in more.items():
            shapes |= {f"markov_head.{name}.weight": shape, f"markov_head.{name}.bias": shape[:1]}
    tensors = {name: torch.randn(shape) * (0.6 if "candidate" in name or "markov" in name else 0.25) for name, shape in shapes.items()}
    norms = ["norm", "hidden_norm", *(f"layers.{i}.{name}" for i in range(LAYERS) for name in ("input_layernorm", "post_attention_layernorm"))]
    tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(H) for name in norms}
    tensors |= {f"layers.{i}.self_attn.{name}_norm.weight": 1 + 0.1 * torch.randn(D) for i in range(LAYERS) for name in "qk"}
    if config is SPECULATORS:
        ids = torch.arange(30) * 2
        known = torch.zeros(V, dtype=torch.bool)
        known[ids] = True
        tensors |= {"lm_head.weight": torch.randn(30, H) * 0.3, "d2t": ids - torch.arange(30), "t2d": known, "embed_tokens.weight": torch.randn(V, H)}
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


def attention(x, seen, w, window, causal):
    """The block x [P, H] behind the states seen [n, H]."""
    n, both = len(seen), torch.cat([seen, x])
    places = torch.arange(len(both)).float()
    q = rotated(norm(linear(x, w["q_proj.weight"]).view(len(x), -1, D), w["q_norm.weight"]), places[n:])
    k = rotated(norm(linear(both, w["k_proj.weight"]).view(len(both), -1, D), w["k_norm.weight"]), places).repeat_interleave(HEADS // KV, dim=1)
    v = linear(both, w["v_proj.weight"]).view(len(both), -1, D).repeat_interleave(HEADS // KV, dim=1)
    ahead = places[None] - places[n:, None]
    visible = torch.ones_like(ahead, dtype=torch.bool) if window is None else ahead.abs() < window
    visible = visible & (ahead <= 0) if causal else visible
    scores = (torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(D)).masked_fill(~visible, -torch.inf)
    return linear(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(x), -1), w["o_proj.weight"])


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
    own = {**config, **config.get("transformer_layer_config", {}), **config.get("dflash_config", {})}
    with hidden_states(target, tuple(READS)) as shown:
        target(input_ids=torch.tensor([row[:-1]]))
        seen = norm(linear(shown()[0], tensors["fc.weight"]), tensors["hidden_norm.weight"])
    x = target.get_input_embeddings().weight[[row[-1]] + [1] * (BLOCK - 1)] * own.get("input_embedding_scale", 1.0)
    for i in range(LAYERS):
        w = part(tensors, f"layers.{i}.")
        slides = own.get("layer_types", ["full_attention"] * LAYERS)[i] == "sliding_attention"
        causal = slides if own.get("is_causal") is None else own["is_causal"]
        x = x + convolved(norm(x, w["input_layernorm.weight"]), lambda x: attention(x, seen, part(w, "self_attn."), WINDOW if slides else None, causal), part(w, "attention_conv."))
        x = x + convolved(norm(x, w["post_attention_layernorm.weight"]), lambda x: linear(silu(linear(x, w["mlp.gate_proj.weight"])) * linear(x, w["mlp.up_proj.weight"]),
                          w["mlp.down_proj.weight"]), part(w, "mlp_conv."))  # fmt: skip
    x = norm(x, tensors["norm.weight"])
    if config is SPECULATORS:
        return x, torch.full((BLOCK, V), -torch.inf).index_copy(1, torch.arange(30) * 2, linear(x, tensors["lm_head.weight"]))
    logits = target.lm_head(x) * own.get("output_multiplier", 1.0)
    return x, 20 * (logits / 20).tanh() if "final_logit_softcapping" in own else logits


def laws(config, tensors, states, logits, root, tokens):
    """Logits [V] of each place ahead, whose forerunners are the root and these tokens."""
    first, carried = 0 if "markov_rank" in config else 1, torch.zeros(6)
    for i, (state, own) in enumerate(zip(states[first:], logits[first:])):
        if i > len(tokens):
            return
        before = tokens[i - 1] if i else root
        if config is TWO:
            projected, found = linear(state, tensors["candidate_selector.hidden_projection.weight"]), own.topk(7).indices
            extra = (tensors["candidate_selector.predecessor_codebook"][before] * projected * tensors["candidate_selector.successor_codebook"][found]).sum(-1)
            yield torch.full((V,), -torch.inf).index_copy(0, found, own[found] + extra)
        elif "markov_rank" in config:
            w = part(tensors, "markov_head.")
            bias = known = w["markov_w1.weight"][before]
            if config["markov_head_type"] == "gated":
                bias = linear(torch.cat([state, known]), w["gate_proj.weight"], w["gate_proj.bias"]).sigmoid() * known
            elif config["markov_head_type"] == "rnn":
                gate, candidate, out = linear(torch.cat([carried, known, state]), w["joint_proj.weight"], w["joint_proj.bias"]).view(3, 6)
                carried, bias = gate.sigmoid() * carried + (1 - gate.sigmoid()) * candidate.tanh(), out.tanh()
            yield own + linear(bias, w["markov_w2.weight"])
        else:
            yield own


def path(config, tensors, states, logits, root):
    """The tokens that are drafted greedily."""
    tokens = []
    for scores in laws(config, tensors, states, logits, root, tokens):
        tokens.append(int(scores.argmax()))
    return tokens


# --- what is drafted --------------------------------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("rows", [repetitive(13), [*repetitive(13), *repetitive(7, seed=4), *repetitive(9, seed=2)]], ids=["alone", "ragged"])
def test_tokens_are_those_that_the_checkpoint_says(target, tmp_path, config, rows):
    tensors = checkpoint(config)
    loaded = load_drafter(write(tmp_path, config, tensors), target)
    draft = BlockLog(loaded.model, layout=loaded.layout)
    assert is_drafter(tmp_path) and isinstance(loaded, DFlashDraft)
    assert generated(speculate(target, rows, draft, BLOCK, max_new_tokens=18), rows) == plain(target, rows, max_new_tokens=18)
    drafted = [(row, proposal.listed()[b][: proposal.sizes[b]]) for committed, proposal in draft.log for b, row in enumerate(committed) if proposal.sizes[b]]
    assert len(drafted) > 10
    for row, own in drafted:
        assert own == path(config, tensors, *block(target, config, tensors, row), row[-1])[: len(own)]


@every_layout
def test_a_chain_is_drawn_where_the_target_samples(target, tmp_path, config):
    """Each token from the law that is reported of it: of its place, or, after the one before it, what the selector says."""
    tensors = checkpoint(config)
    loaded = load_drafter(write(tmp_path, config, tensors), target)
    draft, rows = BlockLog(loaded.model, layout=loaded.layout), repetitive(13)
    speculate(target, rows, draft, BLOCK, max_new_tokens=18, do_sample=True, temperature=1.3, top_k=0, seed=5)
    judged = 0
    for committed, proposal in draft.log:
        for b, row in enumerate(committed):
            drafted = proposal.listed()[b][: proposal.sizes[b]]
            for i, scores in enumerate(laws(config, tensors, *block(target, config, tensors, row), row[-1], drafted[:-1]) if drafted else ()):
                torch.testing.assert_close(proposal.probs[b, i], (scores / 1.3).softmax(-1), atol=1e-4, rtol=1e-3)
                judged += 1
    assert judged > 20


@every_layout
@pytest.mark.parametrize("make", [lambda draft: draft, lambda draft: DFlashDraft(draft.model, tree=(3, 2), layout=draft.layout), lambda draft: MixtureDraft([draft, "prompt_lookup"], mode="choose")],
                         ids=["chain", "tree", "mixture"])  # fmt: skip
def test_the_text_is_the_targets_own(target, tmp_path, config, make):
    draft, rows = make(load_drafter(write(tmp_path, config, checkpoint(config)), target)), [*repetitive(13), *repetitive(7, seed=4)]
    out = speculate(target, rows, draft, 4, max_new_tokens=16)
    assert generated(out, rows) == plain(target, rows, max_new_tokens=16) and out.speculation.drafted


@pytest.mark.parametrize("name", ["Qwen3.5", "Gemma 3 ", "GPT-OSS"])
def test_targets_of_other_families(tmp_path, name):
    """Hybrids with states, scaled embeddings, mixtures of experts: what the drafter reads are the states that transformers shows."""
    family = next((line for line in FAMILIES if line.name.startswith(name.strip())), None)
    if family is None:
        pytest.skip(f"transformers has no {name} that generates from its cache")
    model = family.model("eager")
    text = model.config.get_text_config()
    own = {**TWO, "hidden_size": text.hidden_size, "num_target_layers": text.num_hidden_layers, "vocab_size": text.vocab_size}
    if (text.hidden_size, text.vocab_size) != (H, V):
        pytest.skip("the checkpoint of these tests is of another width")
    own["dflash_config"] = {**TWO["dflash_config"], "target_layer_ids": [0, text.num_hidden_layers - 1]}
    rows = [*repetitive(13), *repetitive(7, seed=4)]
    out = speculate(model, rows, load_drafter(write(tmp_path, own, checkpoint(TWO)), model), 4, max_new_tokens=12)
    assert generated(out, rows) == plain(model, rows, max_new_tokens=12) and out.speculation.drafted


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
def test_a_chain_ends_behind_a_token_that_is_not_sure(target, tmp_path, sampled):
    """What made it end is judged, too; a tree does not end by that."""
    config, rows = SPARKS["DSpark, gated"], [*repetitive(13), *repetitive(7, seed=4)]
    loaded = load_drafter(write(tmp_path, config, checkpoint(config)), target)
    draft = BlockLog(loaded.model, layout=loaded.layout)
    out = speculate(target, rows, draft, BLOCK, max_new_tokens=16, seed=3, speculative={"draft_stop": "confidence", "draft_confidence": 0.35}, **sampled)
    sizes = [size for _, proposal in draft.log for size in proposal.sizes if size]
    assert min(sizes) == 1 and len(set(sizes)) > 1 and max(sizes) <= BLOCK
    if not sampled:
        assert generated(out, rows) == plain(target, rows, max_new_tokens=16)
    with pytest.raises(ValueError, match="draft_stop='confidence': the draft 'dflash' does not draft token by token"):
        speculate(target, rows, DFlashDraft(loaded.model, tree=(2, 2), layout=loaded.layout), 4, max_new_tokens=4, speculative={"draft_stop": "confidence"})


def test_its_layers_go_into_tiles_and_mx_formats(target, tmp_path):
    draft, rows = load_drafter(write(tmp_path, TWO, checkpoint(TWO)), target), repetitive(13)
    mx.to_tiles(draft.model)
    assert any(isinstance(part, mx.MXLinear) for part in draft.model.modules())
    assert generated(speculate(target, rows, draft, 4, max_new_tokens=12), rows) == plain(target, rows, max_new_tokens=12)


# --- what does not map --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config, message", [
    ({**ZLAB, "hidden_size": 64}, "width 64 with 4 layers; this one has width 32 and 4 layers"),
    ({**ZLAB, "num_target_layers": 36}, "with 36 layers"),
    ({**ZLAB, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 9]}}, r"states of layers \[0, 9\] of its target; this target has 4"),
    ({**ZLAB, "dflash_config": {"mask_token_id": 1}}, r"states of layers \[\]"),
    ({**ZLAB, "dflash_config": {"target_layer_ids": READS}}, "names no mask_token_id"),
    ({**ZLAB, "dflash_config": {"mask_token_id": 99, "target_layer_ids": READS}}, "masks places by the token 99"),
    ({**ZLAB, "num_hidden_layers": 3}, "has no layers.2"),
    ({**ZLAB, "intermediate_size": 48}, "mlp.*has shape"),
    ({**SPARKS["DSpark, rnn"], "architectures": ["Gemma4DSparkModel"]}, "another kind.*Gemma4DSparkModel"),
    ({**SPECULATORS, "speculators_model_type": "dflash_other"}, "another kind than DFlash.*dflash_other"),
    ({**SPECULATORS, "projector_type": "domino"}, "another kind.*domino"),
    ({**SPECULATORS, "sample_from_anchor": True}, "another kind.*at another place"),
], ids=range(12))  # fmt: skip
def test_what_does_not_map_is_named(target, tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(write(tmp_path, config, checkpoint(ZLAB)), target)


def test_a_config_names_it_with_options_of_its_own(target, tmp_path):
    """The layout stays with what is made anew."""
    folder, rows = str(write(tmp_path, TWO, checkpoint(TWO))), repetitive(13)
    model = enable(copy.deepcopy(target))
    for given in ({"draft": "dflash", "draft_source": folder}, {"draft": "dflash", "draft_source": folder, "draft_options": {"tree": (3, 2)}}):
        draft = loaded(SpeculativeConfig(**given), model)
        assert draft.layout.selector is not None and draft.may_branch == ("draft_options" in given)
        assert generated(model.generate(torch.tensor(rows), speculative={**given, "num_assistant_tokens": 4}, max_new_tokens=8, do_sample=False), rows) == plain(target, rows, max_new_tokens=8)


def test_a_hub_id_without_its_prefix_and_the_checkpoints_own_code_are_told_the_way(target):
    with pytest.raises(ValueError, match="z-lab/some holds a DFlash drafter; name it hub:z-lab/some"):
        auto_class(AutoConfig.for_model("qwen3", dflash_config={}, name_or_path="z-lab/some"))

    class DFlashDraftModel(type(target)):
        def forward(self, position_ids, noise_embedding=None, target_hidden=None, **kwargs):
            raise AssertionError

    with pytest.raises(ValueError, match=r"assistant_model: DFlashDraftModel is a DFlash drafter in code of its own. Pass load_drafter\("):
        speculate(target, repetitive(13), DFlashDraftModel(target.config), 3)


def test_a_markov_head_of_another_kind_and_choices_in_a_pruned_vocabulary_are_refused(target, tmp_path):
    config = {**SPARKS["DSpark, rnn"], "markov_head_type": "other"}
    with pytest.raises(ValueError, match="markov_head_type 'other' is none of"):
        load_drafter(write(tmp_path / "other", config, checkpoint(SPARKS["DSpark, rnn"])), target)
    pruned = part(checkpoint(SPECULATORS), "") | {name: tensor for name, tensor in checkpoint(TWO).items() if "candidate" in name}
    with pytest.raises(ValueError, match="in a vocabulary of its own, which is not read"):
        load_drafter(write(tmp_path / "pruned", {**SPECULATORS, "speculators_model_type": "dflash2"}, pruned), target)


def test_pickles_are_not_opened_and_foreign_tensors_are_named(target, tmp_path):
    with pytest.raises(ValueError, match="does not map: layers.0.extra"):
        load_drafter(write(tmp_path / "more", ZLAB, checkpoint(ZLAB) | {"layers.0.extra.weight": torch.zeros(2)}), target)
    (tmp_path / "config.json").write_text(json.dumps(ZLAB))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is a pickle"):
        load_drafter(tmp_path, target)
