"""The uniform draft on its own; the conformance tests run it inside the loop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from hf_specdec.drafts import Context, UniformDraft
from hf_specdec.noise import Noise

VOCAB = 11


def context(batch: int = 1, do_sample: bool = True, seed: int = 0) -> Context:
    noise = Noise([seed + b for b in range(batch)])
    return Context([[1, 2]] * batch, 100, VOCAB, torch.device("cpu"), SimpleNamespace(do_sample=do_sample), noise.uniform)


def test_tokens_follow_the_law_that_is_reported():
    proposal = UniformDraft().propose(context(2000), [10] * 2000)
    counts = torch.bincount(proposal.tokens.flatten(), minlength=VOCAB)
    assert chisquare(counts).pvalue > 1e-6
    assert torch.allclose(proposal.probs, torch.tensor(1 / VOCAB)) and proposal.probs.shape == (2000, 10, VOCAB)


def test_the_law_takes_no_memory_and_a_greedy_call_gets_none():
    sampled, greedy = UniformDraft().propose(context(), [4]), UniformDraft().propose(context(do_sample=False), [4])
    assert sampled.probs.untyped_storage().nbytes() == 4
    assert greedy.probs is None and torch.equal(greedy.tokens, sampled.tokens)


def test_each_row_gets_its_own_number_of_tokens():
    proposal = UniformDraft().propose(context(3), [2, 0, 5])
    assert proposal.sizes == [2, 0, 5]
    proposal.check(3, VOCAB, "uniform")
    assert len(UniformDraft().propose(context(3), [0, 0, 0]).tree) == 0


def test_a_row_draws_the_same_tokens_alone_as_in_a_batch():
    together, alone = UniformDraft().propose(context(2), [5, 5]), UniformDraft().propose(context(1, seed=1), [5])
    assert torch.equal(together.tokens[1], alone.tokens[0])


def test_it_serves_stock_assisted_decoding_once_it_knows_the_vocabulary():
    ids = torch.tensor([[1, 2, 3]])
    candidates, logits = UniformDraft(vocab_size=VOCAB).get_candidates(ids)
    assert torch.equal(candidates[:, :3], ids) and candidates.shape == (1, 8) and logits is None and int(candidates.max()) < VOCAB
    with pytest.raises(ValueError, match=r"UniformDraft\(vocab_size=\.\.\.\)"):
        UniformDraft().get_candidates(ids)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "11"])
def test_a_vocabulary_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match="^vocab_size="):
        UniformDraft(vocab_size=size)
