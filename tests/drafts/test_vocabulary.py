"""Logits and tokens of a model whose vocabulary is not the target's."""

import torch

from hf_specdec.drafts import ModelDraft
from hf_specdec.drafts.vocabulary import fitted, readable

from ..helpers import tiny_llama


def test_logits_are_cut_padded_or_put_where_their_tokens_are():
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    never = -torch.inf
    assert fitted(logits, 2).tolist() == [[1.0, 2.0]] and torch.equal(fitted(logits, 3), logits)
    assert fitted(logits, 5).tolist() == [[1.0, 2.0, 3.0, never, never]]
    assert fitted(logits, 5, torch.tensor([4, 0, 2])).tolist() == [[2.0, never, 3.0, never, 1.0]]
    assert fitted(logits[:, None], 4, torch.tensor([3, 1, 0])).shape == (1, 1, 4)


def test_tokens_that_a_model_lacks_are_replaced():
    rows = [[1, 7, 9], [0]]
    assert readable(rows, 8, 10) == [[1, 7, 7], [0]] and readable(rows, 10, 10) is rows


def test_under_stock_assisted_decoding_a_model_reads_tokens_that_it_lacks():
    model = tiny_llama(3)
    size = model.config.vocab_size
    lacked, _ = ModelDraft(model).get_candidates(torch.tensor([[5, size + 3, 7]]))
    last, _ = ModelDraft(model).get_candidates(torch.tensor([[5, size - 1, 7]]))
    assert lacked.shape == (1, 8) and torch.equal(lacked[:, 3:], last[:, 3:])
