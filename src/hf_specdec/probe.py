"""Does a model obey the masks and positions it is given? Asked once per instance of families that the tests do not cover."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from . import compat
from .cached_model import CachedModel
from .caches import BESIDE_BEAMS, MIXED, PADDING_COUNTED
from .compat import ModelTraits, own_mask_refusal
from .kinds import BOTH_WAYS, COMPOSED
from .lengths import check_counting
from .method import METHOD
from .parts import modules
from .positions import blank
from .seq2seq import Source, each
from .uploads import upload

TESTED = frozenset(
    "apertus arcee cohere cohere2 codegen deepseek_v3 ernie4_5 exaone4 falcon gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode "
    "gpt_neox gpt_oss gptj granite helium hunyuan_v1_dense llama llama4_text ministral mistral mixtral nemotron olmo olmo2 olmo3 "
    "olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 xglm".split()
)
_answers: WeakKeyDictionary = WeakKeyDictionary()


def check_batch(model: PreTrainedModel, traits: ModelTraits, batch: int, role: str, anew: bool = False) -> None:
    """ValueError naming `role` if `model` cannot score `batch` ragged rows in one pass, or its flash attention not even one. The encoder-decoders that are not
    refused have been seen to. anew: plain generate() reads its text anew for every token."""
    if traits.own_cache and role == "target":
        if batch > 1 and not anew and model.config.model_type in MIXED:
            raise ValueError(f"{role}: plain generate() of {type(model).__name__} mixes the rows of a batch from the second new token on, so there is no text to be equal to. Pass "
                             f"use_cache=False, whose texts these are, or generate the rows one by one (num_return_sequences and num_beams make rows, too).")
        return
    tested = traits.encoder == "own" and compat.unwrap(model).config.model_type not in COMPOSED
    if (batch == 1 and not traits.flash) or tested or obeys_masks(model, traits):
        return
    if traits.flash:
        raise ValueError(f"{role}: {type(model).__name__} runs attn_implementation={compat.flash_of(model.config.get_text_config())!r}, which gives the tokens of a "
                         f'pass other logits than a pass over the whole text does. Call model.set_attn_implementation("sdpa"), or use speculative=False.')
    raise ValueError(own_mask_refusal(model, role))


def check_own_cache(model: PreTrainedModel, generation: Any, real: torch.Tensor) -> None:
    """ValueError where plain generate() itself does not read rows of a batch as texts: of a model whose cache is of its own kind, which makes tokens of `real` [B, P]."""
    config, anew, beams = model.config.get_text_config(), generation.use_cache is False, generation.num_beams or 1
    name, first = type(model).__name__, next(iter(getattr(config, "layer_types", None) or ()), None)
    if len(real) > 1 and not real.all() and config.model_type in PADDING_COUNTED:
        raise ValueError(f"attention_mask: plain generate() of {name} counts the padding of a batch among the tokens that it groups, so that a row's text depends on the others. Give "
                         f"prompts of one length together, or generate the rows one by one.")
    if len(real) > 1 and not real.all() and not anew and config.model_type == "minimax" and first == "linear_attention":
        raise ValueError(f"attention_mask: plain generate() of {name} shows the padding of a batch to all tokens behind the prompts, because its first layer is no attention. Pass "
                         f"use_cache=False, with which it does not, give prompts of one length together, or generate the rows one by one.")
    if beams > 1 and not anew and config.model_type in BESIDE_BEAMS:
        raise ValueError(f"num_beams={beams}: the states of {name} do not follow the beams of plain generate(), so that it finds others than without a cache. Pass use_cache=False, "
                         f"whose beams these are, or use num_beams=1.")


def check_tokens(model: torch.nn.Module, ids: torch.Tensor, prompts: list[list[int]], name: str = "input_ids") -> None:
    """ValueError unless ids [B, P], passed as `name`, whose rows without padding are `prompts`, are whole numbers that the model's embedding has."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name}: expected token ids int64, got {ids.dtype}.")
    count = getattr(compat.unwrap(model).get_input_embeddings(), "num_embeddings", None)
    least, most = min(map(min, prompts)), max(map(max, prompts))
    if count is not None and not 0 <= least <= most < count:
        raise ValueError(f"{name} has token ids from {least} to {most}; the model's go from 0 to {count - 1}. Use the model's own tokenizer.")


