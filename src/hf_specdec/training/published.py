"""Published drafters: of Llama-family targets Medusa heads (the layouts of FasterDecoding/Medusa and of vLLM), EAGLE and EAGLE-3 layers
(SafeAILab/EAGLE; EAGLE-3 also as speculators, SpecForge and ModelOpt do), of any target those of DFlash (`training.dflash`). From safetensors only.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from ..assistants import is_dflash
from ..drafts.base import Draft
from ..drafts.feature import FeatureDraft
from ..drafts.features import EachNorm, JointNorm
from ..drafts.medusa import MedusaDraft, MedusaHeads
from ..folders import json_object
from . import dflash, shared
from .storage import fit

HUB = "hub:"
PICKLES = ("medusa_lm_head.pt", "pytorch_model.bin")
LLAMA_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
              "max_position_embeddings", "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters")


def kind(name: str | Path) -> str:
    """"medusa", "dflash", "eagle" or "eagle3" for a folder (or hub:NAME) that holds one, else "". Raises ValueError where the weights are there as
    pickles only."""
    folder = _folder(name)
    config = config_of(folder)
    if config is None:
        return ""
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return "medusa"
    if is_dflash(config):
        return "dflash"
    names = _names(folder)
    if "fc.weight" not in names and "model.fc.weight" not in names:
        return ""
    return "eagle3" if any("hidden_norm" in name for name in names) else "eagle"


def load(name: str | Path, target: PreTrainedModel) -> Draft:
    """The checkpoint in a folder, or hub:NAME, as a draft for `target`, in its dtype and on its device.

    Raises ValueError naming what does not map: another width or vocabulary, tensors that are missing or unknown, pickles.
    """
    folder = _folder(name)
    what = kind(folder)
    if not what:
        raise ValueError(f"{name} holds no Medusa, DFlash, EAGLE or EAGLE-3 checkpoint (config.json with weights in safetensors).")
    tensors = _tensors(folder)
    return {"medusa": _medusa, "dflash": dflash.load, "eagle": _eagle, "eagle3": _eagle3}[what](folder, config_of(folder), tensors, target)


def _folder(name: str | Path) -> Path:
    if not str(name).startswith(HUB):
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(name).removeprefix(HUB), allow_patterns=["*.json", "*.safetensors"]))


def config_of(name: str | Path) -> dict | None:
    return json_object(_folder(name) / "config.json") or None


def _names(folder: Path) -> set[str]:
    return {name for path in sorted(folder.glob("*.safetensors")) for name in _open(path).keys()}


def _open(path: Path):
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}): copy it again.") from error


def refuse_pickles(folder: Path) -> None:
    """ValueError with the remedy if a folder has weights as pickles and none as safetensors."""
    found = [name for name in PICKLES if (folder / name).is_file()]
    if found and not list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}/{found[0]} is a pickle, which can run code when it is read, and is not opened. Where you trust it, read it with torch's "
                         f"weights_only=True and write {Path(found[0]).stem.replace('pytorch_', '')}.safetensors with safetensors.torch.save_file.")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    refuse_pickles(folder)
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _open(path) as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    if not tensors:
        raise ValueError(f"{folder} has a config.json and no safetensors file; copy the checkpoint again.")
    return {re.sub(r"^(model|medusa_heads?)\.", "", name): tensor for name, tensor in tensors.items()}


# --- Medusa -------------------------------------------------------------------------------------------------------------------


def _medusa(folder: Path, config: dict, tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> MedusaDraft:
    vllm = any(name.startswith("blocks.") for name in tensors)
    pattern = r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)" if vllm else r"(\d+)\.(\d+)\.linear\.(weight|bias)"
    parts = {name: re.fullmatch(pattern, name) for name in tensors}
    places = [(int(found[1]), int(found[2])) for found in parts.values() if found]
    if not places:
        raise ValueError(f"{folder} holds no residual blocks of Medusa heads (tensors 0.0.linear.weight, ... or blocks.0.layers.0.weight, ...).")
    heads, layers = (1 + max(part) for part in zip(*places))
    wanted = config.get("medusa_num_heads", config.get("num_heads", heads))
    if wanted > heads:
        raise ValueError(f"{folder}: config.json speaks of {wanted} heads, the weights hold {heads}; copy the checkpoint again.")
    like = target.get_input_embeddings().weight.detach()
    blocks = {f"blocks.{found[1]}.{found[2]}.{found[3]}": tensors[name] for name, found in parts.items() if found}
    rest = {name: tensor for name, tensor in tensors.items() if not parts[name]}
    if vllm and config.get("original_lm_head"):
        rest.pop("lm_heads.0.weight", rest.pop("lm_head.weight", None))
        ids = rest.pop("token_map", None)
        made = MedusaHeads(heads, layers, like, shared.output_head(target, None if ids is None else ids.long()))
    else:
        outputs = [rest.pop(f"lm_heads.{i}.weight" if vllm else f"{i}.{layers}.weight", None) for i in range(heads)]
        if any(weight is None or list(weight.shape) != [_vocab(target), like.shape[1]] for weight in outputs):
            raise ValueError(f"{folder}: every head needs an output head of {[_vocab(target), like.shape[1]]}, this target's vocabulary and width.")
        made = MedusaHeads(heads, layers, like, target.get_output_embeddings(), outputs)
        blocks |= {name: tensor for name, tensor in made.state_dict().items() if name.startswith("outputs.")}
    for name, tensor in made.state_dict().items():  # vLLM's own default has no biases
        if vllm and name.endswith(".bias") and not config.get("medusa_fc_bias"):
            blocks.setdefault(name, torch.zeros_like(tensor))
    fit(folder, made, blocks | rest)
    return MedusaDraft(made.eval(), target)


def _vocab(target: PreTrainedModel) -> int:
    return target.config.get_text_config().vocab_size


# --- EAGLE --------------------------------------------------------------------------------------------------------------------


def _eagle(folder: Path, config: dict, tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> FeatureDraft:
    """EAGLE: fc of (embedding, last hidden state), decoder layers of which the first has no input norm, no final norm, the target's head."""
    draft = empty(folder, config, target, config.get("num_hidden_layers", 1))
    width = draft.config.hidden_size
    draft.base_model.layers[0].input_layernorm, draft.base_model.norm = nn.Identity(), nn.Identity()
    tensors.pop("lm_head.weight", None)
    _embedding(folder, draft, tensors, target)
    _linear(folder, draft, "feature_join", tensors, 2 * width, swap=True)
    draft.feature_fuse = nn.Linear(width, width, bias=False, device="meta")
    draft.feature_fuse.weight = nn.Parameter(torch.eye(width, dtype=target.dtype, device=target.device))
    draft.set_output_embeddings(target.get_output_embeddings())
    draft.reads = (target.config.get_text_config().num_hidden_layers,)
    return _made(folder, draft, tensors, target)


