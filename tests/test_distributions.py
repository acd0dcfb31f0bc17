"""Drawing, random numbers, and processors on many positions at once."""

import pytest
import torch
from scipy.stats import chisquare, kstest
from transformers.generation import logits_process as lp

from hf_specdec import compat
from hf_specdec.distributions import ArgmaxLogitsWarper, LenientGreedyLogitsProcessor, Sampler
from hf_specdec.law import LONG, Law, draw, likeliest
from hf_specdec.noise import Noise

LARGEST = 1 - 2.0**-53


def uniforms(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- draw ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[0, 0, 1, 0], [0, 0.5, 0, 0.5, 0], [0, 1e-30, 0], [0, 3.0, 0, 2.0], [0.1] * 10 + [0]])
def test_what_has_no_weight_is_never_drawn_at_any_coin(weights):
    law = torch.tensor(weights, dtype=torch.float32)
    coins = torch.cat([uniforms(0.0, LARGEST, 2.0**-53), torch.linspace(0, LARGEST, 2001, dtype=torch.float64),
                       (law.double().cumsum(-1) / law.double().sum()).clamp(max=LARGEST)])
    drawn = draw(law.expand(len(coins), -1), coins)
    assert bool((law[drawn] > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_are_drawn_by_their_weight(dtype):
    weights = torch.tensor([0.5, 0.0, 3.0, 1.5, 2.0], dtype=dtype)
    n = 40_000
    drawn = draw(weights.expand(n, -1), Noise([7]).uniform("next", n)[0])
    kept = torch.tensor([0, 2, 3, 4])
    found = drawn.bincount(minlength=5)[kept].tolist()
    assert chisquare(found, [n * float(w) / 7 for w in weights[kept]]).pvalue > 1e-9


def test_a_small_weight_among_a_hundred_thousand_is_drawn_where_it_lies():
    law = torch.full((1, 100_000), 1e-5)
    assert [int(draw(law, uniforms(u))) for u in (0.0, 0.5, LARGEST)] == [0, 50_000, 99_999] or abs(int(draw(law, uniforms(0.5))) - 50_000) <= 1


@pytest.mark.parametrize("width", [5, LONG])
def test_of_no_rows_no_tokens_are_drawn(width):
    torch.testing.assert_close(draw(torch.zeros(0, width), uniforms()), torch.zeros(0, dtype=torch.long))


def test_a_point_mass_stays_itself():
    assert draw(torch.tensor([3, 1]), uniforms(0.2, 0.9)).tolist() == [3, 1]


# --- noise --------------------------------------------------------------------------------------------------------------------


def test_noise_is_uniform_and_below_1():
    numbers = Noise([5]).uniform("accept", 50_000)[0]
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert kstest(numbers.numpy(), "uniform").pvalue > 1e-6


def test_neighbouring_seeds_rounds_streams_and_places_are_uncorrelated():
    n = 20_000
    noise = Noise(list(range(100, 100 + n)))
    now, other = noise.uniform("accept", 2), noise.uniform("next", 1)
    noise.round += 1
    later = noise.uniform("accept", 1)
    pairs = [(now[:-1, 0], now[1:, 0]), (now[:, 0], now[:, 1]), (now[:, 0], other[:, 0]), (now[:, 0], later[:, 0])]
    for a, b in pairs:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / n**0.5


def test_a_rows_numbers_depend_on_its_seed_alone():
    together, alone = Noise([11, 5, 99]), Noise([5])
    for round in range(4):
        together.round = alone.round = round
        for stream in ("draft", "draft:3", "accept", "next"):
            assert torch.equal(together.uniform(stream, 6)[1:2], alone.uniform(stream, 6))
            assert torch.equal(together.uniform(stream, 3)[1], alone.uniform(stream, 6)[0, :3])


def test_rows_that_go_on_keep_their_numbers():
    noise, kept = Noise([1, 2, 3]), Noise([3, 1])
    noise.keep([2, 0])
    assert torch.equal(noise.uniform("accept", 4), kept.uniform("accept", 4))


def test_the_numbers_of_a_verdict_are_those_of_their_streams():
    """Whatever rounds they are made for at once, and whoever goes on."""
    noise, rows = Noise([3, 4, 5]), [0, 1, 2]
    for turn, n in enumerate([0, 3, 3, 30, 2, 31, 7, 0, *[9] * 30]):
        noise.round += 1 + turn % 3
        if turn in (5, 20):
            rows = [0, 2] if turn == 5 else [1]
            noise.keep(rows)
        coins = noise.coins(n)
        assert torch.equal(coins[:, 1:], noise.uniform("accept", n)) and torch.equal(coins[:, :1], noise.uniform("next", 1))


def test_no_number_of_a_long_call_comes_twice():
    noise, seen = Noise([1]), []
    for round in range(200):
        noise.round = round
        seen += [noise.uniform(stream, 64) for stream in ("draft", "accept", "next", *(f"draft:{i}" for i in range(1, 8)))]
    numbers = torch.cat(seen, dim=1).flatten()
    assert len(numbers.unique()) == len(numbers)


@pytest.mark.parametrize("seed", [0, 1, 2**62, 2**63 - 1])
def test_any_seed_in_range_works(seed):
    numbers = Noise([seed]).uniform("next", 1000)
    assert 0.4 < float(numbers.mean()) < 0.6


# --- the sampler ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_sampled_in_float32(dtype):
    law = Sampler([], do_sample=True)(torch.tensor([[[0.0, -17.0, -30.0]]], dtype=dtype), [1], None)
    assert law.scores.dtype == torch.float32 and bool((law.probs_at(torch.tensor([0])) > 0).all())


WARPERS = [
    lp.TemperatureLogitsWarper(0.7), lp.TopKLogitsWarper(3), lp.TopPLogitsWarper(0.8), lp.MinPLogitsWarper(0.1), lp.TypicalLogitsWarper(0.8),
    lp.EpsilonLogitsWarper(0.05), lp.EtaLogitsWarper(0.05), lp.InfNanRemoveLogitsProcessor(), lp.LogitNormalization(),
    lp.SuppressTokensLogitsProcessor([1, 4]),
]


@pytest.mark.parametrize("warper", WARPERS, ids=lambda warper: type(warper).__name__)
def test_a_processor_that_runs_on_all_nodes_at_once_gives_what_it_gives_one_by_one(warper):
    assert compat.is_prefix_free(warper)
    logits = 3 * torch.randn(4, 5, 9, generator=torch.Generator().manual_seed(0))
    together = Sampler([[warper]] * 4, do_sample=True)(logits.clone(), [5] * 4, None).scores
    alone = torch.stack([torch.cat([warper(None, logits[b, i : i + 1].clone()) for i in range(5)]) for b in range(4)])
    assert torch.equal(together, alone)


def test_a_subclass_of_a_warper_is_not_taken_for_the_warper():
    class Mine(lp.TemperatureLogitsWarper):
        pass

    assert not compat.is_prefix_free(Mine(0.5))


def test_the_argmax_warper_makes_greedy_decoding_a_one_hot_law():
    scores = torch.randn(6, 11, generator=torch.Generator().manual_seed(1))
    law = ArgmaxLogitsWarper()(None, scores).softmax(-1)
    assert torch.equal(law, torch.nn.functional.one_hot(scores.argmax(-1), 11).float())


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_the_lenient_processor_makes_x_the_argmax_where_it_is_likely_enough(lenience):
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    for x in range(4):
        best = LenientGreedyLogitsProcessor(torch.tensor(x), lenience)(None, p.log()).argmax(-1)
        assert int(best) == (x if p[x] >= lenience * 0.5 - 1e-6 else 0)


def test_a_law_of_logits_is_their_softmax():
    scores = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    law, tokens = Law(scores), torch.randint(7, (3, 3), generator=torch.Generator().manual_seed(3))
    p = scores.softmax(-1)
    assert torch.allclose(law.prob_of_next(tokens), p[:, :3].gather(-1, tokens[..., None])[..., 0])
    assert torch.allclose(law.probs_at(torch.tensor([3, 0, 2])), torch.stack([p[0, 3], p[1, 0], p[2, 2]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_likeliest_is_argmax_and_takes_the_first_of_equals(dtype):
    scores = torch.randn(3, 5, 400, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[0, 0, [7, 90, 311]] = 50.0
    scores[1, 2] = -torch.inf
    scores[2, 1, [4, 8]] = torch.nan
    if dtype == torch.float64:
        scores[2, 4, 3], scores[2, 4, 9] = 60.0, 60.0 + 1e-12  # equal in float32
    found = likeliest(scores)
    assert found.dtype == torch.int64 and torch.equal(found, scores.argmax(-1))
    assert found[0, 0] == 7 and found[1, 2] == 0 and found[2, 1] == 4 and likeliest(scores[0, 0]) == 7
    assert torch.equal(likeliest(scores.transpose(0, 1)[..., ::2]), scores.transpose(0, 1)[..., ::2].argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("special", [
    [1.0, 2.0, 2.0], [-3.0, -1.0, -1.0, -2.0], [0.0, -0.0], [-0.0, 0.0, -1.0], [-0.0, -5.0], [1.0, torch.inf, torch.inf], [1.0, -torch.inf], [-torch.inf] * 2,
    [1.0, torch.nan, 5.0, torch.nan], [1.0, -torch.nan, 5.0], [torch.inf, -torch.nan, torch.nan], [-1.0, torch.nan], [-torch.nan, torch.inf], [2.0**-24, 0.0],
])  # fmt: skip
def test_likeliest_is_argmax_for_numbers_of_every_kind(dtype, special):
    """16-bit numbers are compared as integers, which are in another order where they are negative, and to which a nan is a number."""
    sizes = torch.tensor(special).abs().to(dtype)
    row = torch.where(torch.tensor(special).signbit(), -sizes, sizes)
    for others in (torch.full((2, len(special)), -7.0), torch.full((2, len(special)), 3.0)):
        scores = torch.cat([row[None], others.to(dtype)])
        assert torch.equal(likeliest(scores), scores.argmax(-1)), special
        assert torch.equal(likeliest(row), row.argmax(-1))
        assert [Law(scores[None]).best(0, i) for i in range(3)] == scores.argmax(-1).tolist()  # one at a time


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_likeliest_is_argmax_of_any_bits(dtype):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**15), 2**15, (3000, 6), generator=generator).to(torch.int16)
    for scores in (bits.view(dtype), bits.abs().view(dtype), bits.view(dtype).nan_to_num(0.0)):
        assert all(likeliest(row) == row.argmax(-1) for row in scores)
        assert torch.equal(likeliest(scores), scores.argmax(-1))
