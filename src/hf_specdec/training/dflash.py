"""Published DFlash drafters (Chen, Liang and Liu 2026, arXiv 2602.06036), as z-lab writes them, DFlash 2 among them, and as speculators does, DSpark drafters as DeepSeek
(DeepSpec, 2026), speculators and SpecForge write them, and XPress drafters (arXiv 2608.02438), as their authors and speculators write them. They are run by transformers' own
assistant of the kind, which has the same layers under other names."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from ..drafts.dflash import DFlashDraft
from ..drafts.layout import Confidence, Layout, Markov, Refiner, Selector
from . import rope
from .shared import PrunedHead
from .storage import fit

SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_dropout",
         "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "vocab_size")
NAMES = {r"^fc\.": "encoder.fc.", r"^hidden_norm\.": "encoder.output_norm_enc."}
CONVOLVED = {"attention_conv": "self_attn", "mlp_conv": "mlp"}
NOT_READ = ("embed_tokens.", "rotary_emb.", "verifier_", "t2d")  # the target's own, or of use in training alone
KINDS = (None, "dflash", "dflash2", "dspark", "xpress")
REFINER = {"w1": "token_embed", "w2": "readout", "mix.L": "mix_l", "mlp.gate_proj": "mlp_gate", "mlp.up_proj": "mlp_up", "mlp.down_proj": "mlp_down"}  # what its authors call them
ASSISTANT = "muse_glimmer_assistant"


def load(folder: Path, config: dict, tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> DFlashDraft:
    """The draft of a checkpoint's config and tensors, for `target`, in its dtype and on its device.

    Raises ValueError naming what does not map: a variant of another kind, a width, layers or tokens that the target does not have, tensors that are missing or unknown, and a
    transformers without such an assistant.
    """
    config = {**config, **config.get("transformer_layer_config", {}), **config.get("dflash_config", {}), "architectures": config.get("architectures") or ()}
    _check(folder, config, target)
    own = _config(folder, config)
    with torch.device("meta"):
        model = AutoModel.from_config(own, dtype=target.dtype)
    model.rotary_emb = type(model.rotary_emb)(own)
    _bias(model, config)
    _convolve(model, config)
    tensors = {name.removeprefix("logit_head."): tensor.to(target.device, None if name in ("d2t",) else target.dtype) for name, tensor in tensors.items() if not name.startswith(NOT_READ)}
    head = _head(folder, tensors, target)
    selector = _refiner(folder, config, tensors, head) or _selector(folder, config, tensors, head) or _markov(folder, config, tensors, head)
    confidence = _confidence(folder, config, tensors, selector)
    fit(folder, model, {_name(name, model): tensor for name, tensor in tensors.items()}, assign=True)
    model = model.to(target.device).eval().requires_grad_(False)
    layout = Layout(_causal(config), (own.sliding_window or 1) - 1, _scale(config), head, float(config.get("output_multiplier", 1.0)),
                    float(config.get("final_logit_softcapping") or 0) or None, selector, 1 - _from_anchor(config), confidence,
                    not config.get("aux_hidden_state_layer_ids"), bool(config.get("speculators_model_type")))
    draft = DFlashDraft(model, target, layout=layout)
    draft.check(target)
    return draft


def _check(folder: Path, config: dict, target: PreTrainedModel) -> None:
    kind, text = config.get("speculators_model_type"), target.config.get_text_config()
    other = kind if kind not in KINDS else config.get("projector_type") if config.get("projector_type") not in KINDS else None
    other = next((name for name in config["architectures"] if "Gemma" in name), other)  # DSpark's for Gemma 4 has Gemma's layers
    if other or config.get("shift_label"):
        raise ValueError(f"{folder} is a drafter of another kind than DFlash, DFlash 2, DSpark and XPress ({other or 'it drafts its first token at another place'}), which is not read.")
    width, count = text.hidden_size, text.num_hidden_layers
    if config.get("hidden_size") != width or config.get("num_target_layers", count) != count:
        raise ValueError(f"{folder} was made for a target of width {config.get('hidden_size')} with {config.get('num_target_layers', 'an unknown number of')} layers; this one has width "
                         f"{width} and {count} layers.")
    if not _layers(config) or not all(0 <= layer < count for layer in _layers(config)):
        raise ValueError(f"{folder} reads the states of layers {_layers(config)} of its target; this target has {count} layers.")
    unread = {"use_swa": config.get("use_swa") and "sliding_attention" not in (config.get("layer_types") or ()), "is_neox_style": config.get("is_neox_style") is False,
              "rope_is_neox_style": config.get("rope_is_neox_style") is False, "swa_window_size": config.get("swa_window_size") not in (None, config.get("sliding_window"))}
    for name in (name for name, told in unread.items() if told):
        raise ValueError(f"{folder}: config.json says {name}={config[name]}, which is not read.")
    if not isinstance(config.get("mask_token_id"), int):
        raise ValueError(f"{folder}: config.json names no mask_token_id.")


def _causal(config: dict) -> frozenset[str]:
    """The types of layers that are causal; vLLM's own word for it is `causal`."""
    said = next((config[name] for name in ("is_causal", "causal") if config.get(name) is not None), None)
    if config.get("sliding_window_non_causal", config.get("speculators_model_type") == "dflash2") or said is False:
        return frozenset()
    return frozenset({"sliding_attention", "full_attention"} if said else {"sliding_attention"})


