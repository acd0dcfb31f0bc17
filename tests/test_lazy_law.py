"""Laws that are found when they are asked for, without sorting the vocabulary: transformers' own warpers are what they are measured by, bit for bit."""

import numpy as np
import pytest
import torch
from transformers import (EpsilonLogitsWarper, LogitsProcessorList, MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper,
                          TopKLogitsWarper, TopPLogitsWarper)

from hf_specdec.acceptance.greedy import GreedyMatching
from hf_specdec.acceptance.sampling import SpeculativeSampling
from hf_specdec.distributions import Sampler
from hf_specdec.law import LONG, Law, draw
from hf_specdec.lazy_law import LazyLaw
from hf_specdec.nucleus import COLUMNS, DEPTH, HALVINGS, Bisection, cut, largest
from hf_specdec.proposal import Proposal

from .helpers import torch_defaults

V = 977


def scores(kind, seed, rows=2, nodes=5, width=V):
    torch.manual_seed(seed)
    drawn = torch.randn(rows, nodes, width) * 3
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
            return TopKLogitsWarper(20)(None, drawn.bfloat16().float().view(-1, width)).view(drawn.shape)
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


@pytest.mark.share(1)
@pytest.mark.parametrize("least", [1, 4, V])
@pytest.mark.parametrize("top_p", [0.0, 0.01, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_warper_bit_for_bit(kind, top_p, least):
    warper = TopPLogitsWarper(top_p, min_tokens_to_keep=least)
    for seed in range(3):
        before = scores(kind, seed)
        torch.testing.assert_close(LazyLaw(before, [warper]).scores, stock(warper, before), rtol=0, atol=0, equal_nan=True)


@pytest.mark.share(2)
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.95])
@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_those_of_the_warpers_scores(kind, top_p):
    warper, before = TopPLogitsWarper(top_p), scores(kind, 7)
    law, meant = LazyLaw(before, [warper]), stock(warper, before).softmax(-1)
    for node in range(before.shape[1]):
        at = torch.full((len(before),), node)
        torch.testing.assert_close(law.probs_at(at), meant[:, node], rtol=2e-6, atol=1e-9, equal_nan=True)
    for seed in range(40):
        tokens = torch.randint(V, before.shape[:2], generator=torch.Generator().manual_seed(seed))
        if seed % 2:
            tokens = before.nan_to_num(-1e9).topk(1 + seed).indices[..., -1]  # the likely ones, among them those at the edge
        expected = meant.gather(-1, tokens[..., None]).squeeze(-1)
        torch.testing.assert_close(LazyLaw(before, [warper]).prob_of_next(tokens), expected, rtol=2e-6, atol=1e-9, equal_nan=True)
        torch.testing.assert_close(LazyLaw(before, [warper]).prob_of_next(tokens[:, :2]), expected[:, :2], rtol=2e-6, atol=1e-9, equal_nan=True)
        nodes = torch.randint(before.shape[1], tokens.shape, generator=torch.Generator().manual_seed(seed))
        there = meant[torch.arange(len(nodes))[:, None], nodes, tokens]
        torch.testing.assert_close(LazyLaw(before, [warper]).prob_of(tokens, nodes), there, rtol=2e-6, atol=1e-9, equal_nan=True)


class Counted(LazyLaw):
    asked = 0

    def _warped(self, b, i):
        self.asked += (b, i) not in self.warped
        return super()._warped(b, i)


def test_the_warper_sorts_only_what_it_alone_decides():
    law = Counted(scores("plain", 1), [TopPLogitsWarper(0.9)])
    assert law.scores.isfinite().any() and law.asked == 0  # no two scores are equal
    before = torch.full((1, 3, 12), -9.0)
    before[0, :, :4] = torch.tensor([3.0, 2.0, 2.0, 2.0])
    warper = TopPLogitsWarper(0.75)  # 0.475 and 0.175 each: two of the three are left
    law = Counted(before, [warper])
    assert law.prob_of_next(torch.tensor([[0, 7, 0]])).gt(0).tolist() == [[True, False, True]] and law.asked == 0
    left = law.prob_of_next(torch.tensor([[1, 1, 1]]))
    assert law.asked == 3
    torch.testing.assert_close(left, stock(warper, before).softmax(-1)[..., 1])


def test_where_rounding_decides_the_warper_does():
    assert cut(np.zeros(4, np.float32), 0.75, 1) is None  # sums of 1/4, 1/2, 3/4
    assert cut(np.zeros(4, np.float32), 0.7, 1) is not None
    even, warper = torch.zeros(1, 1, 4), TopPLogitsWarper(0.75)
    law = Counted(even, [warper])
    assert torch.equal(law.scores, stock(warper, even)) and law.asked == 1


