"""What compression does to a model's predictions, measured on a text."""

from __future__ import annotations

import html
import math
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files

import torch
from rich.console import Console
from rich.progress import track
from torch.nn import functional as F

from ..hints import by_name, many, what

CHUNK = 128  # positions whose distributions are held in float32 at a time
WINDOW = 512


@dataclass(frozen=True)
class QualityReport:
    """p is the original's distribution of the next token, q the compressed model's; means over `tokens` predicted tokens.

    `kl` is KL(p || q) in nats. `top1_agreement` is the share of tokens for which both have the same most likely token.
    `overlap` is sum_x min(p(x), q(x)): the acceptance rate, when sampling, if the compressed model drafts for the original
    (Leviathan et al. 2023, Corollary 3.6). `loss_difference` is the compressed model's mean loss minus the original's, in nats.
    """

    tokens: int
    windows: int
    perplexity: float
    perplexity_compressed: float
    loss_difference: float
    kl: float
    top1_agreement: float
    overlap: float

    def to_dict(self) -> dict:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, for people."""
        return [
            ("perplexity, original", f"{self.perplexity:.4f}"),
            ("perplexity, compressed", f"{self.perplexity_compressed:.4f}"),
            ("loss difference, nats per token", f"{self.loss_difference:+.5f}"),
            ("KL(original || compressed), nats per token", f"{self.kl:.5f}"),
            ("same most likely token", f"{self.top1_agreement:.2%}"),
            ("overlap: acceptance if it drafts for the original", f"{self.overlap:.2%}"),
            ("tokens predicted", f"{self.tokens} in {many(self.windows, 'window')}"),
        ]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows())

    def _repr_html_(self) -> str:
        cells = (f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in self.rows())
        return f"<table>{''.join(cells)}</table>"


@by_name
def compare(
    model,
    compressed,
    tokenizer_or_ids,
    text: str | None = None,
    max_tokens: int | None = 4096,
    window: int | None = None,
    progress: bool = True,
) -> QualityReport:
    """Both models on the same text: `text` read by a tokenizer (the text shipped with the package without it), or token ids.

    The first `max_tokens` tokens (all with None) are cut into windows of `window` tokens (512 without it, or the models'
    context if that is shorter); each token but a window's first is predicted from those before it in the window. Numbers are
    computed in float32, a few positions at a time.

    Raises ValueError for a text or window that is too short or long, for token ids beside a text, for models whose
    vocabularies differ, for token ids that they do not have, for an encoder-decoder, and for a model that predicts NaN;
    TypeError for what is no model, tokenizer or token ids.
    """
    for name, owner in (("model", model), ("compressed", compressed)):
        if isinstance(owner, type) or not hasattr(owner, "get_input_embeddings"):
            raise TypeError(f"{name}: expected a transformers model, got {what(owner)}.")
        if getattr(owner.config, "is_encoder_decoder", False):
            raise ValueError(f"{name}: {type(owner).__name__} is an encoder-decoder, and tokens are predicted here from those before them alone: compare what both models write.")
    ids = _ids(tokenizer_or_ids, text)
    window = _window(window, model, compressed)
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 2):
        raise ValueError(f"max_tokens={max_tokens!r} must be an int, 2 or more, as one token is predicted from at least one before it; or None, for all.")
    ids = ids[:max_tokens]
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; at least 2 are needed.")
    vocabulary = min(owner.get_input_embeddings().weight.shape[0] for owner in (model, compressed))
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ValueError(f"the text has token ids from {int(ids.min())} to {int(ids.max())}; the model's go from 0 to {vocabulary - 1}. Use its own tokenizer.")
    parts = [part for part in ids.split(window) if len(part) > 1]
    console, sums = Console(stderr=True), torch.zeros(5, dtype=torch.float64)
    off = not (progress and console.is_terminal)
    with torch.inference_mode(), evaluating(model), evaluating(compressed):
        for part in track(parts, "Comparing", console=console, transient=True, disable=off):
            sums += _window_sums(_logits(model, part), _logits(compressed, part), part[1:])
    tokens = sum(len(part) - 1 for part in parts)
    loss, other, kl, agreement, overlap = (sums / tokens).tolist()
    if math.isnan(kl):
        raise ValueError(f"the {'original' if math.isnan(loss) else 'compressed'} model predicts NaN: run it in a wider dtype.")
    return QualityReport(
        tokens, len(parts), _exp(loss), _exp(other), other - loss, max(kl, 0.0), agreement, min(overlap, 1.0)
    )


def sample_text() -> str:
    """The text shipped with the package: English prose and code, written for it."""
    return files(__package__).joinpath("sample_text.txt").read_text(encoding="utf-8")


def _ids(source, text: str | None) -> torch.Tensor:
    if callable(source) and not isinstance(source, type):
        text = sample_text() if text is None else text
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, not {type(text).__name__}.")
        return torch.tensor(source(text, verbose=False)["input_ids"], dtype=torch.long)
    if isinstance(source, str):
        raise TypeError("tokenizer_or_ids: expected a tokenizer or token ids, got str; the text goes behind the tokenizer: compare(model, compressed, tokenizer, text).")
    if text is not None:
        raise ValueError("text is given, and token ids instead of a tokenizer, too: leave one of them out.")
    try:
        ids = torch.as_tensor(source)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"tokenizer_or_ids: expected a tokenizer or token ids, got {what(source)}.") from error
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"tokenizer_or_ids: token ids must be one row of integers, not {ids.dtype} {list(ids.shape)}.")
    return ids.long().cpu()


def _window(window: int | None, *models) -> int:
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None) for model in models]
    limit = min((limit for limit in limits if limit), default=None)
    if window is None:
        return min(WINDOW, limit or WINDOW)
    if not isinstance(window, int) or window < 2 or (limit and window > limit):
        raise ValueError(f"window={window!r} must be an int, at least 2, and fit the models' context of {limit or 'any number of'} tokens.")
    return window


def _logits(model, ids: torch.Tensor) -> torch.Tensor:
    """`[len(ids) - 1, vocabulary]` in the model's own dtype."""
    return model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, :-1]


def _window_sums(p_logits: torch.Tensor, q_logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sums over the positions: both losses, KL, equal argmax, overlap."""
    if p_logits.shape != q_logits.shape:
        raise ValueError(
            f"the models' vocabularies have {p_logits.shape[-1]} and {q_logits.shape[-1]} tokens: compare a model with its own "
            "compressed copy."
        )
    sums = torch.zeros(5, dtype=torch.float64)
    for start in range(0, len(labels), CHUNK):
        rows = slice(start, start + CHUNK)
        log_p = F.log_softmax(p_logits[rows].float(), -1)
        log_q = F.log_softmax(q_logits[rows].to(log_p.device).float(), -1)
        label = labels[rows, None].to(log_p.device)
        p, agree = log_p.exp(), log_p.argmax(-1) == log_q.argmax(-1)
        kl = torch.where(p > 0, p * (log_p - log_q), p)  # 0 log 0 = 0; NaN stays NaN
        parts = (
            -log_p.gather(1, label), -log_q.gather(1, label), kl.sum(-1, dtype=torch.float64), agree,
            torch.minimum(p, log_q.exp()).sum(-1),
        )  # fmt: skip
        sums += torch.stack([part.sum(dtype=torch.float64).cpu() for part in parts])
    return sums


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


@contextmanager
def evaluating(model):
    """Without dropout; what was training trains again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
