"""Beams that are drawn (num_beams with do_sample=True): the very draws of plain generate at the same seed, and its law at others, whatever the draft."""

import random
from collections import Counter

import pytest
import torch
from scipy.stats import chi2_contingency

import hf_specdec
from hf_specdec.beam import ScoredBeams
from hf_specdec.drafts import ModelDraft, ModelTreeDraft
from tests.encoder_decoders import family, seeds, sources
from tests.generate.test_beams import DRAFTS, MODEL, NEAR, assert_equal, settings
from tests.helpers import enabled, padded, perturbed, prompts, repetitive, small_vocabulary_llama, tiny_llama


def both(rows, draft=None, k=4, model=MODEL, seed=0, inputs=None, **options):
    """Of either the output, and the number that torch's generator gives next."""
    options = {"max_new_tokens": 14, "do_sample": True, "pad_token_id": 0, "num_beams": 3, "return_dict_in_generate": True, "output_scores": True, **options}
    inputs, found = inputs or padded(rows), []
    for more in ({}, dict(speculative=True, assistant_model=draft, num_assistant_tokens=k)):
        torch.manual_seed(seed)
        found += [model.generate(**inputs, **options, **more), int(torch.randint(2**62, ()))]
    plain, next_plain, ours, next_ours = found
    assert next_plain == next_ours
    return plain, ours


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("rows", [repetitive(17), repetitive(16, 9, 4)], ids=["one row", "ragged"])
def test_every_draft_gives_the_draws_of_plain_generate(name, rows):
    for seed in range(4):
        assert_equal(*both(rows, DRAFTS[name](), 4, seed=seed))


def test_the_draws_are_of_chance():
    found = {tuple(both(repetitive(17), NEAR, seed=seed)[1].sequences[0].tolist()) for seed in range(6)}
    assert len(found) > 3


@pytest.mark.parametrize("seed", range(24))
def test_every_setting_is_obeyed(seed):
    rng = random.Random(100 + seed)
    rows, warpers = repetitive(*rng.choice(((12,), (7, 15), (3,))), seed=seed), rng.choice(({}, {"temperature": 0.7}, {"top_k": 40, "temperature": 1.5}, {"top_p": 0.99}))
    assert_equal(*both(rows, DRAFTS[rng.choice(list(DRAFTS))](), rng.choice((1, 3, 7, "auto")), seed=seed, **{"top_k": 0, **warpers, **settings(rng)}))


@pytest.mark.parametrize("line", ["T5", "BART"])
def test_encoder_decoders(line):
    model = hf_specdec.enable(family(line).model(seed=seeds(line, 1)[0]))
    inputs = sources(line.lower())
    for draft in (None, ModelDraft(perturbed(model, 0.03))):
        assert_equal(*both(None, draft, model=model, inputs=inputs, num_return_sequences=2))


def test_what_was_guessed_costs_no_pass():
    """A draft that proposes every token of a vocabulary of 7, two levels deep: three steps a pass."""
    model = enabled(small_vocabulary_llama())
    plain, ours = both(prompts(9, vocab=7), ModelTreeDraft(perturbed(model), (7, 7)), 2, model, max_new_tokens=12)
    assert_equal(plain, ours)
    trace = ours.speculation
    assert trace.block_efficiency == 3.0 and trace.target_calls <= 5 and trace.lossless and trace.config["acceptance"] == "speculative_sampling"


def drawn(model, seed: int, n: int = 3000, **more) -> Counter:
    """How often two beams are each pair of texts of three tokens, in `n` draws."""
    torch.manual_seed(seed)
    ids = torch.tensor(prompts(5, vocab=7) * n)
    texts = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=True, num_beams=2, num_return_sequences=2, pad_token_id=0, top_k=0,
                           temperature=1.2, **more)
    return Counter(tuple(pair) for pair in texts[:, 5:].reshape(n, 6).tolist())


def p_value(one: Counter, other: Counter) -> float:
    """Of two samples of the same size having one law; texts that are rare in both count as one."""
    often = [text for text in one | other if one[text] + other[text] >= 10]
    table = [[count[text] for text in often] + [count.total() - sum(count[text] for text in often)] for count in (one, other)]
    return chi2_contingency([[*column] for column in zip(*table) if sum(column)]).pvalue


@pytest.fixture(scope="module")
def small():
    return enabled(small_vocabulary_llama(vocab=7, spread=0.6))


@pytest.fixture(scope="module")
def reference(small) -> Counter:
    return drawn(small, seed=1)


@pytest.mark.parametrize("draft", [lambda model: None, lambda model: ModelDraft(perturbed(model, 0.3)), lambda model: ModelTreeDraft(model, (3, 2))],
                         ids=["lookup", "model", "tree"])
def test_the_law_is_that_of_plain_generate(small, reference, draft):
    assert p_value(drawn(small, seed=2, speculative=True, assistant_model=draft(small), num_assistant_tokens=2), reference) > 1e-3


def test_beams_that_are_scored_by_another_model_are_told_from_it(small, reference, monkeypatch):
    """The control: logits that are those of the target in the first steps only."""
    right = ScoredBeams.__call__
    monkeypatch.setattr(ScoredBeams, "__call__", lambda self, beams: right(self, beams) * (1.0 if len(beams[0]) < 7 else 1.25))
    assert p_value(drawn(small, seed=2, speculative=True, num_assistant_tokens=2), reference) < 1e-9


@pytest.mark.parametrize(("options", "words"), [
    (dict(speculative={"seed": 5}), "seed=5 with num_beams=3.*torch.manual_seed"),
    (dict(speculative={"seed": (5,)}), "seed=.5,. with num_beams=3.*or use num_beams=1"),
    (dict(speculative={"acceptance": "greedy"}), "num_beams=3.*'greedy'"),
    (dict(speculative={"lenience": 0.5}), "num_beams=3.*lenience=1.0"),
])
def test_what_draws_in_another_way_is_refused_by_name(options, words):
    options = {"num_beams": 3, "do_sample": True, "max_new_tokens": 4, **options}
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        MODEL.generate(**padded(prompts(6)), **options)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_name_of_the_rule_may_be_said():
    assert_equal(*both(repetitive(9)))
    torch.manual_seed(3)
    plain = MODEL.generate(**padded(repetitive(9)), num_beams=2, do_sample=True, max_new_tokens=5)
    torch.manual_seed(3)
    assert torch.equal(MODEL.generate(**padded(repetitive(9)), num_beams=2, do_sample=True, max_new_tokens=5, speculative={"acceptance": "speculative_sampling"}), plain)


def test_processes_that_share_a_model_are_refused(monkeypatch):
    monkeypatch.setattr("hf_specdec.call.agreement", lambda *_: lambda value: value)
    with pytest.raises(ValueError, match="num_beams=2 with do_sample=True: the processes.*num_beams=1"):
        enabled(tiny_llama()).generate(**padded(prompts(6)), num_beams=2, do_sample=True, max_new_tokens=4, speculative=True)