def _scale(config: dict) -> float | None:
    """What the target's embeddings are multiplied by, which then go in as their weights are; None: as the target's own module gives them, which may scale them itself (Gemma). So
    were the first drafters trained; DFlash 2 and speculators take the weights."""
    scale, weights = config.get("input_embedding_scale"), config.get("conv_kernel_size") or config.get("speculators_model_type")
    return None if scale is None and not weights else float(1.0 if scale is None else scale)


def _layers(config: dict) -> list[int]:
    """The target's layers whose outputs are read; speculators counts the embedding as the first of them."""
    named = config.get("aux_hidden_state_layer_ids")
    return [layer - 1 for layer in named] if named else list(config.get("target_layer_ids") or ())


def _config(folder: Path, config: dict):
    config = rope.of_one_kind(folder, config)
    shape = AutoConfig.for_model("qwen3", **{name: config[name] for name in SHAPE if config.get(name) is not None})
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
             "rope_parameters", "layer_types")
    own = {name: getattr(shape, name) for name in names}
    try:
        return AutoConfig.for_model(ASSISTANT, **own, sliding_window=shape.sliding_window or shape.max_position_embeddings, block_size=int(config.get("block_size", 16)),
                                    mask_token_id=config["mask_token_id"], target_layer_ids=_layers(config))
    except ValueError as error:
        if ASSISTANT not in str(error):
            raise
        raise ValueError(f"{folder}: DFlash drafters need a transformers that knows {ASSISTANT!r}: 5.17 does.") from None


def _name(name: str, model: nn.Module) -> str:
    """What transformers' assistant calls a checkpoint's tensor."""
    for pattern, own in NAMES.items():
        name = re.sub(pattern, own, name)
    found = re.fullmatch(r"(layers\.\d+)\.(\w+)\.(.*)", name)
    if found and found[2] in CONVOLVED:
        return f"{found[1]}.{CONVOLVED[found[2]]}.{found[3]}"
    wrapped = found and found[2] in CONVOLVED.values() and isinstance(getattr(model.layers[0], found[2]), Convolved)
    return f"{found[1]}.{found[2]}.inner.{found[3]}" if wrapped else name


