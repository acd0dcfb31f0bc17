"""The law of the first tokens of encoder-decoder targets: counted from our `generate`, enumerated in float64 from plain forwards."""

import copy
from collections import Counter

import pytest
import torch

from hf_specdec.drafts import ModelDraft, PromptLookupDraft, UniformDraft
from hf_specdec.proposal import Proposal
from tests.conformance.law import THRESHOLD, p_value
from tests.encoder_decoders import family, speculate
from tests.helpers import FULL, perturbed

VOCAB = 5
N = 20_000 if FULL else 200
SMALL = {"T5": dict(d_model=16, d_ff=16, num_layers=1, num_heads=2), "BART": dict(d_model=16, encoder_layers=1, decoder_layers=1)}
SOURCE = {"input_ids": torch.tensor([[3, 4, 3, 4, 2]])}
SEVERAL = {"input_ids": torch.tensor([[3, 4, 3, 4, 2], [2, 3, 0, 0, 0]]), "attention_mask": torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])}
ROWS = 50_000 if FULL else 1_500


def target(name: str):
    return family(name).model(seed=2, spread=0.25, vocab_size=VOCAB, **SMALL[name])


@torch.no_grad()
def joint(model, tokens: int, temperature: float, top_k: int, read: dict = SOURCE) -> dict[tuple[int, ...], float]:
    exact, start = copy.deepcopy(model).double(), model.config.decoder_start_token_id
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        longer = {}
        for text, p in laws.items():
            logits = exact(**read, decoder_input_ids=torch.tensor([[start, *text]])).logits[0, -1] / temperature
            kept = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
            longer.update({(*text, token): p * q for token, q in enumerate(kept.softmax(-1).tolist())})
        laws = longer
    return laws


def found(model, draft, n: int, tokens: int, temperature: float, top_k: int) -> tuple[Counter, int]:
    counts, proposed = Counter(), 0
    for seed in range(n):
        out = speculate(model, SOURCE, draft, 3, seed=seed, do_sample=True, temperature=temperature, top_k=top_k, max_new_tokens=3)
        counts[tuple(out.sequences[0, 1 : 1 + tokens].tolist())] += 1
        proposed += out.speculation.proposed
    return counts, proposed


CASES = [("T5", "model", 1.0, VOCAB), ("BART", "lookup", 0.7, 4), ("BART", "model", 1.3, 3), ("T5", "uniform", 1.0, VOCAB)]
DRAFTS = {"model": lambda target: ModelDraft(perturbed(target, 0.4)), "lookup": lambda target: PromptLookupDraft(), "uniform": lambda target: UniformDraft()}


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize(("name", "draft", "temperature", "top_k"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_the_first_tokens_follow_the_targets_own_law(name, draft, temperature, top_k):
    model = target(name)
    counts, proposed = found(model, DRAFTS[draft](model), N, 2, temperature, top_k)
    assert p_value(counts, joint(model, 2, temperature, top_k)) > THRESHOLD
    assert proposed > N / 2, "hardly anything was drafted, so hardly anything was shown"


class Dishonest(ModelDraft):
    """Proposes its argmax and says that it was drawn."""

    def propose(self, context, k):
        proposal = super().propose(context, k)
        return Proposal.chain(proposal.probs.argmax(-1), proposal.probs, proposal.sizes) if proposal.probs is not None else proposal


def test_a_draft_that_lies_about_its_law_is_found_out():
    model = target("T5")
    counts, _ = found(model, Dishonest(perturbed(model, 0.4)), N, 2, 1.0, VOCAB)
    assert p_value(counts, joint(model, 2, 1.0, VOCAB)) < THRESHOLD


def found_in_batches(model, draft, n: int, tokens: int, temperature: float, top_k: int) -> tuple[list[Counter], int]:
    """Of both sources of SEVERAL, by batches of several rows of each; a row ends at one of two tokens, so that the others go on without it."""
    counts, proposed, size = [Counter(), Counter()], 0, 250
    for seed in range(0, n, size):
        out = speculate(model, SEVERAL, draft, 3, seed=seed * 2, do_sample=True, temperature=temperature, top_k=top_k, max_new_tokens=4, num_return_sequences=size,
                        eos_token_id=1)
        for i, row in enumerate(out.sequences[:, 1:].tolist()):
            end = row.index(1) + 1 if 1 in row else len(row)
            counts[i // size][tuple((row[:end] + [0] * tokens)[:tokens])] += 1
        proposed += out.speculation.proposed
    return counts, proposed


def joint_of(model, row: int, tokens: int, temperature: float, top_k: int) -> dict[tuple[int, ...], float]:
    """As `joint`; what follows the token that ends a text is 0."""
    laws: dict[tuple[int, ...], float] = Counter()
    for text, p in joint(model, tokens, temperature, top_k, {name: part[row : row + 1] for name, part in SEVERAL.items()}).items():
        end = text.index(1) + 1 if 1 in text else tokens
        laws[text[:end] + (0,) * (tokens - end)] += p
    return laws


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize(("name", "draft", "temperature", "top_k"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_the_first_tokens_of_every_row_of_a_batch_do(name, draft, temperature, top_k):
    model = target(name)
    counts, proposed = found_in_batches(model, DRAFTS[draft](model), ROWS, 3, temperature, top_k)
    assert all(p_value(own, joint_of(model, row, 3, temperature, top_k)) > THRESHOLD for row, own in enumerate(counts))
    assert proposed > ROWS, "hardly anything was drafted, so hardly anything was shown"


def test_a_draft_that_lies_about_its_law_is_found_out_in_batches():
    model = target("BART")
    counts, _ = found_in_batches(model, Dishonest(perturbed(model, 0.4)), ROWS, 3, 1.0, VOCAB)
    assert all(p_value(own, joint_of(model, row, 3, 1.0, VOCAB)) < THRESHOLD for row, own in enumerate(counts))
