"""The law of the first tokens against enumeration: every way of decoding, every kind of draft, K = 1..7 and auto, alone and ragged.

The default run takes the first cases, which have every option and draft, at a smaller n; with HF_SPECDEC_FULL=1 all of them run at n = 50,000 per prompt.
"""

import itertools

import pytest
import torch

from tests.conformance import law
from tests.conformance.builders import VARIANTS, make
from tests.helpers import FULL, small_vocabulary_llama

EOS = 5
N = 50_000 if FULL else 700
PER_PREFIX = 50_000 if FULL else 200  # processors that look at the prefix run once per node in Python
TOKENS = 4

# name -> options of generate; "slow" ones look at the prefix
PLAIN = {
    "temperature 1": {},
    "temperature 0.6": dict(temperature=0.6),
    "temperature 1.7": dict(temperature=1.7),
    "top-k 3": dict(top_k=3),
    "top-p 0.7": dict(top_p=0.7),
    "min-p 0.15": dict(min_p=0.15),
    "typical-p 0.7": dict(typical_p=0.7),
    "epsilon 0.1": dict(epsilon_cutoff=0.1),
    "all warpers": dict(temperature=0.8, top_k=5, top_p=0.95, min_p=0.02),
    "eos": dict(eos=EOS),
}
PREFIX = {
    "repetition penalty": dict(repetition_penalty=1.6),
    "no-repeat 2-gram": dict(no_repeat_ngram_size=2),
    "min_new_tokens": dict(min_new_tokens=3, eos=EOS),
    "bad words": dict(bad_words_ids=[[2, 3], [4]]),
    "penalty and warpers": dict(repetition_penalty=1.3, temperature=0.7, top_p=0.9),
    "forced ids": dict(prefix_allowed_tokens_fn=lambda row, ids: [0, 1, 3] if int(ids[-1]) % 2 else [2, 3, 4]),
}
OPTIONS = {**PLAIN, **PREFIX}
PROMPTS = {"alone": [[1, 2, 3, 1, 2]], "ragged": [[1, 2, 3, 1, 2], [4, 3], [5, 4, 5, 4, 5, 4, 5]]}


def cases():
    """Every option at least 4 times and every draft at least twice, with all K and both shapes going round."""
    drafts, ks, shapes = sorted(VARIANTS), itertools.cycle([4, 1, 7, 2, "auto", 5, 3, 6]), itertools.cycle(["alone", "ragged", "alone"])
    order = itertools.cycle(drafts)
    for turn in range(max(4, -(-2 * len(drafts) // len(OPTIONS)))):
        for option in OPTIONS:
            yield option, next(order), next(ks), next(shapes)
        if (turn + 1) * len(OPTIONS) % len(drafts) == 0:
            next(order)  # or an option would always meet the same drafts


ALL = list(dict.fromkeys(cases()))
DEFAULT = ALL[: max(len(OPTIONS), len(VARIANTS))]
CASES = ALL if FULL else DEFAULT


def test_the_full_table_has_60_configurations_and_the_default_one_every_option_and_draft():
    assert len(ALL) >= 60
    assert {case[0] for case in DEFAULT} == set(OPTIONS) and {case[1] for case in DEFAULT} == set(VARIANTS)
    assert {case[2] for case in ALL} == {1, 2, 3, 4, 5, 6, 7, "auto"}


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize(("option", "draft", "k", "shape"), CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_the_first_tokens_follow_the_targets_own_law(option, draft, k, shape, generous):
    target, rows, options = small_vocabulary_llama(2, law.VOCAB), PROMPTS[shape], OPTIONS[option]
    n = (PER_PREFIX if option in PREFIX else N) // (1 if FULL else len(rows))
    found, traces = law.counts(target, rows, make(draft, target, VARIANTS), n, TOKENS, k, **options)
    laws = [law.joint(target, row, TOKENS, **options) for row in rows]
    assert law.worst_p_value(found, laws, TOKENS) > law.THRESHOLD
    assert sum(trace.proposed for trace in traces) > n / 2, "hardly anything was drafted, so hardly anything was shown"


def test_the_law_holds_for_a_target_in_bfloat16():
    target = small_vocabulary_llama(2, law.VOCAB).to(torch.bfloat16)
    rows = PROMPTS["alone"]
    found, _ = law.counts(target, rows, make("model", target, VARIANTS), N // 5, 2, 4)
    assert law.worst_p_value(found, [bfloat16_joint(target, rows[0])], 2) > law.THRESHOLD


@torch.no_grad()
def bfloat16_joint(target, row):
    """The law of two tokens from forwards in bfloat16: the arithmetic is not exact there, the sampler still has to be."""
    first = target(input_ids=torch.tensor([row])).logits[0, -1].double().softmax(-1)
    prefixes = torch.tensor([[*row, token] for token in range(law.VOCAB)])
    second = target(input_ids=prefixes).logits[:, -1].double().softmax(-1)
    return {(a, b): float(first[a] * second[a, b]) for a in range(law.VOCAB) for b in range(law.VOCAB)}


@pytest.mark.parametrize("shape", PROMPTS)
def test_plain_generate_passes_the_same_test(shape):
    target, rows = small_vocabulary_llama(2, law.VOCAB), PROMPTS[shape]
    torch.manual_seed(0)
    for row in rows:
        ids = torch.tensor([row] * 4_000)
        out = target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=3, pad_token_id=0)
        found = law.Counter(map(tuple, out[:, len(row):].tolist()))
        assert law.p_value(found, law.joint(target, row, 3, top_k=0)) > law.THRESHOLD
