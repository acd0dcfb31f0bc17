"""A stand-in for the package flash-attn on a CPU: its two functions with their documented contract, in float32, written down plainly. transformers finds it
where it looks for flash-attn, so that its own code around the kernels runs.

The contract (flash_attn_interface.py): q [B, Q, H, D], k and v [B, S, G, D], H a multiple of G; causal is aligned to the bottom right, query i sees the keys up to
i + S - Q; window_size (left, right) lets it see those from i + S - Q - left to i + S - Q + right, -1 all; a query that sees nothing gets zeros. The other function
takes rows of unequal lengths, one behind the other, row b from cu_seqlens[b] to cu_seqlens[b + 1]. No function takes a mask."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.integrations import flash_attention

NAME = "flash_attention_2"


def attend(q, k, v, scale, causal, window, softcap, sinks, top_left: bool) -> torch.Tensor:
    """One row: q [Q, H, D], k and v [S, G, D] -> [Q, H, D]. top_left: another contract, the one of before flash-attn 2.1."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1).float() for part in (k, v))
    scores = torch.einsum("qhd,shd->hqs", q.float(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    last = torch.arange(len(q))[:, None] + (0 if top_left else len(k) - len(q))
    key, (left, right) = torch.arange(len(k)), window
    right = 0 if causal else right
    hidden = (key > last + right) & (right >= 0) | (key < last - left) & (left >= 0)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("hqs,shd->qhd", scores.softmax(-1).nan_to_num(0.0)[..., : len(k)], v).to(q.dtype)


class FlashAttention:
    """calls: (function, queries, keys) per call, lengths of rows for the one that takes unequal ones."""

    def __init__(self, top_left: bool = False):
        self.top_left, self.calls = top_left, []

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False, s_aux=None):
        assert q.ndim == 4 and len(q) == len(k) == len(v)
        self.calls.append(("equal", q.shape[1], k.shape[1]))
        return torch.stack([attend(*row, softmax_scale, causal, window_size, softcap, s_aux, self.top_left) for row in zip(q, k, v)])

    def flash_attn_varlen_func(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
                               window_size=(-1, -1), softcap=0.0, deterministic=False, s_aux=None):
        assert q.ndim == 3 and len(q) == cu_seqlens_q[-1] and len(k) == len(v) == cu_seqlens_k[-1]
        queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert max(queries) <= int(max_seqlen_q) and max(keys) <= int(max_seqlen_k)
        self.calls.append(("unequal", queries, keys))
        rows = zip(q.split(queries), k.split(keys), v.split(keys))
        return torch.cat([attend(*row, softmax_scale, causal, window_size, softcap, s_aux, self.top_left) for row in rows])


def install(monkeypatch, top_left: bool = False) -> FlashAttention:
    """Put the stand-in where transformers looks for flash-attn, and let models have it on a CPU."""
    functions, stock = FlashAttention(top_left), modeling_flash_attention_utils
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    package.__spec__, package.__path__ = ModuleSpec("flash_attn", None, is_package=True), []
    package.flash_attn_func, package.flash_attn_varlen_func, package.flash_attn_with_kvcache = functions.flash_attn_func, functions.flash_attn_varlen_func, None
    padding.pad_input, padding.unpad_input = stock._pad_input, stock._unpad_input
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(stock, "is_flash_attn_2_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda self, *args, **kwargs: True)
    if isinstance(table := getattr(stock, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None), dict):
        monkeypatch.setitem(table, 2, {**table[2], "general_availability_check": lambda *args, **kwargs: True})
    monkeypatch.setattr(flash_attention, "get_target_dtype", lambda query, module: None)  # float32 stays: these functions take it
    for name, module in list(sys.modules.items()):  # some import it only where a kernel is there, and were imported before
        if name.startswith("transformers.models.") and ".modeling_" in name and not hasattr(module, "_flash_attention_forward"):
            monkeypatch.setattr(module, "_flash_attention_forward", stock._flash_attention_forward, raising=False)
    for name in ("_loaded_implementation", "_flash_fn"):
        if hasattr(stock, name):
            monkeypatch.setattr(stock, name, None)
    return functions


def switched(model, name: str = NAME):
    """The model under flash attention, where its class names a kernel of its own that is not here."""
    for config in (model.config, model.config.get_text_config()):
        config._attn_implementation = name
    return model