def check_source(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """`check_tokens` of a text that an encoder is given, which transformers has it read before anything else; ValueError for a mask of another shape."""
    mask = kwargs.get("attention_mask")
    if model.config.is_encoder_decoder and model.main_input_name == "input_ids" and not any(name.startswith("pixel") for name in kwargs):
        for name in ("inputs", "input_ids"):
            if kwargs.get(name) is not None and kwargs[name].numel() and kwargs.get("encoder_outputs") is None:
                check_tokens(model.get_encoder(), kwargs[name], kwargs[name].tolist(), name)
                if torch.is_tensor(mask) and mask.shape != kwargs[name].shape:
                    raise ValueError(f"attention_mask has the shape {list(mask.shape)} and {name} {list(kwargs[name].shape)}: give one number per token, 0 for "
                                     f"padding, or leave it out.")


def check_trees(draft, model: PreTrainedModel, traits: ModelTraits, length: int, role: str) -> None:
    """ValueError naming `role` if `draft` may propose trees to `model`, in texts of up to `length` tokens, and that cannot score any."""
    if not draft.may_branch:
        return
    if traits.own_positions:
        raise ValueError(f"{own_mask_refusal(model, role, branches=True)} The draft {draft.name!r} proposes trees: "
                         f"use one that proposes chains, such as PromptLookupDraft() or a draft model.")
    if role == "target":  # what a draft computes may be anything
        check_counting(compat.unwrap(model), length, role)


def check_weights(model: PreTrainedModel, role: str) -> None:
    """ValueError naming `role` if `model` comes from a folder of MX weights and has none: codes have then been read as numbers, or nothing at all."""
    quantised = getattr(getattr(model, "config", None), "quantization_config", None)
    method = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
    if method == METHOD and not any(type(part).__name__ in ("MXLinear", "ExpertMatrix") for part in modules(model)):  # the core does not import mx
        raise ValueError(f"{role}: {type(model).__name__} was saved with MX weights and loaded without them: import hf_specdec.mx before from_pretrained, and "
                         f"load it again.")


def check_mode(model: PreTrainedModel, role: str) -> None:
    """ValueError naming `role` if something has been done to `model` that goes by where a pass begins or ends, or that takes its cache away."""
    check_weights(compat.unwrap(model), role)
    name = f"{role}: {type(model).__name__}"
    if compat.device_of(model).type == "meta":
        raise ValueError(f"{name} is on the meta device, without weights. Load them first: from_pretrained, or to_empty and load_state_dict.")
    preparing = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", model)  # PEFT puts a method of its wrapper there
    adapters = getattr(preparing, "peft_config", None)
    for adapter in adapters.values() if isinstance(adapters, dict) else ():
        if getattr(adapter, "is_prompt_learning", False) or getattr(adapter, "alora_invocation_tokens", None):
            raise ValueError(f"{name} has an adapter of type {adapter.peft_type}, which reads where a pass begins or ends, so a pass over drafted tokens would "
                             f"differ from plain decoding. Merge it or take it off, or use speculative=False.")
    whole = [part for part in modules(model) if "quantized.dynamic" in type(part).__module__] if role == "target" else []  # a draft may be anything
    if whole:
        raise ValueError(f"{name} has layers of {type(whole[0]).__module__} (quantize_dynamic), which give all tokens of a pass one scale, so a pass over "
                         f"drafted tokens would differ from plain decoding. Quantise the weights alone (hf_specdec.mx), or use speculative=False.")
    if _in_step(compat.unwrap(model)):
        raise ValueError(f"{name} is sharded over processes that make every pass together (FSDP, ZeRO-3), and how many a text takes depends on what is accepted: "
                         f"they would wait for each other for ever. Give every process a whole model, or use speculative=False.")
    if model.training and any(getattr(part, "gradient_checkpointing", False) for part in modules(model)):  # transformers has named it twice
        raise ValueError(f"{name} is in training with gradient checkpointing, which keeps no cache. Call eval(), or gradient_checkpointing_disable().")


def _in_step(model: PreTrainedModel) -> bool:
    """Whether other processes take part in every pass of the model, for which stock generate has synced_gpus."""
    processes = torch.distributed
    if not (processes.is_available() and processes.is_initialized() and processes.get_world_size() > 1):
        return False
    wrapped = any(kind.__name__ in ("FullyShardedDataParallel", "FSDPModule") for kind in type(model).__mro__)
    sharded = wrapped or getattr(model, "_is_fsdp_managed_module", False)  # accelerate and torch's FSDP leave this mark
    return sharded or any(hasattr(part, "ds_id") for part in model.parameters())  # DeepSpeed's number of a parameter


@torch.no_grad()
def obeys_masks(model: PreTrainedModel, traits: ModelTraits) -> bool:
    """Whether a ragged pass gives every row the logits of a pass of its own. Costs four short forwards the first time; free for
    the families in `TESTED`, but under flash attention, where it is a matter of the kernels at hand, too."""
    config = model.config.get_text_config()
    if traits.own_cache:
        return False
    if config.model_type in TESTED and not traits.flash and traits.encoder == "none":
        return True
    answers, attention = _answers.setdefault(model, {}), compat.flash_of(config)
    if attention not in answers:
        answers[attention] = _ragged_equals_alone(model, traits)
    return answers[attention]


def _ragged_equals_alone(model: PreTrainedModel, traits: ModelTraits) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    ids = torch.randint(traits.vocab_size, (2, 9), generator=generator, device="cpu")
    hidden = blank(compat.unwrap(model))
    ids = ids if hidden is None else torch.where(ids == hidden, (ids + 1) % traits.vocab_size, ids)
    rows, block = [ids[0, :7].tolist(), ids[1, :1].tolist()], ids[:, 7:].to(model.device)
    outputs = _something_read(model, generator) if traits.encoder == "own" else None
    source = None if outputs is None else Source(compat.unwrap(model).get_encoder(), None, None, outputs, [])
    cached = CachedModel(model, 9, traits=traits, source=source)
    cached.score(rows)
    cached.commit([1, 1])
    together = cached.score([row + new for row, new in zip(rows, block.tolist())]).float()
    for b, row in enumerate(rows):
        whole = torch.cat([upload([row], model.device), block[b : b + 1]], dim=1)
        if traits.states:  # which may be limited in prompts, and not in what follows
            lone = CachedModel(model, 9, traits=traits)
            lone.score([row])
            lone.commit([1])
            alone = lone.score([whole[0].tolist()])[0, 0].float()
        else:
            positions = torch.arange(whole.shape[1], device=model.device)[None]  # as stock generate counts; RoBERTa alone would begin at its pad token + 1
            given = {"position_ids": positions} if traits.placed or not traits.own_positions else {}
            given |= {"token_type_ids": torch.ones_like(whole)} if compat.unwrap(model).config.model_type in BOTH_WAYS else {}
            given = {"input_ids": whole} | given if source is None else {"decoder_input_ids": whole, "encoder_outputs": each(outputs, lambda part: part[b : b + 1])}
            alone = model(**given, use_cache=False).logits[0, -1].float()
        off = (together[b, 0].to(alone.device) - alone).abs() / alone.std()
        if not _near(off, model.dtype, traits.flash):
            return False
    return True


def _something_read(model: PreTrainedModel, generator: torch.Generator) -> BaseModelOutput:
    """Encoder outputs of two rows, of no image."""
    whole = compat.unwrap(model)
    projection, config = getattr(whole, "enc_to_dec_proj", None), whole.decoder.config
    width = projection.in_features if projection is not None else getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
    states = torch.randn((2, 3, width), generator=generator, device="cpu")
    return BaseModelOutput(last_hidden_state=states.to(compat.device_of(model), model.dtype))


def _near(off: torch.Tensor, dtype: torch.dtype, flash: bool) -> bool:
    """Whether logits that are off by so many [V] of their standard deviations are the same but for rounding: in 16 bit, sums of other numbers of rows are rounded
    in other ways, and flash attention, which is asked of large models of all kinds, sums in another order; tokens that see others are off everywhere."""
    if dtype == torch.float32:
        return bool(off.max() <= 0.005)
    return bool(off.mean() <= 0.15) if flash else bool(off.max() <= 0.05)
