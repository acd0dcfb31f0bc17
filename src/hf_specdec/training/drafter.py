"""A draft made of the target's parts: some of its layers, its embedding and its output head, the last two shared and not stored.

A drafter's folder holds `config.json` (transformers' own), `drafter.json`, `model.safetensors` (the layers, in 16 bit or MX)
and a model card.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from .. import compat, parts
from ..caches import OWN_CACHE, counts_tokens
from ..drafts import features
from ..drafts.base import Draft
from ..drafts.feature import FeatureDraft
from ..flash import flash_of
from ..hints import meant
from ..kinds import HARD_CODED, WRITES_LIKE
from ..lockstep import in_stages
from ..mx.beside import use_kernels
from ..registry import MTP, SHIPPED, shipped
from . import mtp, published, storage
from .shared import PrunedHead, empty, share, shared_names
from .shards import probe, same
from .weights import check_at_hand, dense, make_ready, names


def build(target: PreTrainedModel, layers: list[int], head_ids: torch.Tensor | None = None, reads: tuple[int, ...] = ()) -> PreTrainedModel:
    """A draft with copies of the target's layers `layers` and final norm, and its embedding and head themselves (the rows
    `head_ids` of the head, where given). In the target's dtype and on its device. With `reads`, layers of the target whose hidden
    states it reads, it is a feature drafter (`drafts.features`).

    Raises ValueError for a layer that the target does not have, for a target without one list of layers, and for layers that do not fit a model of these alone.
    """
    target = compat.unwrap(target)
    count = target.config.get_text_config().num_hidden_layers
    if not layers or not all(isinstance(layer, int) and 0 <= layer < count for layer in layers):
        raise ValueError(f"layers={layers!r}: the target has layers 0..{count - 1}; name one or more of them.")
    if reads:
        features.check_streams(target, reads)
        features.check_embedding(target)
        if hasattr(_of_text(target), "vision_config"):  # Phi-4 Multimodal, whose forward looks for images in what it is given
            raise ValueError(f"target: what writes the text in {type(target).__name__} reads images itself, so none of its layers can be a drafter that reads hidden states. Make one "
                             f"that reads none, or use another draft.")
    if target.config.model_type == "rwkv" and len(layers) < 2:  # transformers divides by their number less 1
        raise ValueError(f"layers={layers!r}: an {type(target).__name__} has two layers or more. Name two.")
    draft = empty(target, config := _with_layers(_of_text(target), layers))
    if config.get_text_config().model_type in OWN_CACHE and not counts_tokens(DynamicCache(config=config)):
        raise ValueError(f"layers={layers!r}: none of them is attention, and without any {type(target).__name__} does not know how much it has read. Name one that is, too.")
    (place_of_own, own), (place_of_new, new) = parts.decoder_layers(target), parts.decoder_layers(draft)
    make_ready(target)
    for place, (module, layer) in enumerate(zip(new, layers)):
        weights = dense(own[layer], target.dtype)
        try:
            module.load_state_dict(weights)
        except RuntimeError as error:
            first = list(range(len(layers)))
            remedy = "Train heads (medusa) on it, or use another draft" if list(layers) == first else f"Name other ones, such as {first}, or train heads (medusa) on it"
            raise ValueError(f"layers={layers!r}: layer {layer} of {type(target).__name__} is of another kind than layer {place} of a model of {len(layers)} "
                             f"layers. {remedy}.") from error
    share(draft, target, head_ids)
    if reads:
        features.attach(draft, reads)
    wanted, before, after = names(draft) - shared_names(draft), place_of_own.removesuffix("layers"), place_of_new.removesuffix("layers")
    rest = dense(target, target.dtype, but=(own, target.get_input_embeddings(), target.get_output_embeddings()))
    rest = {after + name.removeprefix(before) if before and name.startswith(before) else name: p for name, p in rest.items()}  # inside a model that reads images, say
    try:
        draft.load_state_dict({name: p for name, p in rest.items() if name in wanted}, strict=False)
    except RuntimeError as error:
        raise ValueError(f"layers={layers!r}: what {type(target).__name__} has beside its layers depends on how many these are, so no draft can be made of some of them "
                         f"({error.args[0].strip().splitlines()[-1].strip()}).") from error
    return draft


def layer_numbers(layers: tuple[int, ...], target) -> list[int]:
    """The numbers of the target's layers, those below 0 counted from its end; ValueError for one that it does not have."""
    count = target.config.get_text_config().num_hidden_layers
    wrong = [layer for layer in layers if not -count <= layer < count]
    if wrong or not layers:
        raise ValueError(f"layers={','.join(map(str, wrong))}: the target has layers 0..{count - 1}, or -{count}..-1 from its end; name one or more of them.")
    return [layer % count for layer in layers]


