"""Attention by the kernels, on a CPU: `hf_specdec_rows`, which gives a query the same bits at every width, and `hf_specdec_few`, which is
"sdpa" but for passes over few tokens."""

from __future__ import annotations

from typing import Any

import torch

from .interface import by_eager, by_sdpa, has_eager_alone, register_attention, set_attention_from
from .kernels import attention as kernel
from .kernels import cpu

NAME, FEW_NAME, EAGER_NAME = "hf_specdec_rows", "hf_specdec_few", "hf_specdec_few_eager"
HARMLESS = ("position_ids", "cache_position")  # tensors that attention functions are passed and do not look at
FEW = 64  # queries per row up to which the kernel is the faster one; in bfloat16 on AVX-512, for any number


def rows_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T + mask) v as `[B, Q, H, Dv]` in query's dtype, computed in float32 from query `[B, H, Q, D]`, key
    `[B, G, S, D]` and value `[B, G, S, Dv]` on a CPU; H is a multiple of G.

    mask: bool (True: visible) or floating, broadcastable to `[B, H, Q, S]`; slots at minus infinity or at half the dtype's minimum and
    below take no part. causal: query i sees slots 0..i, where there is no mask. softcap: scores become softcap * tanh(score /
    softcap) first. sinks `[H]`: one more score per head that takes weight and gives no value. A query that sees nothing gets zeros.

    The result depends on what the query sees and on nothing else: not on other queries, rows, masked slots, strides, threads or the
    kernel path. Raises ValueError for tensors on another device.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}: row-invariant attention runs on a CPU. "
                             f'Call model.set_attn_implementation("sdpa").')
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if mask is not None:
        mask = mask[..., : key.shape[2]].expand(shape)
    floating = mask is not None and mask.is_floating_point()
    nothing = torch.finfo(mask.dtype).min / 2 if floating else -1e38
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if kernel.takes(query, key, value) and (mask is None or mask.dtype in kernel.MASKS):
        return kernel.attend(query, key, value, mask, scale, causal and mask is None, softcap or 0.0, sinks, nothing)
    return _by_torch(query, key, value, mask, scale, causal and mask is None, softcap, sinks, nothing)