def _head(folder: Path, tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> PrunedHead | None:
    """The drafter's own output head over some of the target's tokens; None where it has the target's."""
    rows, offsets = tensors.pop("lm_head.weight", None), tensors.pop("d2t", None)
    if rows is None or offsets is None:
        return None
    vocab, ids = target.config.get_text_config().vocab_size, torch.arange(len(offsets), device=offsets.device) + offsets.long()
    if len(rows) != len(ids) or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) != len(ids):
        raise ValueError(f"{folder}: lm_head.weight and d2t do not fit a vocabulary of {vocab} tokens.")
    return PrunedHead(rows, ids, vocab)


def _selector(folder: Path, config: dict, tensors: dict[str, torch.Tensor], head: PrunedHead | None) -> Selector | None:
    """Its codebooks are of the head's tokens where the drafter has a head of its own; what they say of any other token is what they say of the last one before it that the head has."""
    own = _part(tensors, "candidate_selector.")
    if not own:
        return None
    own = {name if name.endswith(".weight") else f"{name}.weight": tensor for name, tensor in own.items()}
    codebook = own.get("predecessor_codebook.weight", torch.empty(0, 0))
    pruned = head is not None and len(codebook) == len(head.ids)
    rows = None if not pruned else torch.isin(torch.arange(head.vocab_size, device=head.ids.device), head.ids).cumsum(0).sub(1).clamp(min=0)
    made = Selector(len(codebook), config["hidden_size"], codebook.shape[1], int(config.get("selector_top_k", 16)), rows)
    fit(folder, made, own, assign=True)
    return made.to(codebook.device).eval().requires_grad_(False)


def _bias(model: nn.Module, config: dict) -> None:
    """Transformers' assistant has no biases in its attention; where a checkpoint does (gpt-oss), room for them."""
    for layer in model.layers if config.get("attention_bias") else ():
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(layer.self_attn, name)
            linear.bias = nn.Parameter(torch.empty(linear.out_features, device="meta"))


def is_dspark(config: dict) -> bool:
    """Whether that is the config of a DSpark drafter, and not of a DFlash one."""
    kinds = config.get("speculators_model_type"), config.get("projector_type"), config.get("dflash_config", {}).get("projector_type")
    return "dspark" in kinds or any("DSpark" in name for name in config.get("architectures") or ())


def is_xpress(config: dict) -> bool:
    """Whether that is the config of an XPress drafter."""
    return config.get("speculators_model_type") == "xpress" or any("XPress" in name for name in config.get("architectures") or ())


def _from_anchor(config: dict) -> bool:
    """Whether the first token is drafted at the root's own place: DSpark does so where it does not say otherwise (vLLM's own word for that is `dspark_bonus_anchor`)."""
    said = config.get("sample_from_anchor")
    return is_dspark(config) and not config.get("dspark_bonus_anchor") if said is None else bool(said)


def _refiner(folder: Path, config: dict, tensors: dict[str, torch.Tensor], head: PrunedHead | None) -> Refiner | None:
    """XPress. How often all places are drawn over (`num_jacobi_passes`, `xpress_num_passes`), and from which tokens that begins (a selector's), does not change what it ends at."""
    if not is_xpress(config):
        return None
    if config.get("xpress_mixer_format", "raw") != "raw":
        raise ValueError(f"{folder}: config.json says xpress_mixer_format={config['xpress_mixer_format']}, which is not read.")
    own = _part(tensors, "refiner_head.") or {_renamed(name): tensor for name, tensor in _part(tensors, "xpress_head.").items()}
    _part(tensors, "candidate_selector.")
    table, gate = (own.get(f"{name}.weight", torch.empty(1, 1)) for name in ("token_embed", "mlp_gate"))
    with torch.device("meta"):
        made = Refiner(len(table), config["hidden_size"], table.shape[1], len(gate), int(config.get("block_size", 16)), None if head is None else head.ids)
    fit(folder, made, own, assign=True)
    return made.eval().requires_grad_(False)


