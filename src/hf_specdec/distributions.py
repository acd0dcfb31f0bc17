"""From logits to laws: what the target samples from at every drafted position, and how a token is drawn from it.

Glossary: p is the target's law, q the draft's, x a drafted token, V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import cached_property
from math import isfinite

import numpy as np
import torch
from transformers import (EpsilonLogitsWarper, LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper,
                          TypicalLogitsWarper)

from . import compat
from .noise import Gumbel

Prefix = Callable[[int, int], torch.Tensor | None]
TRACEABLE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper, EpsilonLogitsWarper)
INFINITE = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # the bits of infinity


class Law:
    """The target's laws at n nodes of B rows.

    scores: float [B, n, V], processed logits; p = softmax(scores) when sampling, the one-hot of the argmax when greedy
            (Leviathan et al. 2023, section 2.2: greedy decoding is sampling from a one-hot law).
    ranking: float [B, n, V], what the argmax is taken of: the scores, in coupled sampling with Gumbel noise added.
    """

    def __init__(self, scores: torch.Tensor, gumbel: torch.Tensor | None = None):
        self.scores = scores
        self.ranking = scores if gumbel is None else scores + gumbel

    @cached_property
    def argmax(self) -> torch.Tensor:
        """int64 [B, n]: the most likely token at every node; in coupled sampling, the token drawn."""
        return likeliest(self.ranking)

    @cached_property
    def log_norm(self) -> torch.Tensor:
        """float [B, n]: log of the sum of exp(scores)."""
        return self.scores.logsumexp(-1)

    def prob_of_next(self, tokens: torch.Tensor) -> torch.Tensor:
        """float [B, m]: p(tokens[b, j]) at node j, for the first m nodes (a chain: token j follows node j)."""
        m = tokens.shape[1]
        return (self.scores[:, :m].gather(-1, tokens[..., None]).squeeze(-1) - self.log_norm[:, :m]).exp()

    def prob_of(self, tokens: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        """float32 [B, m]: p(tokens[b, j]) at node nodes[b, j], both int64 [B, m]; the softmax in greedy decoding, too."""
        rows = torch.arange(len(nodes), device=nodes.device)[:, None]
        return (self.scores[rows, nodes, tokens].float() - self.scores.float().logsumexp(-1)[rows, nodes]).exp()

    def probs_at(self, node: torch.Tensor) -> torch.Tensor:
        """float [B, V]: the law at node[b] of row b (node int64 [B])."""
        rows = torch.arange(len(node), device=node.device)
        return self.scores[rows, node].softmax(-1)


def likeliest(scores: torch.Tensor) -> torch.Tensor:
    """int64 [...]: the first index of the largest of scores [..., V], as torch.argmax has it (the first nan, where there is one). On a CPU
    by NumPy: five times as fast as torch in 16 bit, mostly twenty times, ten times in 32."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    wide = scores.detach() if scores.requires_grad else scores
    if wide.dtype in INFINITE:
        found = _by_words(wide, INFINITE[wide.dtype])
        if found is not None:
            return torch.from_numpy(found)
        wide = wide.float()
    return torch.from_numpy(np.asarray(wide.numpy().argmax(-1)))


def _by_words(scores: torch.Tensor, infinite: int) -> np.ndarray | None:
    """`likeliest` of 16-bit numbers as integers, which are in the same order where they are positive; None where a largest one is not, or
    there is a nan."""
    words = scores.view(torch.int16).numpy()
    if not words.size or int(words.view(np.uint16).max()) > 0x8000 + infinite:
        return None
    rows = words.reshape(-1, words.shape[-1])
    found = rows.argmax(-1)
    good = all(0 < row[best] <= infinite for row, best in zip(rows, found.tolist()))
    return found.reshape(words.shape[:-1]) if good else None