@pytest.mark.parametrize("kind", ["plain", "16 bit", "whole numbers", "all equal", "top-k before"])
def test_a_draft_takes_any_of_equal_tokens_and_its_law_is_one(kind):
    warper, before = TopPLogitsWarper(0.9), scores(kind, 3)
    law, meant = LazyLaw(before, [warper], free=True), stock(warper, before)
    assert torch.equal(law.scores.isfinite().sum(-1), meant.isfinite().sum(-1))  # as many as the warper leaves
    assert torch.equal(law.scores.sort(-1).values, meant.sort(-1).values)
    for node in range(before.shape[1]):
        q = law.probs_at(torch.full((len(before),), node))
        torch.testing.assert_close(q.sum(-1), torch.ones(len(before)))
        torch.testing.assert_close(q, law.scores[:, node].softmax(-1), rtol=2e-6, atol=1e-9)
        token = q.argmin(-1, keepdim=True)
        torch.testing.assert_close(law.prob_of(token, torch.full_like(token, node)), q.gather(-1, token), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("top_p", [0.0, 0.01, 0.3, 0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("kind", ["plain", "flat", "peaked", "top-k before", "one token left", "large", "16 bit", "whole numbers", "all equal"])
def test_halving_leaves_what_sorting_does_and_all_of_equal_tokens(kind, top_p):
    before = scores(kind, 3)[0]
    left, meant = Bisection(top_p)(None, before), TopPLogitsWarper(top_p)(None, before)
    assert torch.equal(left[left.isfinite()], before[left.isfinite()]) and (left.isfinite() | ~meant.isfinite()).all()
    lowest = before.masked_fill(~meant.isfinite(), torch.inf).amin(-1, keepdim=True)
    assert torch.equal(left.isfinite(), (before >= lowest - DEPTH / 2**HALVINGS - 1e-6) & left.isfinite())
    assert (left.isfinite() | (before < lowest)).all()  # those with the lowest score left, too


class Own(TopPLogitsWarper):
    pass


def test_which_processors_such_a_law_stands_for():
    temperature, top_k, top_p, least = TemperatureLogitsWarper(0.7), TopKLogitsWarper(3), TopPLogitsWarper(0.9), MinLengthLogitsProcessor(8, 3)
    for processors, count in [([], 0), ([temperature], 1), ([top_p], 1), ([temperature, top_k, top_p], 3), ([least, temperature, top_k], 2), ([temperature, top_p], 2),
                              ([top_p, top_k], 1), ([top_k, temperature], 1), ([top_k, top_k], 1), ([temperature, MinPLogitsWarper(0.1)], 2), ([MinPLogitsWarper(0.1), top_p], 1),
                              ([MinPLogitsWarper(0.1, filter_value=-9.0)], 0), ([EpsilonLogitsWarper(0.1)], 0), ([top_k, Own(0.9)], 0),
                              ([temperature, TopKLogitsWarper(3, filter_value=-1e4)], 0), ([TopPLogitsWarper(0.9, filter_value=-1e4)], 0)]:
        assert LazyLaw.takes(processors) == count, processors


ORDERS = {"none": [], "temperature": ["T"], "top-k": ["k"], "top-p": ["p"], "temperature, top-k": ["T", "k"], "all": ["T", "k", "p"], "top-p first": ["p", "k", "T"],
          "top-k last": ["T", "p", "k"], "min-p": ["m"], "temperature, min-p": ["T", "m"], "top-p, min-p": ["p", "m"], "with min-p": ["T", "k", "p", "m"], "low min-p": ["T", "p", "low"],
          "more than min-p": ["T", "least"]}
MAKE = {"T": lambda: TemperatureLogitsWarper(1.7), "k": lambda: TopKLogitsWarper(9), "p": lambda: TopPLogitsWarper(0.8), "m": lambda: MinPLogitsWarper(0.1),
        "low": lambda: MinPLogitsWarper(1e-4), "least": lambda: MinPLogitsWarper(0.3, min_tokens_to_keep=5)}


@pytest.mark.share(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_gives_the_laws_of_transformers_processors(kind, order, dtype):
    processors = [MAKE[name]() for name in ORDERS[order]]
    for width in (V, 5 * COLUMNS + 3):  # one that is too small for the short way to the largest, and one that has a rest
        before = scores(kind, 5, width=width).to(dtype)
        law = Sampler([processors, processors], do_sample=True)(before, [5, 5], None)
        wide = before.float() if dtype in (torch.float16, torch.bfloat16) else before
        meant = LogitsProcessorList(processors)(None, wide.view(-1, width)).view(before.shape)
        assert isinstance(law, LazyLaw) and not isinstance(Sampler([processors, processors], do_sample=False)(before, [5, 5], None), LazyLaw)
        torch.testing.assert_close(law.scores, meant, rtol=0, atol=0, equal_nan=True)
        fresh = Sampler([processors, processors], do_sample=True)(before, [5, 5], None)
        for node in range(5):
            at = torch.tensor([node, 4 - node])
            torch.testing.assert_close(fresh.probs_at(at), meant[[0, 1], at].softmax(-1), rtol=4e-6, atol=1e-9, equal_nan=True)
        tokens = wide.nan_to_num(-1e9).topk(12).indices[..., -3]
        torch.testing.assert_close(fresh.prob_of_next(tokens), meant.softmax(-1).gather(-1, tokens[..., None])[..., 0], rtol=4e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.3, 3.0, 50.0])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_division_rounds_to_the_same_score_is_left_by_top_k(kind, temperature):
    """Neighbouring floats become one score when they are divided, and top-k leaves all that have the k-th largest."""
    before = scores(kind, 11, width=8 * COLUMNS)
    before[..., : 4 * COLUMNS] = torch.nextafter(before[..., 4 * COLUMNS :], torch.tensor(-torch.inf))
    processors = [TemperatureLogitsWarper(temperature), TopKLogitsWarper(7)]
    law, meant = LazyLaw(before, processors), LogitsProcessorList(processors)(None, before.view(-1, before.shape[-1])).view(before.shape)
    probs = torch.stack([law.probs_at(torch.full((2,), node)) for node in range(5)], dim=1)
    assert torch.equal(probs.isnan(), meant.softmax(-1).isnan()) and torch.equal(probs > 0, meant.softmax(-1) > 0)


@pytest.mark.parametrize("temperature", [1e30, 3e39, float("inf")])
def test_what_a_division_makes_nothing_of_is_left_by_top_k_too(temperature):
    before, processors = scores("plain", 12, width=8 * COLUMNS), [TemperatureLogitsWarper(temperature), TopKLogitsWarper(7)]
    law, meant = LazyLaw(before, processors), LogitsProcessorList(processors)(None, before.view(-1, before.shape[-1])).view(before.shape)
    for node in range(5):
        torch.testing.assert_close(law.probs_at(torch.full((2,), node)), meant[:, node].softmax(-1), rtol=2e-6, atol=1e-9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("top_k", [50, 200])
def test_scores_masked_with_the_lowest_number_there_is_are_no_overflow(top_k):
    before = scores("plain", 13, width=8 * COLUMNS)
    before[..., 20:] = torch.finfo(torch.float32).min
    processors = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(top_k), TopPLogitsWarper(0.9)]
    law, meant = LazyLaw(before, processors), LogitsProcessorList(processors)(None, before.view(-1, before.shape[-1])).view(before.shape)
    torch.testing.assert_close(law.probs_at(torch.tensor([0, 4])), meant[[0, 1], [0, 4]].softmax(-1), rtol=4e-6, atol=1e-9)


@pytest.mark.parametrize("k", [1, 2, 50, 200])
def test_the_largest_are_found_by_their_columns(k):
    row = scores("16 bit", 3, width=40 * COLUMNS + 7)[0, 0].numpy()
    found = largest(row, k)
    assert set(np.flatnonzero(row >= np.sort(row)[-k])) <= set(found) and len(found) < 5 * k + 20 and (np.diff(found) > 0).all()
    assert largest(row[: 3 * COLUMNS], k) is None  # too few
    for at in (5, len(row) - 1):  # within the table and behind it
        broken = row.copy()
        broken[at] = np.nan
        assert largest(broken, k) is None
    assert largest(np.full_like(row, -np.inf), k) is None


class Scanned(LazyLaw):
    seen = 0

    def _found(self, row):
        self.seen += 1
        return super()._found(row)


@pytest.mark.parametrize("top_k", [0, 9])
def test_a_chain_is_judged_as_far_as_its_first_rejected_token(top_k):
    before = scores("plain", 4, rows=3, nodes=6)
    processors = [TopKLogitsWarper(top_k)] if top_k else []
    law, dense = Scanned(before, processors), Law(LogitsProcessorList(processors)(None, before.view(-1, V)).view(before.shape))
    tokens = dense.argmax[:, :5]
    tokens[0, 2] = before[0, 2].argmin()  # not accepted
    proposal, coins = Proposal.chain(tokens, sizes=[5, 0, 5]), torch.full((3, 5), 1e-3, dtype=torch.float64)
    found, meant = (SpeculativeSampling().verdict(proposal, each, coins) for each in (law, dense))
    assert found.on_path.tolist() == meant.on_path.tolist() == [[True] * 3 + [False] * 3, [True] + [False] * 5, [True] * 6]
    assert law.seen == 3 + 1 + 6
    torch.testing.assert_close(found.next_probs, meant.next_probs)


@pytest.mark.parametrize("order", ["none", "temperature, top-k", "all"])
def test_torchs_default_dtype_and_device_are_not_ours(order):
    before, coins = scores("16 bit", 8, width=6 * COLUMNS), torch.full((2, 4), 0.2, dtype=torch.float64)
    tokens, processors = before[:, :4].argmax(-1), [MAKE[name]() for name in ORDERS[order]]

    def results():
        law = Sampler([processors] * 2, do_sample=True)(before, [5, 5], None)
        found = SpeculativeSampling().verdict(Proposal.chain(tokens), law, coins)
        chosen = GreedyMatching().verdict(Proposal.chain(tokens), Law(before))
        wide = found.next_probs.repeat(1, 2)  # long enough to be drawn from block by block
        return found.on_path, found.next_probs, draw(wide, coins[:, 0]), law.prob_of_next(tokens), law.prob_of(tokens, tokens * 0), chosen.next_probs

    wanted = results()
    with torch_defaults(torch.bfloat16, "meta"):
        found = results()
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


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


@pytest.mark.parametrize("width", [LONG - 1, LONG + 1])
def test_a_compiled_function_draws_from_any_vocabulary(width):
    """Without a break of its graph, for which a draft model would not be compiled at all."""
    drawing = Sampler([[TemperatureLogitsWarper(1.7), TopPLogitsWarper(0.8)]], do_sample=True).traceable(torch.device("cpu"))
    uniform = torch.tensor([0.3, 0.9], dtype=torch.float64)
    tokens, law = torch.compile(lambda *given: drawing(*given), fullgraph=True, backend="eager")(scores("plain", 6, width=width)[:, 0], uniform)
    assert torch.equal(tokens, draw(law, uniform))


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("q", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["plain", "16 bit", "whole numbers", "all equal", "nothing left", "nan"])
def test_the_token_after_a_verdict_is_drawn_from_the_law_that_follows(kind, order, q, k):
    """Without that law over the vocabulary: of tokens with the same score as many have a coin as the warper leaves, and these are the ones."""
    before, warpers = scores(kind, 9, rows=1, nodes=4, width=60), [MAKE[name]() for name in ORDERS[order]]
    law, dense = LazyLaw(before, warpers[: LazyLaw.takes(warpers)]), Law(LogitsProcessorList(warpers[: LazyLaw.takes(warpers)])(None, before[0])[None])
    tokens = dense.scores[:, :3].nan_to_num(-1e9).topk(k or 1).indices[..., -1]
    laws = dense.scores[:, :3].softmax(-1).nan_to_num(0.0).roll(1, -1) if q else None
    proposal, coins = Proposal.chain(tokens, laws), torch.full((1, 3), 0.999, dtype=torch.float64)  # mostly rejected
    found, meant = (SpeculativeSampling().verdict(proposal, each, coins) for each in (law, dense))
    assert torch.equal(found.on_path, meant.on_path)
    uniform = torch.linspace(0, 1, 2001, dtype=torch.float64)[:-1]
    drawn = torch.tensor([int(found.token(u[None])) for u in uniform])
    torch.testing.assert_close(found.next_probs, meant.next_probs, rtol=4e-6, atol=1e-9, equal_nan=True)
    if kind in ("nothing left", "nan"):
        assert (drawn == -1).all()
    else:
        shares = drawn.bincount(minlength=60) / len(uniform)
        torch.testing.assert_close(shares, (meant.next_probs / meant.next_probs.sum())[0], rtol=0, atol=2 / len(uniform))


@pytest.mark.share(1)
@pytest.mark.parametrize("min_p", [1e-30, 1e-3, 0.05, 1.0])
@pytest.mark.parametrize("temperature", [0.1, 0.7, 50.0, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_min_p_leaves_what_its_warper_does_wherever_the_scores_lie(kind, temperature, min_p):
    before, processors = scores(kind, 14), [TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)]
    before[..., 100:110] = before[..., :1] + temperature * np.log(min_p)  # at the edge
    meant = LogitsProcessorList(processors)(None, before.view(-1, V)).view(before.shape)
    torch.testing.assert_close(LazyLaw(before, processors).scores, meant, rtol=0, atol=0, equal_nan=True)
