"""Top-p without sorting the vocabulary: transformers' own warper is what it is measured by, bit for bit."""

import numpy as np
import pytest
import torch
from transformers import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from hf_specdec.distributions import Sampler
from hf_specdec.nucleus import Nucleus, cut

V = 977


def scores(kind, seed, rows=2, nodes=5):
    torch.manual_seed(seed)
    drawn = torch.randn(rows, nodes, V) * 3
    match kind:
        case "16 bit":  # many tokens with the same score
            return drawn.bfloat16().float()
        case "whole numbers":
            return drawn.round()
        case "flat":
            return drawn * 1e-3
        case "all equal":
            return torch.zeros_like(drawn)
        case "peaked":
            return drawn * 20
        case "top-k before":
            return TopKLogitsWarper(20)(None, drawn.bfloat16().float().view(-1, V)).view(drawn.shape)
        case "one token left":
            return torch.full_like(drawn, -torch.inf).index_fill(-1, torch.tensor([seed]), 1.5)
        case "nothing left":
            return torch.full_like(drawn, -torch.inf)
        case "nan":
            return drawn.index_fill(-1, torch.tensor([3]), torch.nan)
        case "infinite":
            return drawn.index_fill(-1, torch.tensor([3]), torch.inf)
        case "large":
            return drawn + 1e4
    return drawn


KINDS = ["plain", "16 bit", "whole numbers", "flat", "all equal", "peaked", "top-k before", "one token left", "nothing left", "nan", "infinite", "large"]


def stock(warper, before):
    return warper(None, before.view(-1, before.shape[-1])).view(before.shape)


