"""Prediction modules that transformers has no class for: synthetic checkpoints in the published layouts, against the same written once more as plain arithmetic, after
vLLM's qwen3_next_mtp.py, exaone_moe_mtp.py, exaone4_5_mtp.py and mimo_mtp.py."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, Qwen2Config, Qwen2ForCausalLM

from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.training import load_drafter, mtp_layouts

from .. import seeing
from ..architectures import FAMILIES, STATEFUL
from ..conformance import law
from ..helpers import FULL, build, enabled, generated, plain, speculate
from .watched import Watched

SETTINGS = {family.kind: family.settings for family in (*FAMILIES, *STATEFUL)}
QWEN = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
HEADS, H, EPS, KINDS = 16, 32, 1e-6, (*QWEN, "exaone_moe", "exaone4", "mimo")
ROWS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


def model(kind: str, **more):
    if kind == "mimo":
        like = build("qwen2", 3, vocab_size=61, hidden_size=H, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        made = Qwen2ForCausalLM(MiMoConfig(**{name: value for name, value in like.config.to_dict().items() if name != "model_type"})).eval()
        made.load_state_dict(like.state_dict())
        made.generation_config.do_sample = False
    else:
        more = {"exaone_moe": {"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [5]}, "exaone4": {}}.get(kind, ROPE) | more
        made = build(kind, 3, **{**SETTINGS[kind], "head_dim": HEADS, "rms_norm_eps": EPS, **more})
    with torch.no_grad():
        made.base_model.norm.weight += 0.5 * torch.rand(H)  # or a state behind it, normed again, is what it is before it, normed
    return made


def module(kind: str, heads: int = HEADS, inner: int = 48) -> dict[str, torch.Tensor]:
    """Its tensors as the checkpoint has them."""
    torch.manual_seed(0)
    width, heads = H, H // 4 if kind == "mimo" else heads
    own = {f"self_attn.{name}_proj.weight": (heads * n, width) for name, n in (("q", 8 if kind in QWEN else 4), ("k", 2), ("v", 2))} | {"self_attn.o_proj.weight": (width, 4 * heads)}
    mlp = {f"{name}_proj.weight": (width, inner) if name == "down" else (inner, width) for name in ("gate", "up", "down")}
    if kind in QWEN[1:]:
        for part in ("experts.0", "experts.1", "experts.2", "experts.3", "shared_expert"):
            size = 16 if part != "shared_expert" or kind == QWEN[1] else 512
            own |= {f"mlp.{part}.{name}_proj.weight": (width, size) if name == "down" else (size, width) for name in ("gate", "up", "down")}
        own |= {"mlp.gate.weight": (4, width), "mlp.shared_expert_gate.weight": (1, width)}
    else:
        own |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    if kind == "mimo":
        own |= {f"self_attn.{name}_proj.bias": (heads * n,) for name, n in (("q", 4), ("k", 2), ("v", 2))}
    else:
        own |= {"self_attn.q_norm.weight": (heads,), "self_attn.k_norm.weight": (heads,)}
    names = ("post_attention_layernorm", "post_feedforward_layernorm") if kind == "exaone4" else ("input_layernorm", "post_attention_layernorm")
    own |= {f"{name}.weight": (width,) for name in names}
    layout = mtp_layouts.LAYOUTS[kind]
    parts = {f"{layout.join}.weight": (width, 2 * width)} | {f"{name}.weight": (width,) for name in (layout.state, layout.embedding, layout.norm)}
    shapes = {layout.prefix + name: shape for name, shape in parts.items()} | {layout.prefix + layout.layer + name: shape for name, shape in own.items()}
    around = 0.0 if kind in QWEN else 1.0
    return {name: 0.25 * torch.randn(shape) + (around if "norm" in name else 0.0) for name, shape in shapes.items()}


def write(folder, made, tensors: dict):
    made.save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loaded(folder, kind: str, auto=AutoModelForCausalLM):
    if kind != "mimo":
        return auto.from_pretrained(folder).eval()
    return Qwen2ForCausalLM.from_pretrained(folder, config=MiMoConfig.from_pretrained(folder)).eval()


# --- the same as plain arithmetic -----------------------------------------------------------------------------------------------


def said(kind: str, tensors: dict, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The module's output [L, H] of the tokens' embeddings and the states before them, [L, H] each."""
    layout, one = mtp_layouts.LAYOUTS[kind], 1.0 if kind in QWEN else 0.0
    w = {name.removeprefix(layout.prefix).removeprefix("layers.0."): tensor for name, tensor in tensors.items()}

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (one + w[f"{name}.weight"])

    def line(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def mlp(x, name):
        return line(silu(line(x, f"{name}.gate_proj")) * line(x, f"{name}.up_proj"), f"{name}.down_proj")

    def experts(x):
        chances = line(x, "mlp.gate").softmax(-1)
        top, chosen = chances.topk(2)
        top = top / top.sum(-1, keepdim=True)
        routed = torch.stack([sum(p * mlp(own, f"mlp.experts.{i}") for p, i in zip(ps, ids.tolist())) for own, ps, ids in zip(x, top, chosen)])
        return routed + line(x, "mlp.shared_expert_gate").sigmoid() * mlp(x, "mlp.shared_expert")

    def turned(x, size):  # [L, n, D], the first `size` numbers of each head by its place
        angles = torch.arange(len(x))[:, None, None] / 1e4 ** (torch.arange(0, size, 2) / size)
        a, b, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], dim=-1)

    def attention(x):
        n, heads = len(x), len(w["self_attn.k_proj.weight"]) // 2
        q, k, v = (line(x, f"self_attn.{name}_proj").view(n, -1, heads * (1 + (name == "q" and kind in QWEN))) for name in "qkv")
        q, gate = q.chunk(2, -1) if kind in QWEN else (q, None)
        if "self_attn.q_norm.weight" in w:
            q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
        q, k = (turned(part, heads // 2 if kind in QWEN else heads) for part in (q, k))
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / heads**0.5
        back = torch.arange(n)[:, None] - torch.arange(n)
        window = {"exaone_moe": 5, "exaone4": 8}.get(kind, n)
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill((back < 0) | (back >= window), -torch.inf).softmax(-1), v.repeat_interleave(2, 1))
        return line((out if gate is None else out * gate.sigmoid()).flatten(1), "self_attn.o_proj")

    feed = experts if kind in QWEN[1:] else lambda x: mlp(x, "mlp")
    both = [norm(embedded, layout.embedding), norm(states, layout.state)]
    x = line(torch.cat(both[::-1] if kind == "mimo" else both, -1), layout.join)
    if kind == "exaone4":
        x = x + norm(attention(x), "post_attention_layernorm")
        return norm(x + norm(feed(x), "post_feedforward_layernorm"), layout.norm)
    x = x + attention(norm(x, "input_layernorm"))
    return norm(x + feed(norm(x, "post_attention_layernorm")), layout.norm)


def last_states(target, ids: torch.Tensor, kind: str) -> torch.Tensor:
    """[L, H]: before the final norm for MiMo, else behind it."""
    kept, norm = [], target.base_model.norm
    hook = norm.register_forward_hook(lambda module, given, out: kept.append(given[0] if kind == "mimo" else out))
    target(input_ids=ids[None], use_cache=False)
    hook.remove()
    return kept[0][0]


@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_what_plain_arithmetic_says(kind, tmp_path):
    tensors = module(kind)
    target = loaded(write(tmp_path, model(kind), tensors), kind)
    draft = load_drafter("mtp", target)
    watched, steps = Watched(draft.model, target), set()
    out = speculate(target, ROWS, watched, 3, max_new_tokens=9)
    assert type(draft) is FeatureDraft and generated(out, ROWS) == plain(target, ROWS, max_new_tokens=9)
    for step, rows, drafted, logits in watched.log:
        for b, row in enumerate(rows):
            ids = torch.tensor(row + [one[b] for one in drafted])
            with torch.no_grad():
                states, embedded = last_states(target, ids[: len(row) - 1], kind), target.get_input_embeddings()(ids[1:])
                for _ in range(step + 1):
                    after = said(kind, tensors, embedded[: len(states)], states)
                    states = torch.cat([states, after[-1:]])
                torch.testing.assert_close(logits[b, 0], target.lm_head(after[-1]), atol=2e-3, rtol=1e-3)
            steps.add(step)
    assert steps == {0, 1, 2}
    assert speculate(target, ROWS, draft, 3, seed=1, do_sample=True).speculation.proposed
    assert generated(speculate(target, ROWS[:1], None, 3, speculative={"draft": "mtp"}), ROWS[:1]) == plain(target, ROWS[:1])


@pytest.mark.parametrize("seen, kind", [("Qwen3.5", "qwen3_5_text"), ("Qwen3.5-MoE", "qwen3_5_moe_text"), ("EXAONE 4.5", "exaone4")])
def test_a_model_that_reads_images_has_the_module_of_what_writes_its_text(seen, kind, tmp_path):
    family = next(family for family in seeing.FAMILIES if family.name == seen)
    made = family.model()
    text = made.config.get_text_config()
    assert (text.hidden_size, text.num_attention_heads, text.num_key_value_heads) == (H, 4, 2)
    write(tmp_path, made, module(kind, getattr(text, "head_dim", None) or H // 4, getattr(text, "intermediate_size", 0)))
    autos = [AutoModelForMultimodalLM] + [AutoModelForCausalLM] * (kind in QWEN)
    for auto in autos:
        target = enabled(loaded(tmp_path, kind, auto))
        draft = load_drafter("mtp", target)
        options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
        shown = family.prompts(1) if auto is AutoModelForMultimodalLM else {"input_ids": torch.tensor([ROWS[0]]), "attention_mask": torch.ones(1, 6, dtype=torch.long)}
        out = target.generate(**shown, assistant_model=draft, speculative={"num_assistant_tokens": 3}, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, target.generate(**shown, **options)) and out.speculation.proposed


def test_a_sharded_checkpoint_and_fused_experts(tmp_path, monkeypatch):
    kind, tensors = "qwen3_5_moe_text", module("qwen3_5_moe_text")
    made = model(kind)
    write(tmp_path / "whole", made, tensors)
    wanted = load_drafter("mtp", loaded(tmp_path / "whole", kind)).model.state_dict()
    made.save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    stem = "mtp.layers.0.mlp.experts."
    parts = {name: torch.stack([tensors.pop(f"{stem}{i}.{name}_proj.weight") for i in range(4)]) for name in ("gate", "up", "down")}
    tensors |= {f"{stem}gate_up_proj": torch.cat([parts["gate"], parts["up"]], 1), f"{stem}down_proj": parts["down"]}
    index = tmp_path / "cut" / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    told["weight_map"] |= dict.fromkeys(tensors, "mtp.safetensors")
    index.write_text(json.dumps(told))
    save_file(tensors, tmp_path / "cut" / "mtp.safetensors", metadata={"format": "pt"})
    target, opened, real = loaded(tmp_path / "cut", kind), [], mtp_layouts.safe_open
    monkeypatch.setattr(mtp_layouts, "safe_open", lambda path, *given: opened.append(path) or real(path, *given))
    found = load_drafter("mtp", target).model.state_dict()
    assert [path.rpartition("/")[2] for path in opened] == ["mtp.safetensors"]
    assert wanted.keys() == found.keys() and all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


def test_sampled_text_follows_the_targets_law(tmp_path):
    target = loaded(write(tmp_path, model("qwen3_5_text", vocab_size=law.VOCAB, spread=0.45), module("qwen3_5_text")), "qwen3_5_text")
    draft, other, row = load_drafter("mtp", target), copy.deepcopy(target), [1, 2, 3, 1, 2]
    other.lm_head.weight.data *= 0.5
    found, traces = law.counts(target, [row], draft, 4_000 if FULL else 1_200, 3, 3)
    assert law.worst_p_value(found, [law.joint(target, row, 3)], 3) > law.THRESHOLD > law.worst_p_value(found, [law.joint(other, row, 3)], 3)
    assert 0 < traces[0].accepted < traces[0].proposed


# --- what is refused ------------------------------------------------------------------------------------------------------------

FC, UP = "mtp.fc.weight", "mtp.layers.0.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize("change, message", [
    ({name: None for name in module("qwen3_next")}, r"holds no prediction module \(tensors mtp\.\*\)"),
    ({FC: None}, r"holds no mtp\.fc\.weight"),
    ({UP: None}, rf"holds no {UP}"),
    ({FC: torch.zeros(H, H)}, r"mtp\.fc\.weight has shape \[32, 32\]; the target's config makes it \[32, 64\]"),
    ({UP: torch.zeros(8, H)}, rf"{UP} has shape \[8, 32\], and .*experts\.0"),
    ({"mtp.layers.0.self_attn.q_proj.weight_scale_inv": torch.ones(1, 1)}, r"not read: mtp\.layers\.0\.self_attn\.q_proj\.weight_scale_inv"),
    ({"mtp.embed_tokens.weight": torch.ones(1, 1)}, r"not read: mtp\.embed_tokens\.weight"),
    ({"mtp.layers.1.mlp.gate.weight": torch.ones(4, H)}, ""),
])
def test_what_does_not_map_is_named(change, message, tmp_path):
    tensors = {name: tensor for name, tensor in (module("qwen3_next") | change).items() if tensor is not None}
    target = loaded(write(tmp_path, model("qwen3_next"), tensors), "qwen3_next")
    if not message:
        assert load_drafter("mtp", target)
        return
    with pytest.raises(ValueError, match=f"mtp: .*{message}"):
        load_drafter("mtp", target)


def test_a_target_without_its_checkpoint_and_a_config_that_does_not_say_are_named(tmp_path):
    with pytest.raises(ValueError, match="was not loaded from a checkpoint"):
        load_drafter("mtp", model("qwen3_5_text"))
    target = loaded(write(tmp_path, model("exaone_moe", mtp_layer_types=None), module("exaone_moe")), "exaone_moe")
    with pytest.raises(ValueError, match="does not say what attention .*mtp_layer_types"):
        load_drafter("mtp", target)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no model.safetensors"):
        load_drafter("mtp", target)
