"""Published drafters: of Llama-family targets Medusa heads (the layouts of FasterDecoding/Medusa and of vLLM), EAGLE and EAGLE-3 layers
(SafeAILab/EAGLE, speculators; EAGLE-3 also as SpecForge and ModelOpt do) and Hydra++, of any target those of DFlash (`training.dflash`), Hydra heads and
IBM's MLP speculators. From safetensors only.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ..assistants import is_dflash
from ..drafts.base import Draft
from ..drafts.medusa import MedusaDraft, MedusaHeads
from ..folders import json_object
from . import dflash, hydra, mlp_speculator, mtp, published_eagle, shared
from .storage import alike, fit

HUB = "hub:"
PICKLES = ("medusa_lm_head.pt", "hydra_lm_head.pt", "pytorch_model*.bin")
EMBEDDING = "model.embed_tokens.weight"
LOADERS = {"dflash": dflash.load, "eagle": published_eagle.eagle, "eagle3": published_eagle.eagle3, "hydra": hydra.load, "mlp_speculator": mlp_speculator.load, "mtp": mtp.refuse}


def kind(name: str | Path) -> str:
    """"medusa", "hydra", "mlp_speculator", "dflash", "eagle", "eagle3" or "mtp" for a folder (or hub:NAME) that holds one, else ""."""
    folder = _folder(name)
    config = config_of(folder)
    if config is None:
        return ""
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return "medusa"
    if "hydra_num_heads" in config or config.get("model_type") == "mlp_speculator":
        return "hydra" if "hydra_num_heads" in config else "mlp_speculator"
    if is_dflash(config):
        return "dflash"
    if config.get("speculators_model_type") in ("eagle", "mtp"):
        return config["speculators_model_type"]
    names = _names(folder)
    if "fc.weight" not in names and "model.fc.weight" not in names:
        return ""
    return "eagle3" if any("hidden_norm" in name for name in names) else "eagle"


def load(name: str | Path, target: PreTrainedModel) -> Draft:
    """The checkpoint in a folder, or hub:NAME, as a draft for `target`, in its dtype and on its device.

    Raises ValueError naming what does not map: another width or vocabulary, tensors that are missing or unknown; and where the weights are there as pickles only.
    """
    folder = _folder(name)
    what = kind(folder)
    if not what:
        raise ValueError(f"{name} holds no Medusa, Hydra, MLP speculator, DFlash, EAGLE or EAGLE-3 checkpoint (config.json with weights in safetensors).")
    return {"medusa": _medusa, **LOADERS}[what](folder, config_of(folder), _tensors(folder, what, target), target)


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
    found = [path.name for name in PICKLES for path in sorted(folder.glob(name))]
    if found and not list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}/{found[0]} is a pickle, which can run code when it is read, and is not opened. Where you trust it, read it with torch's "
                         f"weights_only=True and write {Path(found[0]).stem.replace('pytorch_', '')}.safetensors with safetensors.torch.save_file, of each tensor a contiguous "
                         f"clone.")


def _tensors(folder: Path, what: str, target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All tensors; of Medusa heads in one checkpoint with a model the heads' alone."""
    refuse_pickles(folder)
    joint, tensors = what == "medusa" and EMBEDDING in _names(folder), {}
    wanted = re.compile(r"medusa_heads?\." if joint else "")
    for path in sorted(folder.glob("*.safetensors")):
        with _open(path) as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys() if wanted.match(name)}
            if joint:
                _check_together(folder, file, target)
    if not tensors:
        raise ValueError(f"{folder} has a config.json and no {'medusa_head.* in its safetensors files' if joint else 'safetensors file'}; copy the checkpoint again.")
    return {re.sub(r"^(model|medusa_heads?)\.", "", name): tensor for name, tensor in tensors.items()}


def _check_together(folder: Path, file, target: PreTrainedModel) -> None:
    """ValueError unless the target is the model in the checkpoint of these heads, which was trained with them (Medusa-2): its embedding and its last layer's weights, where they are in the
    file and the target has them as numbers."""
    last, own = f"model.layers.{target.config.get_text_config().num_hidden_layers - 1}.mlp.down_proj.weight", dict(target.named_parameters())
    for name in (name for name in (EMBEDDING, last) if name in file.keys() and name in own and own[name].is_floating_point() and not own[name].is_meta):
        if not alike(file.get_tensor(name), own[name], 0.005, 1e-5):
            raise ValueError(f"{folder} holds heads that were trained together with the model beside them (Medusa-2), and {name} of the target is another. Load the target from that folder, "
                             f"too; decoding is lossless relative to it.")


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