@pytest.mark.parametrize("least", [1, 4, V])
@pytest.mark.parametrize("top_p", [0.0, 0.01, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_warper_bit_for_bit(kind, top_p, least):
    warper = TopPLogitsWarper(top_p, min_tokens_to_keep=least)
    for seed in range(3):
        before = scores(kind, seed)
        torch.testing.assert_close(Nucleus(before, warper).scores, stock(warper, before), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.95])
@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_those_of_the_warpers_scores(kind, top_p):
    warper, before = TopPLogitsWarper(top_p), scores(kind, 7)
    law, meant = Nucleus(before, warper), stock(warper, before).softmax(-1)
    for node in range(before.shape[1]):
        at = torch.full((len(before),), node)
        torch.testing.assert_close(law.probs_at(at), meant[:, node], rtol=2e-6, atol=1e-9, equal_nan=True)
    for seed in range(40):
        tokens = torch.randint(V, before.shape[:2], generator=torch.Generator().manual_seed(seed))
        if seed % 2:
            tokens = before.nan_to_num(-1e9).topk(1 + seed).indices[..., -1]  # the likely ones, among them those at the edge
        expected = meant.gather(-1, tokens[..., None]).squeeze(-1)
        torch.testing.assert_close(Nucleus(before, warper).prob_of_next(tokens), expected, rtol=2e-6, atol=1e-9, equal_nan=True)
        torch.testing.assert_close(Nucleus(before, warper).prob_of_next(tokens[:, :2]), expected[:, :2], rtol=2e-6, atol=1e-9, equal_nan=True)
        nodes = torch.randint(before.shape[1], tokens.shape, generator=torch.Generator().manual_seed(seed))
        there = meant[torch.arange(len(nodes))[:, None], nodes, tokens]
        torch.testing.assert_close(Nucleus(before, warper).prob_of(tokens, nodes), there, rtol=2e-6, atol=1e-9, equal_nan=True)


class Counted(Nucleus):
    asked = 0

    def _warped(self, b, i):
        self.asked += (b, i) not in self.warped
        return super()._warped(b, i)


def test_the_warper_sorts_only_what_it_alone_decides():
    law = Counted(scores("plain", 1), TopPLogitsWarper(0.9))
    assert law.scores.isfinite().any() and law.asked == 0  # no two scores are equal
    before = torch.full((1, 3, 12), -9.0)
    before[0, :, :4] = torch.tensor([3.0, 2.0, 2.0, 2.0])
    warper = TopPLogitsWarper(0.75)  # 0.475 and 0.175 each: two of the three are left
    law = Counted(before, warper)
    assert law.prob_of_next(torch.tensor([[0, 7, 0]])).gt(0).tolist() == [[True, False, True]] and law.asked == 0
    left = law.prob_of_next(torch.tensor([[1, 1, 1]]))
    assert law.asked == 3
    torch.testing.assert_close(left, stock(warper, before).softmax(-1)[..., 1])


def test_where_rounding_decides_the_warper_does():
    assert cut(np.zeros(4, np.float32), 0.75, 1) is None  # sums of 1/4, 1/2, 3/4
    assert cut(np.zeros(4, np.float32), 0.7, 1) is not None
    even, warper = torch.zeros(1, 1, 4), TopPLogitsWarper(0.75)
    law = Counted(even, warper)
    assert torch.equal(law.scores, stock(warper, even)) and law.asked == 1


@pytest.mark.parametrize("kind", ["plain", "16 bit", "whole numbers", "all equal", "top-k before"])
def test_a_draft_takes_any_of_equal_tokens_and_its_law_is_one(kind):
    warper, before = TopPLogitsWarper(0.9), scores(kind, 3)
    law, meant = Nucleus(before, warper, free=True), stock(warper, before)
    assert torch.equal(law.scores.isfinite().sum(-1), meant.isfinite().sum(-1))  # as many as the warper leaves
    assert torch.equal(law.scores.sort(-1).values, meant.sort(-1).values)
    for node in range(before.shape[1]):
        q = law.probs_at(torch.full((len(before),), node))
        torch.testing.assert_close(q.sum(-1), torch.ones(len(before)))
        torch.testing.assert_close(q, law.scores[:, node].softmax(-1), rtol=2e-6, atol=1e-9)
        token = q.argmin(-1, keepdim=True)
        torch.testing.assert_close(law.prob_of(token, torch.full_like(token, node)), q.gather(-1, token), rtol=2e-6, atol=1e-9)


class Own(TopPLogitsWarper):
    pass


def test_only_transformers_own_top_p_in_float32_on_a_cpu():
    warper, before = TopPLogitsWarper(0.9), torch.zeros(1, 1, 5)
    assert Nucleus.fits(warper, before)
    assert not Nucleus.fits(Own(0.9), before) and not Nucleus.fits(TopPLogitsWarper(0.9, filter_value=-1e4), before)
    assert not Nucleus.fits(warper, before.double()) and not Nucleus.fits(warper, before.to("meta")) and not Nucleus.fits(TopKLogitsWarper(3), before)


@pytest.mark.parametrize("order", ["last", "first"])
def test_top_p_is_found_so_where_it_is_the_last_processor(order):
    processors = [TopKLogitsWarper(9), TopPLogitsWarper(0.8)]
    processors = processors if order == "last" else processors[::-1]
    before = scores("16 bit", 5)
    law = Sampler([processors, processors], do_sample=True)(before, [5, 5], None)
    assert isinstance(law, Nucleus) == (order == "last")
    assert torch.equal(law.scores, stock(processors[1], stock(processors[0], before)))
    assert not isinstance(Sampler([processors, processors], do_sample=False)(before, [5, 5], None), Nucleus)


@pytest.mark.parametrize("ends", [3, [3, 5], [5, 4000], [-1, 2]])
@pytest.mark.parametrize("make", [lambda ends: MinLengthLogitsProcessor(8, ends), lambda ends: MinNewTokensLengthLogitsProcessor(2, 6, ends)])
def test_least_lengths_are_those_of_transformers(make, ends):
    processor = make(ends)
    chain = list(range(10, 20))
    before = scores("plain", 2, rows=1, nodes=7)

    def prefix(_, node):
        return torch.tensor([chain[: 4 + node]])

    law = Sampler([[processor]], do_sample=False)(before, [7], prefix, range(6))
    meant = [processor(prefix(0, node), before[:, node]) for node in range(7)]
    assert torch.equal(law.scores, torch.stack(meant, dim=1))
    assert law.scores.isinf().any() and law.scores[:, -1].isfinite().all()