def _by_torch(query, key, value, mask, scale, causal, softcap, sinks, nothing) -> torch.Tensor:
    """The same, query by query, from the visible slots alone; differentiable. Not bit for bit what the kernel gives."""
    batch, heads, width, _ = query.shape
    groups, slots = key.shape[1], key.shape[2]
    rows = []
    for b in range(batch):
        for q in range(width):
            seen = torch.arange(slots, device="cpu") <= (q if causal else slots)
            bias = torch.zeros(heads, slots, dtype=torch.float32, device="cpu")
            if mask is not None:
                bias = mask[b, :, q].float() if mask.is_floating_point() else torch.where(mask[b, :, q], 0.0, -torch.inf)
            per_head = [torch.nonzero(seen & (bias[h] > nothing)).flatten() for h in range(heads)]
            rows.append(torch.stack([
                _one(query[b, h, q], key[b, h * groups // heads, at], value[b, h * groups // heads, at], bias[h, at], scale, softcap,
                     None if sinks is None else sinks[h]) for h, at in enumerate(per_head)
            ]))  # fmt: skip
    return torch.stack(rows).view(batch, width, heads, -1).to(query.dtype)


def _one(query, key, value, bias, scale, softcap, sink) -> torch.Tensor:
    work = torch.promote_types(query.dtype, torch.float32)
    if not len(key):
        return value.new_zeros(value.shape[-1], dtype=work)
    scores = (key.to(work) * query.to(work)).sum(-1) * scale
    scores = (scores if not softcap else softcap * torch.tanh(scores / softcap)) + bias
    if sink is not None:
        scores = torch.cat([scores, sink.to(work)[None]])
    return (scores.softmax(-1)[: len(key), None] * value.to(work)).sum(0)


_library = torch.library.Library("hf_specdec", "FRAGMENT")
# the second one is for what the kernel does not take: generated C++ calls the first one without Python (csrc/shims.c)
for _name in ("rows_attention", "rows_attention_by_torch"):
    _library.define(f"{_name}(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool causal, float softcap, "
                    "Tensor? sinks) -> Tensor")
    _library.impl(_name, rows_attention, "CPU")
    torch.library.register_fake(
        f"hf_specdec::{_name}", lambda query, key, value, *rest: query.new_empty((*query.shape[:3:2], query.shape[1], value.shape[-1])),
        lib=_library)


def _traced(query, key, value, mask, scale, causal, softcap, sinks) -> torch.Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    sinks = None if sinks is None else sinks.detach().float().contiguous()
    known = query.dtype in cpu.DTYPES and key.dtype == value.dtype == query.dtype and (mask is None or mask.dtype in kernel.MASKS)
    operators = torch.ops.hf_specdec
    run = operators.rows_attention.default if known else operators.rows_attention_by_torch.default
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    return run(query, key, value, mask, scale, causal, softcap or 0.0, sinks)


def forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, softcap=None, s_aux=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """What transformers' attention layers call; causality without a mask is decided as for "sdpa". Raises ValueError for what
    would change the result and is not there: dropout, paged caches."""
    if dropout:
        raise ValueError(f'attn_implementation="{NAME}" has no dropout: call model.eval(), or train with "sdpa".')
    if kwargs.get("cache") is not None:
        raise ValueError(f'attn_implementation="{NAME}" takes no paged cache: use "sdpa" for continuous batching.')
    bias = kwargs.get("position_bias")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1
    causal = causal and attention_mask is None
    if bias is not None:
        attention_mask, causal = _with_bias(bias.float(), attention_mask, causal), False
    run = _traced if torch.compiler.is_compiling() else rows_attention
    return run(query, key, value, attention_mask, scaling, causal, softcap, s_aux), None


def _with_bias(bias: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    """A learned bias [1 or B, H, Q, S] and the mask in one, in float32."""
    if causal:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    return (bias if mask.dtype == torch.bool else bias + mask.float()).masked_fill(hidden, -torch.inf)


def forward_few(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs) -> tuple[torch.Tensor, None]:
    """What "sdpa" computes: by the kernel on a CPU, for as many queries a row as it is the faster one for, by torch's
    `scaled_dot_product_attention` otherwise."""
    prompt = torch.compiler.is_compiling() and query.shape[2] == key.shape[2]  # one function serves every length: nothing may depend on it
    few = kernel.for_any_number(query.dtype) or not prompt and query.shape[2] <= FEW
    few = few and query.device.type == "cpu" and query.dtype in cpu.DTYPES
    if few and not dropout and kwargs.get("position_bias") is None and kwargs.get("cache") is None and not torch.is_grad_enabled():
        return forward(module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal)
    return by_sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs)


def forward_eager(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, **kwargs) -> tuple[torch.Tensor, Any]:
    """What the "eager" of a model without "sdpa" computes: by the kernel on a CPU (capped scores and sinks, too), else by the model's own function."""
    few = kernel.for_any_number(query.dtype) or query.shape[2] <= FEW
    few = few and query.device.type == "cpu" and query.dtype in cpu.DTYPES and attention_mask is not None
    weights = kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False)  # the kernel has none to give
    told = all(name in HARMLESS for name, part in kwargs.items() if torch.is_tensor(part))  # LongT5 and Inkling add to the scores
    if few and told and not dropout and not weights and not torch.is_grad_enabled():
        return forward(module, query, key, value, attention_mask, scaling=scaling, is_causal=False, softcap=softcap, s_aux=s_aux)
    more = {name: part for name, part in (("softcap", softcap), ("s_aux", s_aux)) if part is not None}
    return by_eager(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **more, **kwargs)


def use_for_few(model: torch.nn.Module) -> None:
    """Give a model on a CPU that runs "sdpa" the attention `hf_specdec_few`, and one that knows "eager" alone `hf_specdec_few_eager`, where the kernels are there and the
    model lets it be chosen."""
    if cpu.library() is not None and getattr(model, "device", torch.device("cpu")).type == "cpu":
        set_attention_from(model, "sdpa", FEW_NAME)
        if has_eager_alone(model):
            set_attention_from(model, "eager", EAGER_NAME)


def use_own_attention(model: torch.nn.Module) -> None:
    """Undo `use_for_few`."""
    set_attention_from(model, FEW_NAME, "sdpa")
    set_attention_from(model, EAGER_NAME, "eager")


register_attention(NAME, forward)
register_attention(FEW_NAME, forward_few)
register_attention(EAGER_NAME, forward_eager, masks="eager")
