"""Coupled sampling: one seed, one text, whatever the draft; and the target's own law."""

import pytest
import torch
from scipy.stats import chisquare, kstest
from transformers import LogitsProcessor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

from hf_specdec.drafts import ModelDraft
from hf_specdec.noise import Gumbel
from tests.conformance import law
from tests.conformance.builders import VARIANTS, make
from tests.helpers import FULL, ScriptedDraft, generated, padded, perturbed, plain, repetitive, prompts, small_vocabulary_llama, speculate, tiny_llama

ROWS = repetitive(12) + prompts(5, seed=4)
SEEDS = [7, 2**62]


class WithNoise(LogitsProcessor):
    """Makes stock greedy decoding sample: the argmax of the scores with the noise of the place."""

    def __init__(self, seed: int):
        self.gumbel = Gumbel([seed])

    def __call__(self, input_ids, scores):
        return scores + self.gumbel(0, input_ids.shape[1], scores.shape[-1])


def by_stock_generate(target, seeds=SEEDS, **warpers) -> list[list[int]]:
    """Coupled sampling without any of our loop."""
    texts = []
    for row, seed in zip(ROWS, seeds):
        processors = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), WithNoise(seed)]
        texts += plain(target, [row], logits_processor=processors)
    return texts


def ours(target, draft, k, rows=ROWS, seeds=SEEDS, **options):
    return generated(speculate(target, rows, draft, k, seed=seeds, do_sample=True, acceptance="coupled", temperature=0.8, top_k=20, **options), rows)


@pytest.mark.share(1 / 4)
@pytest.mark.filterwarnings("ignore:assistant_model")
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_draft_and_k_gives_the_text_of_coupled_sampling_without_a_draft(name):
    target = tiny_llama(3)
    texts = by_stock_generate(target)
    assert texts != by_stock_generate(target, seeds=[8, 9])
    for k in (1, 4, 7, "auto") if FULL else (5,):
        assert ours(target, make(name, target, VARIANTS), k) == texts
    assert ours(target, make(name, target, VARIANTS), 4, ROWS[1:], SEEDS[1:]) == texts[1:]


def test_without_a_draft_it_is_the_same_text_too():
    target = tiny_llama(3)
    assert ours(target, ScriptedDraft(lambda row: []), 4) == by_stock_generate(target)


def test_processors_that_look_at_the_prefix_keep_the_text():
    target = tiny_llama(3)
    one, other = (ours(target, draft, k, repetition_penalty=1.4) for draft, k in ((ModelDraft(perturbed(target, 0.1)), 5), (None, 2)))
    assert one == other != by_stock_generate(target)


def test_the_target_as_its_own_draft_is_always_accepted():
    target = tiny_llama(3)
    out = speculate(target, ROWS, ModelDraft(target), 4, seed=1, do_sample=True, acceptance="coupled")
    assert out.speculation.acceptance_rate == 1.0 and out.speculation.lossless


def test_the_text_follows_the_targets_law():
    target, rows = small_vocabulary_llama(2, law.VOCAB), [[1, 2, 3, 1, 2], [4, 3]]
    found, traces = law.counts(target, rows, make("model", target), 50_000 if FULL else 1_000, 3, 3, acceptance="coupled", temperature=0.9)
    assert law.worst_p_value(found, [law.joint(target, row, 3, temperature=0.9) for row in rows], 3) > law.THRESHOLD
    assert all(trace.lossless for trace in traces)


def test_one_noise_for_all_places_is_rejected(monkeypatch):
    genuine = Gumbel.__call__
    monkeypatch.setattr(Gumbel, "__call__", lambda self, row, position, vocab: genuine(self, row, 0, vocab))
    target, row = small_vocabulary_llama(2, law.VOCAB), [1, 2, 3, 1, 2]
    found, _ = law.counts(target, [row], make("model", target), 6_000 if FULL else 2_000, 3, 3, acceptance="coupled")
    assert law.worst_p_value(found, [law.joint(target, row, 3)], 3) < law.THRESHOLD


def test_the_scores_that_come_back_are_without_noise():
    target = tiny_llama(3)
    out = speculate(target, ROWS[:1], None, 3, seed=1, do_sample=True, acceptance="coupled", top_k=0, output_scores=True, output_logits=True)
    assert all(torch.equal(score, logits.float()) for score, logits in zip(out.scores, out.logits))


def test_the_noise_is_gumbel_noise_and_depends_on_seed_place_and_token_alone():
    noise = Gumbel(list(range(40)))
    values = torch.stack([noise(row, position, 500) for row in range(40) for position in (0, 3)]).flatten()
    assert kstest(values.double().numpy(), "gumbel_r").pvalue > 1e-6 and bool(values.isfinite().all())
    again = Gumbel([9, 7])
    assert torch.equal(again(1, 3, 100), noise(7, 3, 500)[:100]) and torch.equal(again(1, 3, 500), noise(7, 3, 500))
    again.keep([1])
    assert torch.equal(again(0, 3, 500), noise(7, 3, 500)) and not torch.equal(again(0, 4, 500), noise(7, 3, 500))
    for position in range(100, 200):
        again(0, position, 500)
    assert len(again.known[0]) <= Gumbel.KEPT and torch.equal(again(0, 3, 500), noise(7, 3, 500))


def test_agreement_is_that_of_shared_exponential_races():
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.2, 0.2, 0.5, 0.1])
    noise = Gumbel(list(range(20_000)))
    gumbel = torch.stack([noise(row, 5, 4) for row in range(20_000)])
    agree = float(((p.log() + gumbel).argmax(-1) == (q.log() + gumbel).argmax(-1)).double().mean())
    expected = sum(1 / float(torch.maximum(p / p[x], q / q[x]).sum()) for x in range(3))
    distance = float((p - q).abs().sum()) / 2
    assert agree == pytest.approx(expected, abs=0.015) and (1 - distance) / (1 + distance) <= expected <= 1 - distance
    assert chisquare(torch.bincount((p.log() + gumbel).argmax(-1), minlength=4)[:3], 20_000 * p[:3]).pvalue > 1e-6


@pytest.mark.parametrize(("options", "message"), [
    (dict(do_sample=False), "acceptance='coupled' does not go with do_sample=False; use \"auto\", or do_sample=True"),
    (dict(do_sample=True, lenience=0.5), "lenience=0.5 means nothing"),
])
def test_what_it_does_not_go_with_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        speculate(tiny_llama(), ROWS, None, 3, acceptance="coupled", **options)


def test_left_padding_does_not_move_the_noise():
    target = tiny_llama(3)
    assert padded(ROWS)["attention_mask"][1, 0] == 0
    assert ours(target, None, 3)[1] == ours(target, None, 3, ROWS[1:], SEEDS[1:])[0]
