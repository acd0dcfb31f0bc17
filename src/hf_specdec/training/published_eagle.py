"""Published EAGLE and EAGLE-3 drafters, of the layers of Llama, Qwen2 or Qwen3, for targets of the Llama family: as SafeAILab and speculators write them, EAGLE-3 also as SpecForge and
ModelOpt do."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ..drafts.feature import FeatureDraft
from ..drafts.feature_parallel import ParallelFeatureDraft
from ..drafts.features import EachNorm, JointNorm
from . import rope, shared
from .storage import alike, fit

LLAMA_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
              "max_position_embeddings", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters")
NORMS = ("embedding_layernorm.weight", "pre_lm_head_layernorm.weight")
LAYERNORMS = {"embed_layernorm.weight": NORMS[0], "hidden_layernorm.weight": "layers.0.input_layernorm.weight", "lm_head_layernorm.weight": NORMS[1]}
KINDS = ("llama", "qwen2", "qwen3", "speculator_model", "eagle", "eagle3")


def eagle(folder: Path, config: dict, tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> FeatureDraft:
    """EAGLE: fc of (embedding, last hidden state), decoder layers of which the first has no input norm, no final norm, the target's head. With `layernorms` (speculators), norms of the
    embedding, of what the first layer reads, and before the head; what the drafter goes on from is then the state before that last one, as in EAGLE-3."""
    config, tensors = {**config, **config.get("transformer_layer_config", {})}, {_name(name): tensor for name, tensor in tensors.items()}
    for name in ("weight", *(("bias",) if config.get("fusion_bias") else ())):
        if f"fc.{name}" not in tensors:
            raise ValueError(f"{folder} has no fusion_fc.{name}, of which config.json speaks; copy the checkpoint again.")
    draft = empty(folder, config, target, 1 if "speculators_model_type" in config else config.get("num_hidden_layers", 1), None, _normed(tensors))
    width = draft.config.hidden_size
    normed = bool(config.get("layernorms")) or all(name in tensors for name in NORMS)
    norms = _extra_norms(folder, draft, tensors) if normed else []
    draft.base_model.norm = nn.Identity()
    if not normed:
        draft.base_model.layers[0].input_layernorm = nn.Identity()
    tensors.pop("lm_head.weight", None)
    _embedding(folder, draft, tensors, target)
    _linear(folder, draft, "feature_join", tensors, 2 * width, swap=True)
    draft.feature_fuse = nn.Linear(width, width, bias=False, device="meta")
    draft.feature_fuse.weight = nn.Parameter(torch.eye(width, dtype=target.dtype, device=target.device))
    draft.set_output_embeddings(target.get_output_embeddings())
    if normed:
        draft.feature_join = NormedJoin(norms[0], draft.feature_join)
        draft.set_output_embeddings(nn.Sequential(norms[1], target.get_output_embeddings()))
    draft.reads = (target.config.get_text_config().num_hidden_layers,)
    return _made(folder, draft, tensors, target)


def _name(name: str) -> str:
    """Speculators' names, and those of the norms in what it converts from, in SafeAILab's place."""
    name = re.sub(r"^fusion_fc\.", "fc.", re.sub(r"^transformer\.", "layers.0.", name))
    return LAYERNORMS.get(name, name)


def _extra_norms(folder: Path, draft: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> list[nn.Module]:
    """Those of the embedding and before the head."""
    norms = []
    for name in NORMS:
        weight, norm = tensors.pop(name, torch.empty(0)), copy.deepcopy(draft.base_model.norm)
        if weight.shape != norm.weight.shape:
            raise ValueError(f"{folder}: layernorms asks for {name} of {len(norm.weight)} numbers, there are {len(weight)}; copy the checkpoint again.")
        norm.load_state_dict({"weight": weight})
        norms.append(norm)
    return norms


class NormedJoin(nn.Module):
    """`join` of the state and the normed embedding."""

    def __init__(self, norm: nn.Module, join: nn.Module):
        super().__init__()
        self.norm, self.join = norm, join

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        """[.., 2 H]: states, then embeddings; [.., H]."""
        state, embedded = both.chunk(2, dim=-1)
        return self.join(torch.cat([state, self.norm(embedded)], dim=-1))


def eagle3(folder: Path, config: dict, tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> FeatureDraft:
    """EAGLE-3: fc of hidden states of several layers; a decoder layer that attends from (embedding, state), of a width of its own, others behind it; own head."""
    config = {**config, **config.get("transformer_layer_config", {})}
    own = config.get("eagle_config") or {}
    if config.get("logit_scale", 1.0) != 1.0 or own.get("use_aux_hidden_state") is False:
        raise ValueError(f"{folder}: config.json speaks of logit_scale or use_aux_hidden_state=false, which are not read.")
    tensors = {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in tensors.items() if name != "t2d" and not name.startswith("verifier_")}
    draft = empty(folder, config, target, _count(tensors), config.get("target_hidden_size"), _normed(tensors))
    draft.reads = _reads(folder, config, target.config.get_text_config().num_hidden_layers)
    _embedding(folder, draft, tensors, target)
    seen = target.get_input_embeddings().weight.shape[1]
    _linear(folder, draft, "feature_fuse", tensors, len(draft.reads) * seen)
    norms = _feature_norms(folder, draft, tensors, seen, own.get("norm_before_fc", config.get("norm_before_fc")), config.get("fc_norm"))
    draft.feature_norm = norms.to(target.device, target.dtype)
    draft.feature_join = nn.Identity()
    _eagle3_head(folder, draft, tensors, target, bool(config.get("norm_output")))
    draft.base_model.layers[0] = Eagle3Layer(draft.base_model.layers[0], bool(config.get("norm_before_residual")))
    masked = _mask(folder, config, draft, tensors, seen)
    made = _made(folder, draft, tensors, target)
    return ParallelFeatureDraft(made.model, target) if masked else made


def _mask(folder: Path, config: dict, draft: PreTrainedModel, tensors: dict[str, torch.Tensor], seen: int) -> bool:
    """P-EAGLE: the token and the states of masked places; False where there are none. vLLM calls the token pard_token or ptd_token_id, speculators mask_token_id."""
    states = tensors.pop("mask_hidden", None)
    if states is None:
        return False
    token = next((config[name] for name in ("mask_token_id", "pard_token", "ptd_token_id") if isinstance(config.get(name), int)), None)
    if token is None or not 0 <= token < len(draft.get_input_embeddings().weight) or states.numel() != len(draft.reads) * seen:
        raise ValueError(f"{folder}: mask_hidden needs {len(draft.reads) * seen} numbers, and config.json a mask_token_id of this target's vocabulary; there are {states.numel()}, and {token}.")
    draft.mask_token, draft.mask_states = token, states.flatten().to(draft.dtype)
    return True


def _count(tensors: dict[str, torch.Tensor]) -> int:
    return 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("layers.")), default=0)


def _normed(tensors: dict[str, torch.Tensor]) -> bool:
    return any(name.endswith("self_attn.q_norm.weight") for name in tensors)


def _reads(folder: Path, config: dict, count: int) -> tuple[int, ...]:
    """The target's layers whose outputs are read, ascending as whoever serves it shows them. Named beside all else (speculators, vLLM) they are counted from the
    embedding on; named in eagle_config (SpecForge, SGLang, ModelOpt) they are what these layers put out. Earlier versions of this package counted there as vLLM does."""
    named, inner = config.get("eagle_aux_hidden_state_layer_ids"), (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    outputs = not named and inner and "hf_specdec_notes" not in config
    reads = tuple(sorted(layer if outputs else layer - 1 for layer in named or inner or (2, count // 2, count - 3)))
    if len(set(reads)) != len(reads) or not all(0 <= layer < count for layer in reads):
        raise ValueError(f"{folder} reads what layers {list(reads)} of its target put out; this target has {count} layers.")
    return reads


def _feature_norms(folder: Path, draft: PreTrainedModel, tensors: dict[str, torch.Tensor], seen: int, joint: bool, each: bool) -> nn.Sequential:
    """What comes before fc: one norm over all the states (input_norm), one for each of them (fc_norm.I), or nothing."""
    norms, eps, parts = nn.Sequential(), draft.config.rms_norm_eps, len(draft.reads)
    if joint:
        weight = tensors.pop("input_norm.weight", torch.empty(0))
        if len(weight) != parts * seen:
            raise ValueError(f"{folder}: norm_before_fc asks for input_norm.weight of {parts * seen} numbers; copy the checkpoint again.")
        norms.append(JointNorm(weight, eps))
    if each:
        weights = [tensors.pop(f"fc_norm.{i}.weight", torch.empty(0)) for i in range(parts)]
        if any(list(weight.shape) != [seen] for weight in weights):
            raise ValueError(f"{folder}: fc_norm asks for fc_norm.0.weight to fc_norm.{parts - 1}.weight of {seen} numbers each; copy the checkpoint again.")
        norms.append(EachNorm(weights, eps))
    return norms


def _eagle3_head(folder: Path, draft: PreTrainedModel, tensors: dict[str, torch.Tensor], target: PreTrainedModel, output: bool) -> None:
    """Norm and head. What the drafter goes on from is the state before the norm, or with `output` behind it."""
    width, vocab = draft.config.hidden_size, target.config.get_text_config().vocab_size
    rows, offsets = tensors.pop("lm_head.weight", None), tensors.pop("d2t", None)
    if rows is None or "norm.weight" not in tensors:
        raise ValueError(f"{folder} has no {'lm_head.weight' if rows is None else 'norm.weight'}, which an EAGLE-3 checkpoint needs.")
    ids = torch.arange(len(rows)) if offsets is None else torch.arange(len(rows)) + offsets.long()
    if rows.shape[1] != width or len(ids) != len(rows) or int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) != len(ids):
        raise ValueError(f"{folder}: lm_head.weight and d2t do not fit a vocabulary of {vocab} tokens and width {width}.")
    norm = nn.Identity() if output else draft.base_model.norm
    if not output:
        norm.load_state_dict({"weight": tensors.pop("norm.weight")})
        draft.base_model.norm = nn.Identity()
    draft.set_output_embeddings(NormedHead(norm, rows.to(target.device, target.dtype), ids, vocab))


class NormedHead(shared.PrunedHead):
    """The final norm and an output head of the tokens `ids` in one."""

    def __init__(self, norm: nn.Module, rows: torch.Tensor, ids: torch.Tensor, vocab_size: int):
        super().__init__(rows, ids, vocab_size)
        self.norm = norm

    def few(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().few(self.norm(hidden))


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads a token's embedding beside the state, 2 H wide, each with a norm of its own."""

    def __init__(self, layer: nn.Module, norm_before_residual: bool):
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = type(layer.input_layernorm)(len(layer.input_layernorm.weight), layer.input_layernorm.variance_epsilon)
        self.norm_before_residual, self.attention_type = norm_before_residual, getattr(layer, "attention_type", "full_attention")
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            new = nn.Linear(2 * old.in_features, old.out_features, old.bias is not None, old.weight.device, old.weight.dtype)
            setattr(self.self_attn, name, new)
        self.hidden_norm.to(old.weight)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """hidden_states [B, L, 2 H]: states, then embeddings; [B, L, H]."""
        state, embedded = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(state)
        both = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        state = (normed if self.norm_before_residual else state) + self.self_attn(hidden_states=both, **kwargs)[0]
        return state + self.mlp(self.post_attention_layernorm(state))


