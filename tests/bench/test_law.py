from collections import Counter

import pytest
import torch
from scipy import stats

from hf_specdec import enable
from hf_specdec.bench.law import SupportDraft, chi_square, enumerate_law, joint, sample

from .conftest import tiny_model

PROMPT = [5, 6, 7, 5, 6]


def test_chi_square_agrees_with_scipy():
    law = {(0,): 0.5, (1,): 0.3, (2,): 0.2}
    counts = Counter({(0,): 480, (1,): 330, (2,): 190})
    expected = stats.chisquare([480, 330, 190], [500, 300, 200])
    result = chi_square(counts, law)
    assert result.statistic == pytest.approx(expected.statistic)
    assert result.p == pytest.approx(expected.pvalue)


def test_small_cells_are_pooled_and_foreign_samples_are_impossible():
    law = {(0,): 0.9, (1,): 0.06, (2,): 0.02, (3,): 0.02}
    assert chi_square(Counter({(0,): 90, (1,): 6, (2,): 2, (3,): 2}), law).freedom == 2
    assert chi_square(Counter({(0,): 90, (9,): 10}), law).p == 0


def test_the_enumerated_law_is_the_models_own():
    model = tiny_model()
    laws = enumerate_law(model, PROMPT, 2, 3)
    law = joint(laws, 2)
    assert len(law) == 9 and sum(law.values()) == pytest.approx(1)
    first, second = next(iter(law))
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + [first]])).logits[0, -1].double()
    logits[model.generation_config.eos_token_id] = -torch.inf
    top = logits.topk(3)
    assert laws[(first,)][(second,)] == pytest.approx(
        float(top.values.softmax(-1)[top.indices.tolist().index(second)]), rel=1e-5
    )


def test_what_a_models_own_generation_config_asks_for_is_no_part_of_the_law():
    model = enable(tiny_model())
    model.generation_config.update(do_sample=True, temperature=0.3, min_p=0.9, typical_p=0.2, epsilon_cutoff=0.3, eta_cutoff=0.3, no_repeat_ngram_size=1, num_beams=2)
    laws = enumerate_law(model, PROMPT, 2, 3)
    counts, _, _ = sample(model, PROMPT, 600, 2, 3, 200, assistant_model=SupportDraft(laws, len(PROMPT)), speculative={"num_assistant_tokens": 2, "seed": 0})
    assert chi_square(counts, joint(laws, 2)).p > 1e-4


@pytest.mark.parametrize(("lying", "follows"), [(False, True), (True, False)])
def test_an_honest_draft_follows_the_law_and_a_lying_one_is_caught(lying, follows):
    torch.manual_seed(0)
    model = enable(tiny_model())
    laws = enumerate_law(model, PROMPT, 3, 3)
    counts, proposed, accepted = sample(
        model,
        PROMPT,
        2000,
        3,
        3,
        500,
        assistant_model=SupportDraft(laws, len(PROMPT), lying),
        speculative={"num_assistant_tokens": 3},
    )
    assert counts.total() == 2000 and proposed > 2000 and accepted > 0
    assert (chi_square(counts, joint(laws, 3)).p > 1e-6) == follows
