"""From logits to laws: what the target samples from at every drafted position, and how a token is drawn from it.

Glossary: p is the target's law, q the draft's, x a drafted token, V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import cache
from math import inf, isfinite

import torch
from transformers import (EpsilonLogitsWarper, LogitsProcessor, MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, MinPLogitsWarper,
                          PrefixConstrainedLogitsProcessor, SuppressTokensAtBeginLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper)

from . import compat
from .devices import has_float64
from .law import Law, draw, likeliest, wide
from .lazy_law import LazyLaw
from .noise import Gumbel
from .nucleus import Bisection
from .uploads import upload

Prefix = Callable[[int, int], torch.Tensor | None]
TRACEABLE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper, EpsilonLogitsWarper)
LEAST = {  # whether a text is too short to end
    MinLengthLogitsProcessor: lambda own, length: length < own.min_length,
    MinNewTokensLengthLogitsProcessor: lambda own, length: length - own.prompt_length_to_skip < own.min_new_tokens,
}
IDLE = {SuppressTokensAtBeginLogitsProcessor: lambda own, length: length != own.begin_index}  # whether it leaves a text of that length alone


class Sampler:
    """Turns the logits of several nodes into a `Law`, running transformers' logits processors on each node's own prefix.

    Processors that look at scores only (temperature, top-k, ...) run once on all nodes; those that look at the prefix run
    once per node, with the row's own tokens and no padding, and never on a text that the target cannot write: behind a token that ends
    it, or that a processor has ruled out.

    processors: one list of processors per row (the rows share one list where nothing depends on the row's padding).
    eos:        the tokens that end a text.
    do_sample:  whether tokens are drawn from the law; False where its argmax is taken, in greedy decoding and in coupled sampling.
    gumbel:     the noise of coupled sampling, else None.
    hidden:     per row, how many of its first tokens stand for embeddings, which processors do not see; () for none.
    device:     where processors run; None: where the logits are.
    """

    def __init__(self, processors: Sequence[Sequence[LogitsProcessor]], do_sample: bool, keep_scores: bool = False, gumbel: Gumbel | None = None,
                 eos: Collection[int] = (), hidden: Sequence[int] = (), device: torch.device | None = None):
        self.rows, self.eos, self.hidden, self.device = list(processors), frozenset(eos), list(hidden), device
        self.ends: dict[tuple[int, int], tuple[LogitsProcessor, torch.Tensor]] = {}
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
        self.hidden = [self.hidden[row] for row in rows] if self.hidden else []
        if self.gumbel is not None:
            self.gumbel.keep(rows)

    def text(self, b: int, row: list[int] | torch.Tensor, drafted: list[int], device) -> torch.Tensor | None:
        """int64 [1, L]: the tokens of row b, a list or int64 [1, n], and those drafted after them; None where one of these ends the text."""
        if self.eos.intersection(drafted):
            return None
        device = self.device or device
        begin = row if torch.is_tensor(row) else upload([row], device)
        begin = begin[:, self.hidden[b] :] if self.hidden else begin
        return torch.cat([begin, upload([drafted], device)], dim=1) if drafted else begin

    def leaves(self, b: int, text: torch.Tensor, vocab: int) -> torch.Tensor:
        """Bool [V]: which of the first `vocab` tokens the processors of row b that look at prefixes leave after this text."""
        scores = torch.zeros((1, vocab), device=text.device)
        for processor in self.rows[b]:
            if not compat.is_prefix_free(processor):
                scores = _one_row(processor, text, scores)[None]
        return scores[0] > -torch.inf

    def restricts(self, b: int) -> bool:
        """Whether a processor of row b may forbid nearly every token: one that is not transformers' own, or `prefix_allowed_tokens_fn`."""
        return self.needs_prefix and any(isinstance(own, PrefixConstrainedLogitsProcessor) or not type(own).__module__.startswith("transformers.")
                                         for own in self.rows[b] if not compat.is_prefix_free(own))

    def traceable(self, device: torch.device) -> "Drawing | None":
        """What draws, or takes the argmax, inside a compiled function; None where more than a few operations on scores decide."""
        processors = self.rows[0] if self.rows else ()
        if self.do_sample and not has_float64(device):
            return None
        if self.gumbel is not None or any(type(processor) not in TRACEABLE or not self.do_sample for processor in processors):
            return None
        return Drawing(processors, self.do_sample, device)

    def __call__(self, logits: torch.Tensor, sizes: Sequence[int], prefix: Prefix, parents: Sequence[int] = (), draft: bool = False) -> Law:
        """logits [B, n, V] -> Law. sizes[b]: how many nodes of row b count; prefix(b, i): what `text` makes of the tokens up to and
        including node i of row b; parents: of the nodes after the root, where they are all of one tree; draft: the logits are a draft's. Half
        precision goes to float32 as in transformers' own loops."""
        processors = self.rows[0] if self.rows else []
        lazy = self.do_sample and self.gumbel is None and logits.device.type == "cpu"
        count = len(processors) - (LazyLaw.takes(processors) if lazy else 0)
        if self.exact_scores and (count or not lazy):
            logits = wide(logits)
        if count:
            logits = self._processed(logits.to(self.device or logits.device), sizes, prefix, parents, count).to(logits.device)
        if lazy:
            return LazyLaw(logits, processors[count:], free=draft)
        return Law(logits, None if self.gumbel is None else self._noise(logits.shape[-1], sizes, prefix))

    def _noise(self, vocab: int, sizes: Sequence[int], prefix: Prefix) -> Callable[[int, int], torch.Tensor | float]:
        """noise(b, i): float32 [V], that of the token which follows node i of row b; 0 at nodes that do not count."""

        def noise(b: int, i: int) -> torch.Tensor | float:
            text = prefix(b, i) if i < sizes[b] else None
            return 0.0 if text is None else self.gumbel(b, text.shape[1], vocab)

        return noise

    def _processed(self, logits: torch.Tensor, sizes: Sequence[int], prefix: Prefix, parents: Sequence[int], count: int) -> torch.Tensor:
        """The logits after the first `count` processors."""
        batch, n, vocab = logits.shape
        raw, texts = logits, cache(prefix) if self.needs_prefix else None
        never: set[tuple[int, int]] = set()  # (row, node): no text of the target's
        for position, processor in enumerate(self.rows[0][:count] if count else ()):
            if compat.is_prefix_free(processor):
                logits = _all_nodes(processor, logits.reshape(batch * n, vocab)).view(batch, n, vocab)
            elif type(processor) in LEAST and len(parents) == n - 1:
                logits = self._not_yet(position, logits, _lengths(sizes, texts, parents))
            elif type(processor) in IDLE and len(parents) == n - 1 and self._idle(position, _lengths(sizes, texts, parents)):
                continue
            else:
                logits = logits.clone()
                for b in range(batch):
                    for i in range(sizes[b]):
                        text, above = texts(b, i), (b, parents[i - 1]) if i and parents else None
                        if text is None or above in never or above and logits[above][text[0, -1]] == -torch.inf:
                            never.add((b, i))
                        elif (b, i) not in never:
                            logits[b, i] = _one_row(self.rows[b][position], text, logits[b, i : i + 1])
        for b, i in sorted(never):  # a later processor may have let in again what one has ruled out, and greedy decoding takes a token where none is left
            text, above = texts(b, i), (b, parents[i - 1]) if i and parents else None
            if text is None or above is None or above in never:
                continue
            if logits[above][text[0, -1]] > -torch.inf or likeliest(logits[above]) == text[0, -1]:
                never.remove((b, i))
                logits[b, i] = self._alone(self.rows[b][:count], text, raw[b, i : i + 1])
        return logits

    def _idle(self, position: int, lengths: list[list[int]]) -> bool:
        """Whether a processor leaves all texts of these lengths alone."""
        return all(IDLE[type(row[position])](row[position], length) for row, own in zip(self.rows, lengths) for length in own)

    def _not_yet(self, position: int, logits: torch.Tensor, lengths: list[list[int]]) -> torch.Tensor:
        """What a least length makes of logits [B, n, V], by the number of tokens alone; texts that never are do not matter to it."""
        found = logits
        for b, nodes in enumerate(lengths):
            own = self.rows[b][position]
            short = [i for i, length in enumerate(nodes) if LEAST[type(own)](own, length)]
            if short:
                found = logits.clone() if found is logits else found
                found[b, upload(short, logits.device)[:, None], self._ends(own, logits)] = -inf
        return found

    def _ends(self, processor: LogitsProcessor, scores: torch.Tensor) -> torch.Tensor:
        """As the function below has it, found once: on a GPU, the host waits for how many they are."""
        key = id(processor), scores.shape[-1]
        if key not in self.ends:
            self.ends[key] = processor, _ends(processor, scores)
        return self.ends[key][1]

    @staticmethod
    def _alone(processors: Sequence[LogitsProcessor], text: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores [V] of one node's logits [1, V], for what follows `text` [1, L]."""
        scores = logits.clone()
        for processor in processors:
            scores = _all_nodes(processor, scores) if compat.is_prefix_free(processor) else _one_row(processor, text, scores)[None]
        return scores[0]


def _lengths(sizes: Sequence[int], texts: Prefix, parents: Sequence[int]) -> list[list[int]]:
    """Of every row, the lengths of the texts up to its nodes; [] for a row that has ended."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    first = [texts(b, 0) for b in range(len(sizes))]
    return [[] if text is None else [text.shape[1] + depth for depth in depths[:size]] for text, size in zip(first, sizes)]


def _all_nodes(processor: LogitsProcessor, scores: torch.Tensor) -> torch.Tensor:
    """Scores [m, V] of m nodes. Some of transformers' processors refuse what has no token left, which may be a node that nobody comes to: it stays as it is."""
    try:
        return processor(None, scores)
    except ValueError:
        alive = scores.amax(-1) > -torch.inf
        if alive.all():
            raise
        done = scores.clone()
        if alive.any():
            done[alive] = processor(None, scores[alive])
        return done


def _one_row(processor: LogitsProcessor, text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Scores [V] of `scores` [1, V], for what follows `text` [1, L]."""
    if type(processor) in LEAST:
        return scores[0].index_fill(0, _ends(processor, scores), -inf) if LEAST[type(processor)](processor, text.shape[1]) else scores[0]
    found = processor(text, scores)
    if found.shape != scores.shape:
        raise ValueError(f"logits_processor: {getattr(processor, 'name', type(processor).__name__)} was given one row, scores {list(scores.shape)}, and returned {list(found.shape)}. "
                         f"With speculative=True every row is processed alone; make it one that does not know the batch.")
    return found[0]


def _ends(processor: LogitsProcessor, scores: torch.Tensor) -> torch.Tensor:
    """int64 [m]: the ends of text of a least length that are in the vocabulary; transformers' own class looks for them in the whole of it."""
    ends = processor.eos_token_id
    return ends[(0 <= ends) & (ends < scores.shape[-1])].to(scores.device)


class Drawing:
    """A sampler inside a compiled function: fractions of its processors are numbers float64 [] on `device`, inputs of the function, so that one
    serves all temperatures; the rest of them is part of it, and so are the `settings`."""

    def __init__(self, processors: Sequence[LogitsProcessor], do_sample: bool, device: torch.device):
        quick = device.type == "cpu"  # a GPU sorts the vocabulary as quickly
        self.processors = tuple(Bisection(own.top_p) if quick and _plain_top_p(own) else copy(own) for own in processors)
        self.do_sample = do_sample
        for own in self.processors:
            fractions = {name: value for name, value in vars(own).items() if isinstance(value, float) and isfinite(value)}
            vars(own).update({name: upload(value, device, torch.float64) for name, value in fractions.items()})
        constants = [[item for item in sorted(vars(own).items()) if not torch.is_tensor(item[1])] for own in self.processors]
        self.settings = do_sample, *((type(own), *items) for own, items in zip(self.processors, constants))

    def __call__(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens int64 [B] from logits [B, V] and uniform float64 [B], and the law they were drawn from, [B, V]; greedy: None."""
        if not self.do_sample:
            return logits.argmax(-1), None
        scores = wide(logits)
        for processor in self.processors:
            scores = processor(None, scores)
        law = scores.softmax(-1)
        return draw(law, uniform), law


def _plain_top_p(processor: LogitsProcessor) -> bool:
    return isinstance(processor, TopPLogitsWarper) and processor.filter_value == -inf and processor.min_tokens_to_keep == 1


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