def _renamed(name: str) -> str:
    stem = name.removesuffix(".weight")
    return REFINER.get(name) or (f"{REFINER[stem]}.weight" if stem in REFINER else name)


def _markov(folder: Path, config: dict, tensors: dict[str, torch.Tensor], head: PrunedHead | None) -> Markov | None:
    """It knows every token before; its biases are of the head's tokens where the drafter has a head of its own (speculators)."""
    own = _part(tensors, "markov_head.")
    if not own:
        return None
    kind, table = str(config.get("markov_head_type", "vanilla")).lower(), own.get("markov_w1.weight", torch.empty(0, 0))
    if kind not in Markov.KINDS:
        raise ValueError(f"{folder}: markov_head_type {kind!r} is none of {Markov.KINDS}.")
    made = Markov(len(table), config["hidden_size"], table.shape[1], kind, None if head is None else head.ids)
    fit(folder, made, own, assign=True)
    return made.eval().requires_grad_(False)


def _confidence(folder: Path, config: dict, tensors: dict[str, torch.Tensor], selector: Selector | Markov | Refiner | None) -> Confidence | None:
    """proj.{weight, bias} (DeepSpec, speculators, SpecForge) or {weight, bias} (the first ones of speculators), H or H + r wide: with what the Markov head knows of the token before
    or without, as `confidence_head_with_markov` says, too."""
    own = {name if name.startswith("proj.") else f"proj.{name}": tensor for name, tensor in _part(tensors, "confidence_head.").items()}
    if not own:
        return None
    markov = selector if isinstance(selector, Markov) and own.get("proj.weight", torch.empty(1, 0)).shape[1] > config["hidden_size"] else None
    made = Confidence(config["hidden_size"], markov, "proj.bias" in own)
    fit(folder, made, own, assign=True)
    return made.eval().requires_grad_(False)


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of that prefix, taken out, by what follows it."""
    return {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}


# --- the convolutions of DFlash 2 ---------------------------------------------------------------------------------------------


def _convolve(model: nn.Module, config: dict) -> None:
    """Put the convolutions around attention and MLP of every layer, where the config speaks of any."""
    kernel, group = config.get("conv_kernel_size") if config.get("xpress_backbone") != "dflash" else None, config.get("conv_group_size")
    for layer in model.layers if kernel else ():
        for name in CONVOLVED.values():
            setattr(layer, name, Convolved(getattr(layer, name), config["hidden_size"], int(kernel), int(group)))


class Convolved(nn.Module):
    """`inner` between two causal convolutions over the places of a block. Each channel is weighted by `base_kernel` and by what the place itself says (`kernel_projection`),
    the same for `group` neighbouring channels."""

    def __init__(self, inner: nn.Module, width: int, kernel: int, group: int):
        super().__init__()
        self.inner, self.group = inner, group
        self.base_kernel = nn.Parameter(torch.empty(2, kernel, width, device="meta"))
        self.kernel_projection = nn.Linear(width, 2 * kernel * (width // group), bias=False, device="meta")

    def forward(self, hidden_states: torch.Tensor, **kwargs):
        """hidden_states [B, P, H]."""
        _, kernel, width = self.base_kernel.shape
        own = self.kernel_projection(hidden_states).unflatten(-1, (2, kernel, width // self.group)).repeat_interleave(self.group, dim=-1)
        before, after = (own + self.base_kernel).unbind(2)
        done = self.inner(_convolution(hidden_states, before), **kwargs)
        return (_convolution(done[0], after), *done[1:]) if isinstance(done, tuple) else _convolution(done, after)


def _convolution(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """[B, P, H] of x [B, P, H]: at every place the sum over the last k places, each times kernels[.., i, :] of [B, P, k, H], i places back."""
    back = [nn.functional.pad(x, (0, 0, i, 0))[:, : x.shape[1]] for i in range(kernels.shape[2])]
    return (torch.stack(back, dim=2) * kernels).sum(2)