def check_begin(name: str) -> None:
    """ValueError for a config's `begin` that is given and no drafter."""
    if name and not is_drafter(name):
        raise ValueError(f"begin={name!r} is no drafter; name a folder that training wrote, or one of {shipped()}.")


def check_fits(other: PreTrainedModel | Draft, count: int, reads: tuple[int, ...]) -> None:
    """ValueError where a draft of `count` layers that reads these hidden states cannot begin with the weights of the drafter `other`."""
    given, layers = getattr(other, "reads", ()), 0 if isinstance(other, Draft) else len(parts.decoder_layers(other)[1])
    if layers != count or given not in ((), reads):
        here = f"this one has {layers} and reads {given or 'none'}" if layers else f"this one is of another kind, {other.name!r}"
        raise ValueError(f"begin: a drafter with {count} layers that reads {f'the hidden states {reads} or none' if reads else 'no hidden states'} is needed; {here}.")


def check_dtype(target, config) -> None:
    """ValueError for a target whose parts do not go into a draft that learns in float32 and computes in the config's `precision`."""
    wanted = ("bfloat16", "float32") if config.half else ("float32",)
    if str(target.dtype).removeprefix("torch.") not in wanted:
        raise ValueError(f"target: weights in {target.dtype}; load it in {' or '.join(wanted)} to train a draft from its parts with precision={config.precision!r}.")


def check_start(config, target: PreTrainedModel) -> None:
    """ValueError, before text is made, for a dtype and layers of the target that do not go with the config, and for a `begin` that does not."""
    check_dtype(target, config)
    layers = layer_numbers(config.layers, target)
    if config.begin:
        other = load(config.begin, target)
        other = other.model if isinstance(other, FeatureDraft) else other
        check_fits(other, len(layers), getattr(other, "reads", ()) if hasattr(config, "reads") else ())


def begin(draft: PreTrainedModel, other: PreTrainedModel | Draft) -> PreTrainedModel:
    """`draft` with the weights of another one that reads what it reads, or that reads no hidden states: at first it takes no notice of
    them either.

    Raises ValueError where their layers, or what they read, differ, and for a draft of another kind.
    """
    other = other.model if isinstance(other, FeatureDraft) else other
    reads, given, count = getattr(draft, "reads", ()), getattr(other, "reads", ()), len(parts.decoder_layers(draft)[1])
    check_fits(other, count, reads)
    shared = shared_names(draft)
    draft.load_state_dict({name: p for name, p in dense(other, other.dtype).items() if name not in shared}, strict=False)
    if reads and not given:
        features.start_blind(draft)
    return draft


def save(draft: PreTrainedModel, folder: str | Path, target_name: str, format: str = "bf16", notes: dict | None = None) -> Path:
    """Write what the draft does not share; Linear weights in the MX `format`, or dense 16 bit ("bf16"). Complete or absent."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = storage.stored(draft, shared_names(draft), format)
    head = draft.get_output_embeddings()
    if isinstance(head, PrunedHead):
        tensors["head_ids"] = head.ids.int()
    draft.config.name_or_path = ""
    draft.config.save_pretrained(folder)
    about = {"vocab_size": draft.config.vocab_size, "reads": list(getattr(draft, "reads", ())), "notes": notes or {}}
    return storage.write(folder, tensors, draft.get_input_embeddings().weight, target_name, format, about)


def is_drafter(name: str | Path) -> bool:
    """Whether `load` knows it: a shipped drafter's name, or a folder that holds one or a published checkpoint, or hub:NAME."""
    return str(name) in (*shipped(), MTP) or str(name).startswith(published.HUB) or (Path(name) / "drafter.json").is_file() \
        or Path(name).is_dir() and bool(published.kind(name))