def empty(folder: Path, config: dict, target: PreTrainedModel, layers: int, reads: int | None = None, normed: bool = False) -> PreTrainedModel:
    """A Llama of the checkpoint's shape, or, `normed`, a Qwen3, which norms queries and keys, without weights. reads: the width of the target's states, where the checkpoint's own differs."""
    if config.get("model_type", "llama") not in KINDS:
        raise ValueError(f"{folder}: model_type {config['model_type']!r}; only EAGLE layers of the Llama family map to the feature drafter.")
    width = target.get_input_embeddings().weight.shape[1]
    if (reads or config.get("hidden_size")) != width:
        raise ValueError(f"{folder}: hidden_size {reads or config.get('hidden_size')} does not map to this target's {width}.")
    if normed and config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ())[:layers]:
        raise ValueError(f"{folder}: config.json speaks of sliding windows, which are not read.")
    config = rope.of_one_kind(folder, config)
    own = AutoConfig.for_model("qwen3" if normed else "llama", **{name: config[name] for name in LLAMA_KEYS if config.get(name) is not None}, num_hidden_layers=layers,
                      vocab_size=target.config.get_text_config().vocab_size, tie_word_embeddings=False)
    draft = shared.empty(target, own)
    draft.scaled = False
    return draft


def _embedding(folder: Path, draft: PreTrainedModel, tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> None:
    """The target's embedding, or the checkpoint's own where it has another one."""
    shared, weight, width = target.get_input_embeddings(), tensors.pop("embed_tokens.weight", None), draft.config.hidden_size
    draft.set_input_embeddings(shared)
    if weight is None and width == shared.weight.shape[1]:
        return
    if weight is None or list(weight.shape) != [len(shared.weight), width]:
        raise ValueError(f"{folder}: embed_tokens.weight has shape {'none' if weight is None else list(weight.shape)}; this target's tokens need {[len(shared.weight), width]}.")
    if not alike(weight, shared.weight):
        draft.set_input_embeddings(nn.Embedding.from_pretrained(weight.to(shared.weight)))


def _linear(folder: Path, draft: PreTrainedModel, name: str, tensors: dict[str, torch.Tensor], width: int, swap: bool = False) -> None:
    """fc as the draft's `name`; with `swap`, its two inputs in our order (state, embedding)."""
    weight, bias = tensors.pop("fc.weight"), tensors.pop("fc.bias", None)
    if list(weight.shape) != [draft.config.hidden_size, width]:
        raise ValueError(f"{folder}: fc.weight has shape {list(weight.shape)}, not {[draft.config.hidden_size, width]}; it reads other states "
                         f"than the published layout does.")
    weight = torch.cat(weight.chunk(2, dim=1)[::-1], dim=1) if swap else weight
    linear = nn.Linear(width, draft.config.hidden_size, bias is not None, draft.device, draft.dtype)
    linear.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    setattr(draft, name, linear)


def _made(folder: Path, draft: PreTrainedModel, tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> FeatureDraft:
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    for name, module in draft.base_model.named_modules():  # configs speak of biases in several ways (Qwen2: of q, k and v alone)
        if isinstance(module, nn.Linear) and module.bias is None and f"{name}.bias" in tensors:
            module.bias = nn.Parameter(module.weight.new_zeros(module.out_features))
    fit(folder, draft.base_model, tensors, {name for name in draft.base_model.state_dict() if name.startswith("embed_tokens.")})
    return FeatureDraft(draft.eval().requires_grad_(False), target)