def draw(law: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens int64 [B] from weights float [B, V] (need not sum to 1) by inverse CDF in float64; point masses int64 [B] stay.

    uniform: float64 [B] in [0, 1). A token of zero weight is never drawn.
    """
    if not law.is_floating_point():
        return law
    cdf = law.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).squeeze(-1).clamp(max=law.shape[-1] - 1)


class Sampler:
    """Turns the logits of several nodes into a `Law`, running transformers' logits processors on each node's own prefix.

    Processors that look at scores only (temperature, top-k, ...) run once on all nodes; those that look at the prefix run
    once per node, with the row's own tokens and no padding, and never on a text that the target cannot write: behind a token that ends
    it, or that a processor has ruled out.

    processors: one list of processors per row (the rows share one list where nothing depends on the row's padding).
    eos:        the tokens that end a text.
    do_sample:  whether tokens are drawn from the law; False where its argmax is taken, in greedy decoding and in coupled sampling.
    gumbel:     the noise of coupled sampling, else None.
    """

    def __init__(self, processors: Sequence[Sequence[LogitsProcessor]], do_sample: bool, keep_scores: bool = False, gumbel: Gumbel | None = None,
                 eos: Collection[int] = ()):
        self.rows, self.eos = list(processors), frozenset(eos)
        self.do_sample, self.gumbel = do_sample, gumbel
        self.needs_prefix = any(not compat.is_prefix_free(p) for p in self.rows[0]) if self.rows else False
        self.exact_scores = do_sample or keep_scores or gumbel is not None or bool(self.rows and self.rows[0])

    @classmethod
    def greedy(cls) -> "Sampler":
        """Plain argmax, no processors."""
        return cls([], do_sample=False)

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        if self.rows:
            self.rows = [self.rows[row] for row in rows]
        if self.gumbel is not None:
            self.gumbel.keep(rows)

    def text(self, row: list[int], drafted: list[int], device) -> torch.Tensor | None:
        """int64 [1, L]: a row's tokens and those drafted after them; None where one of these ends the text."""
        return None if self.eos.intersection(drafted) else torch.tensor([row + drafted], device=device)

    def leaves(self, b: int, text: torch.Tensor, token: int, vocab: int) -> bool:
        """Whether the processors of row b that look at prefixes leave `token` of 0 <= token < vocab after this text."""
        scores = torch.zeros((1, vocab), device=text.device)
        for processor in self.rows[b]:
            if not compat.is_prefix_free(processor):
                scores = _one_row(processor, text, scores)[None]
        return bool(scores[0, token] > -torch.inf)

    def traceable(self, device: torch.device) -> "Drawing | None":
        """What draws, or takes the argmax, inside a compiled function; None where more than a few operations on scores decide."""
        processors = self.rows[0] if self.rows else ()
        if self.gumbel is not None or any(type(processor) not in TRACEABLE or not self.do_sample for processor in processors):
            return None
        return Drawing(processors, self.do_sample, device)

    def __call__(self, logits: torch.Tensor, sizes: Sequence[int], prefix: Prefix, parents: Sequence[int] = ()) -> Law:
        """logits [B, n, V] -> Law. sizes[b]: how many nodes of row b count; prefix(b, i): what `text` makes of the tokens up to and
        including node i of row b; parents: of the nodes after the root, where they are all of one tree. Half precision goes to float32 as in
        transformers' own loops."""
        if self.exact_scores and logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if self.rows and self.rows[0]:
            logits = self._processed(logits, sizes, prefix, parents)
        return Law(logits, None if self.gumbel is None else self._noise(logits, sizes, prefix))

    def _noise(self, logits: torch.Tensor, sizes: Sequence[int], prefix: Prefix) -> torch.Tensor:
        """float32 [B, n, V]: the noise of the token that follows each node, 0 at nodes that do not count."""
        noise = torch.zeros_like(logits)
        for b, size in enumerate(sizes):
            for i in range(size):
                text = prefix(b, i)
                if text is not None:
                    noise[b, i] = self.gumbel(b, text.shape[1], logits.shape[-1])
        return noise

    def _processed(self, logits: torch.Tensor, sizes: Sequence[int], prefix: Prefix, parents: Sequence[int]) -> torch.Tensor:
        batch, n, vocab = logits.shape
        never: set[tuple[int, int]] = set()  # (row, node): no text of the target's
        for position, processor in enumerate(self.rows[0]):
            if compat.is_prefix_free(processor):
                logits = processor(None, logits.reshape(batch * n, vocab)).view(batch, n, vocab)
            else:
                logits = logits.clone()
                for b in range(batch):
                    for i in range(sizes[b]):
                        text, above = prefix(b, i), (b, parents[i - 1]) if i and parents else None
                        if text is None or above in never or above and logits[above][text[0, -1]] == -torch.inf:
                            never.add((b, i))
                        elif (b, i) not in never:
                            logits[b, i] = _one_row(self.rows[b][position], text, logits[b, i : i + 1])
        return logits


def _one_row(processor: LogitsProcessor, text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    found = processor(text, scores)
    if found.shape != scores.shape:
        raise ValueError(f"logits_processor: {type(processor).__name__} was given one row, scores {list(scores.shape)}, and returned {list(found.shape)}. "
                         f"With speculative=True every row is processed alone; make it one that does not know the batch.")
    return found[0]


class Drawing:
    """A sampler inside a compiled function: fractions of its processors are numbers float64 [] on `device`, inputs of the function, so that one
    serves all temperatures; the rest of them is part of it, and so are the `settings`."""

    def __init__(self, processors: Sequence[LogitsProcessor], do_sample: bool, device: torch.device):
        self.processors, self.do_sample = tuple(map(copy, processors)), do_sample
        for own in self.processors:
            fractions = {name: value for name, value in vars(own).items() if isinstance(value, float) and isfinite(value)}
            vars(own).update({name: torch.tensor(value, dtype=torch.float64, device=device) for name, value in fractions.items()})
        constants = [[item for item in sorted(vars(own).items()) if not torch.is_tensor(item[1])] for own in self.processors]
        self.settings = do_sample, *((type(own), *items) for own, items in zip(self.processors, constants))

    def __call__(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens int64 [B] from logits [B, V] and uniform float64 [B], and the law they were drawn from, [B, V]; greedy: None."""
        if not self.do_sample:
            return logits.argmax(-1), None
        scores = logits.float() if logits.dtype in INFINITE else logits
        for processor in self.processors:
            scores = processor(None, scores)
        law = scores.softmax(-1)
        return draw(law, uniform), law


class ArgmaxLogitsWarper(LogitsProcessor):
    """The one-hot law of the argmax: 0 there, minus infinity elsewhere (Leviathan et al. 2023, section 2.2)."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        best = scores.argmax(-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter_(-1, best, 0.0)


class LenientGreedyLogitsProcessor(LogitsProcessor):
    """The drafted token x counts as the argmax where p(x) >= lenience * max p (Leviathan et al. 2023, A.5, greedy case).

    drafted: int64 [...], the shape of `scores` without its last dimension.
    """

    def __init__(self, drafted: torch.Tensor, lenience: float):
        self.drafted, self.log_lenience = drafted[..., None], float(torch.tensor(lenience, dtype=torch.float64).log())

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        best = scores.max(-1, keepdim=True).values
        x = scores.gather(-1, self.drafted)
        return scores.scatter(-1, self.drafted, torch.where(x - best >= self.log_lenience, torch.inf, x))