def load(folder: str | Path, target: PreTrainedModel | None = None) -> PreTrainedModel | Draft:
    """The draft of that folder, or the shipped one of that name, for `target`, whose embedding and head it shares; in its dtype and on
    its device. What comes back goes into `assistant_model`: a model, or a `FeatureDraft` or `MedusaDraft` where the drafter reads the
    target's hidden states. A folder or hub id with a published checkpoint (Medusa, Hydra, EAGLE, ...) will do, too (`training.published`), and "mtp" means
    the prediction module of the target's own checkpoint (`training.mtp`).

    Raises ValueError if the folder holds no whole drafter, or that of another target; TypeError without a target.
    """
    if not isinstance(folder, (str, os.PathLike)) or isinstance(target, type) or not hasattr(target, "get_input_embeddings"):
        raise TypeError("load_drafter(folder, target): pass a folder or a name, then the model that is drafted for, whose embedding the drafter shares.")
    if in_stages(target):
        raise ValueError("target: a drafter shares its embedding and output head, which lie in different processes (pipeline parallel). Use a draft model.")
    check_at_hand("its embedding", dict(target.get_input_embeddings().named_parameters()))
    if str(folder) == MTP:
        return mtp.load(target)
    given, folder = folder, SHIPPED / folder if str(folder) in shipped() else Path(folder)
    if not (folder / "drafter.json").is_file():
        if str(given).startswith(published.HUB) or published.kind(folder):
            return published.load(given, target)
        published.refuse_pickles(folder)
        own = " A model of its own is read by AutoModelForCausalLM.from_pretrained." if (folder / "config.json").is_file() else ""
        raise ValueError(f"{folder} holds no drafter (drafter.json is missing){meant(given, shipped())}; `hf-specdec train` writes one, and {shipped()} come "
                         f"with the package.{own}")
    about = storage.read(folder)
    _check_target(about, target, folder)
    try:
        with safe_open(folder / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{folder}/model.safetensors is damaged or cut short ({error}): copy the drafter again.") from error
    ids = tensors.pop("head_ids", None)
    if ids is not None and (ids.dim() != 1 or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= about["vocab_size"]):
        raise ValueError(f"{folder}: the head's token ids are not within the vocabulary; copy the drafter again.")
    if about.get("kind", "layers") != "layers":
        from . import heads

        return heads.from_parts(about, tensors, ids, target, folder)
    draft = empty(target, AutoConfig.from_pretrained(folder))
    share(draft, target, None if ids is None else ids.long())
    if about.get("reads"):
        features.attach(draft, tuple(about["reads"]))
    storage.pack(draft, tensors, about["weights"])
    missing, unexpected = draft.load_state_dict(tensors, strict=False)
    absent = set(missing) - shared_names(draft)
    if absent or unexpected:
        raise ValueError(f"{folder}: model.safetensors does not fit config.json ({sorted(absent | set(unexpected))[0]}).")
    if isinstance(draft.get_output_embeddings(), PrunedHead):
        draft.get_output_embeddings().prepare(about["weights"])
    use_kernels(draft)
    return FeatureDraft(draft.eval(), target) if about.get("reads") else draft.eval()


def _check_target(about: dict, target: PreTrainedModel, folder: Path) -> None:
    weight = target.get_input_embeddings().weight
    fits = (about["vocab_size"], about["hidden_size"]) == (target.config.get_text_config().vocab_size, weight.shape[1])
    if not fits or not same(about["probe"], probe(weight)):
        raise ValueError(f"{folder} is a drafter for {about['target']}, whose embedding it shares; this target has another one.")


def _of_text(target: PreTrainedModel):
    """The config of what writes the text in a model that reads images or sounds, too; any other model's own. ValueError where transformers makes no such model."""
    text, known = target.config.get_text_config(), AutoModelForCausalLM._model_mapping
    if (kind := WRITES_LIKE.get(text.model_type)) is not None:
        said = text.to_dict() | HARD_CODED.get(text.model_type, {})
        return CONFIG_MAPPING[kind](**{name: value for name, value in said.items() if name not in ("model_type", "architectures")})
    config = text if type(text) in known else target.config
    if type(config) not in known or not hasattr(config, "vocab_size"):
        raise ValueError(f"target: AutoModelForCausalLM makes no model like what writes the text in {type(target).__name__} ({text.model_type}), so no draft can be made of its "
                         f"layers. Train heads (medusa) on it, or use another draft.")
    if getattr(config, "use_bidirectional_attention", None) is True:  # PaliGemma's prompts are read so; a draft writes behind them
        (config := copy.deepcopy(config)).use_bidirectional_attention = False
    return config


def _with_layers(config, layers: list[int]):
    config = copy.deepcopy(config)
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    text.num_hidden_layers = len(layers)
    if types:
        try:
            text.layer_types = [types[layer] for layer in layers]
        except AttributeError:
            raise ValueError(f"layers={layers!r}: {type(config).__name__} says of itself what its layers are, so no draft can be made of some of them. "
                             f"Train heads (medusa) on it, or use another draft.") from None
    if flash_of(text):  # a drafter is trained with masks of numbers
        config._attn_implementation = text._attn_implementation = "sdpa"
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    return config
