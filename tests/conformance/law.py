"""The law of the first tokens: counted from our `generate`, enumerated in float64 from plain forwards and stock processors."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from scipy.stats import chi2
from transformers import StoppingCriteria

from tests.helpers import generated, speculate

THRESHOLD = 1e-9
VOCAB = 6
PAD = 0


class Enough(StoppingCriteria):
    """Ends a row after `length` tokens, prompt included."""

    def __init__(self, lengths: set[tuple[int, ...]], n: int):
        self.prompts, self.n = lengths, n

    def __call__(self, input_ids, scores, **kwargs):
        row = input_ids[0].tolist()
        done = any(len(row) - len(prompt) >= self.n and tuple(row[: len(prompt)]) == prompt for prompt in self.prompts)
        return torch.tensor([done])


def stock_processors(model, row: list[int], **options) -> list:
    """The logits processors that transformers makes of `options` for this prompt."""
    kept = {}

    def capture(model, input_ids, logits_processor, **kwargs):
        kept["processors"] = list(logits_processor)
        return input_ids

    ids = torch.tensor([row])
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, pad_token_id=PAD, custom_generate=capture, **options)
    return kept["processors"]


@torch.no_grad()
def joint(model, row: list[int], tokens: int, eos: int | None = None, **options) -> dict[tuple[int, ...], float]:
    """Probability of every continuation by `tokens` tokens, in float64; texts that end with `eos` are padded."""
    exact, vocab = copy.deepcopy(model).double(), model.config.vocab_size
    if hasattr(exact, "set_experts_implementation"):  # torch multiplies groups in 16 and 32 bits alone
        exact.set_experts_implementation("eager")
    options = {"max_new_tokens": 12, **options, **({} if eos is None else {"eos_token_id": eos})}
    processors = stock_processors(model, row, **options)
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for step in range(tokens):
        ended = {text: p for text, p in laws.items() if eos is not None and eos in text}
        going = {text: p for text, p in laws.items() if text not in ended}
        laws = {(*text, PAD): p for text, p in ended.items()}
        ids = torch.tensor([[*row, *text] for text in going])
        logits = exact(input_ids=ids, use_cache=False).logits[:, -1]
        for i, (text, p) in enumerate(going.items()):
            scores = logits[i : i + 1]
            for processor in processors:
                scores = processor(ids[i : i + 1], scores)
            law = scores.softmax(-1)[0].tolist()
            laws.update({(*text, token): p * law[token] for token in range(vocab)})
    return laws


def counts(model, rows: list[list[int]], draft, n: int, tokens: int, k: int | str, seed: int = 0, eos: int | None = None, chunk: int = 4000,
           **options) -> tuple[list[Counter], list]:
    """For every prompt of `rows` how often each continuation came out of n rows, all prompts in the same batches; and the traces."""
    found, traces, per_call = [Counter() for _ in rows], [], max(chunk // len(rows), 1)
    prompts = {tuple(row) for row in rows}
    if eos is not None:
        options["eos_token_id"] = eos
    for start in range(0, n, per_call):
        size = min(per_call, n - start)
        batch = [row for row in rows for _ in range(size)]
        out = speculate(model, batch, draft, k, seed=seed, do_sample=True, stopping_criteria=[Enough(prompts, tokens)],
                        **{"max_new_tokens": 12, **options})
        seed += len(batch)
        traces.append(out.speculation)
        for i, text in enumerate(generated(out, batch)):
            found[i // size][tuple((text + [PAD] * tokens)[:tokens])] += 1
    return found, traces


def p_value(found: Counter, law: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the counts against the law, over cells of at least 5 expected and one for the rest; 0 for anything impossible."""
    n = sum(found.values())
    if any(law.get(text, 0.0) == 0.0 for text in found):
        return 0.0
    statistic, cells, rest_found, rest_expected = 0.0, 0, n, float(n)
    for text, p in law.items():
        if n * p >= 5:
            statistic += (found[text] - n * p) ** 2 / (n * p)
            cells, rest_found, rest_expected = cells + 1, rest_found - found[text], rest_expected - n * p
    if rest_expected >= 5:
        statistic, cells = statistic + (rest_found - rest_expected) ** 2 / rest_expected, cells + 1
    return float(chi2.sf(statistic, cells - 1)) if cells > 1 else 1.0


def marginal(table: dict[tuple[int, ...], float], tokens: int) -> Counter:
    """The same, of the first `tokens` tokens."""
    out = Counter()
    for text, weight in table.items():
        out[text[:tokens]] += weight
    return out


def worst_p_value(found: list[Counter], laws: list[dict], tokens: int) -> float:
    """The smallest p-value over the prompts, for the joint of the first 2, 3, ... tokens."""
    return min(p_value(marginal(seen, m), marginal(law, m)) for seen, law in zip(found, laws) for m in range(2, tokens + 1))
