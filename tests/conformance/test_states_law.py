"""The law of the first tokens of targets whose layers carry states, or whose cache is of its own kind, against enumeration: alone, and in ragged batches."""

import pytest

from hf_specdec.caches import GOES_ON
from tests.architectures import FAMILIES, OWN_CACHES, STATEFUL
from tests.conformance import law
from tests.conformance.builders import VARIANTS, make
from tests.conformance.test_encoder_decoder_law import Dishonest
from tests.helpers import FULL, perturbed

N = 50_000 if FULL else 900
ALONE = 10_000 if FULL else 150
PROMPTS = [[1, 2, 3, 1, 2], [4], [2, 5, 1]]
CASES = [("Qwen3.5 (text)", "model", {}), ("Falcon-H1", "prompt_lookup", dict(temperature=0.7)), ("LFM2", "model", dict(top_k=4)), ("Bamba", "uniform", dict(top_p=0.8)),
         ("Mamba 2", "model", dict(repetition_penalty=1.3))]
OF_ONE_ROW = [("DeepSeek-V4", "model", dict(temperature=0.8)), ("Qwen4-Exp (text)", "prompt_lookup", dict(top_k=4)), ("MiniMax-M3 (text, sparse)", "uniform", {}),
              ("RWKV", "model", dict(temperature=1.2)), ("MiniMax", "prompt_lookup", dict(top_p=0.9)), ("OpenAI GPT", "model", {})]
OF_ROWS = [("Qwen4-Exp (text)", "prompt_lookup", dict(top_k=4)), ("OpenAI GPT", "uniform", {}), ("DeepSeek-V4", "prompt_lookup", dict(temperature=0.8))]
LEVEL = [[1, 2, 3, 1], [2, 5, 2, 5], [4, 4, 1, 2]]  # plain generate counts the padding of DeepSeek-V4 among its tokens
every_case = pytest.mark.parametrize(("name", "draft", "options"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
pytestmark = pytest.mark.skipif(not GOES_ON, reason="this transformers does not go on from a state over several tokens")


def target(name: str):
    family = next((family for family in (*STATEFUL, *OWN_CACHES) if family.name == name), None)
    if family is None or family in OWN_CACHES and name not in {own.name for own in FAMILIES}:
        pytest.skip(f"{name} needs a newer transformers")
    return type(family)(family.name, family.kind, {**family.settings, "vocab_size": law.VOCAB}, spread=0.2).model("eager", seed=2)


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize(("name", "draft", "options"), CASES + OF_ONE_ROW, ids=[f"{case[0]}-{case[1]}" for case in CASES + OF_ONE_ROW])
def test_the_first_tokens_follow_the_targets_own_law(name, draft, options):
    model = target(name)
    found, traces = law.counts(model, PROMPTS[:1], make(draft, model, VARIANTS), ALONE, 3, 3, chunk=1, max_new_tokens=6, **options)
    assert law.worst_p_value(found, [law.joint(model, PROMPTS[0], 3, **options)], 3) > law.THRESHOLD
    assert sum(trace.proposed for trace in traces) > ALONE / 2, "hardly anything was drafted, so hardly anything was shown"


@pytest.mark.share(3 / 5)
@pytest.mark.parametrize(("name", "draft", "options"), CASES + OF_ROWS, ids=[f"{case[0]}-{case[1]}" for case in CASES + OF_ROWS])
def test_the_first_tokens_of_every_row_of_a_batch_do(name, draft, options):
    model, rows = target(name), LEVEL if name == "DeepSeek-V4" else PROMPTS
    found, traces = law.counts(model, rows, make(draft, model, VARIANTS), N, 3, 3, chunk=300, max_new_tokens=6, **options)
    assert law.worst_p_value(found, [law.joint(model, row, 3, **options) for row in rows], 3) > law.THRESHOLD
    assert sum(trace.proposed for trace in traces) > (N if (name, draft, options) in CASES else N / 2), "hardly anything was drafted, so hardly anything was shown"


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("chunk", [1, 300], ids=["alone", "batch"])
def test_a_draft_that_lies_about_its_law_is_found_out(chunk):
    model, n = target("Qwen3.5 (text)"), (ALONE * 2 if FULL else 200) if chunk == 1 else N
    found, _ = law.counts(model, PROMPTS[: min(chunk, 3)], Dishonest(perturbed(model, 0.4)), n, 2, 3, chunk=chunk, max_new_tokens=3)
    assert law.worst_p_value(found, [law.joint(model, row, 2) for row in PROMPTS[: min(chunk, 3)]], 2) < law.THRESHOLD