def _eagle3(folder: Path, config: dict, tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> FeatureDraft:
    """EAGLE-3: fc of hidden states of several layers; one decoder layer that attends from (embedding, state), of a width of its own; own head."""
    config = {**config, **config.get("transformer_layer_config", {})}
    own = config.get("eagle_config") or {}
    if config.get("logit_scale", 1.0) != 1.0 or own.get("use_aux_hidden_state") is False:
        raise ValueError(f"{folder}: config.json speaks of logit_scale or use_aux_hidden_state=false, which are not read.")
    draft = empty(folder, config, target, 1, config.get("target_hidden_size"))
    draft.reads = _reads(folder, config, target.config.get_text_config().num_hidden_layers)
    tensors = {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in tensors.items() if name != "t2d" and not name.startswith("verifier_")}
    _embedding(folder, draft, tensors, target)
    seen = target.get_input_embeddings().weight.shape[1]
    _linear(folder, draft, "feature_fuse", tensors, len(draft.reads) * seen)
    norms = _feature_norms(folder, draft, tensors, seen, own.get("norm_before_fc", config.get("norm_before_fc")), config.get("fc_norm"))
    draft.feature_norm = norms.to(target.device, target.dtype)
    draft.feature_join = nn.Identity()
    _eagle3_head(folder, draft, tensors, target, bool(config.get("norm_output")))
    draft.base_model.layers[0] = Eagle3Layer(draft.base_model.layers[0], bool(config.get("norm_before_residual")))
    return _made(folder, draft, tensors, target)


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
    width, vocab = draft.config.hidden_size, _vocab(target)
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
        self.norm_before_residual = norm_before_residual
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


def empty(folder: Path, config: dict, target: PreTrainedModel, layers: int, reads: int | None = None) -> PreTrainedModel:
    """A Llama of the checkpoint's shape, without weights. reads: the width of the target's states, where the checkpoint's own differs."""
    if config.get("model_type", "llama") not in ("llama", "speculator_model", "eagle", "eagle3"):
        raise ValueError(f"{folder}: model_type {config['model_type']!r}; only EAGLE layers of the Llama family map to the feature drafter.")
    width = target.get_input_embeddings().weight.shape[1]
    if (reads or config.get("hidden_size")) != width:
        raise ValueError(f"{folder}: hidden_size {reads or config.get('hidden_size')} does not map to this target's {width}.")
    own = LlamaConfig(**{name: config[name] for name in LLAMA_KEYS if config.get(name) is not None}, num_hidden_layers=layers,
                      vocab_size=_vocab(target), tie_word_embeddings=False)
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
    if weight.shape != shared.weight.shape or not torch.allclose(weight.to(shared.weight), shared.weight, rtol=0.02, atol=1e-3):
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
