"""The law of the first tokens of targets whose layers carry states, against enumeration; alone, as such a target takes no batch."""

import pytest

from hf_specdec.caches import GOES_ON
from tests.architectures import STATEFUL
from tests.conformance import law
from tests.conformance.builders import VARIANTS, make
from tests.conformance.test_encoder_decoder_law import Dishonest
from tests.helpers import FULL, perturbed

N = 10_000 if FULL else 300
PROMPT = [1, 2, 3, 1, 2]
CASES = [("Qwen3.5 (text)", "model", {}), ("Falcon-H1", "prompt_lookup", dict(temperature=0.7)), ("LFM2", "model", dict(top_k=4)), ("Bamba", "uniform", dict(top_p=0.8))]
pytestmark = pytest.mark.skipif(not GOES_ON, reason="this transformers does not go on from a state over several tokens")


def target(name: str):
    family = next(family for family in STATEFUL if family.name == name)
    return type(family)(family.name, family.kind, {**family.settings, "vocab_size": law.VOCAB}, spread=0.2).model("eager", seed=2)


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize(("name", "draft", "options"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_the_first_tokens_follow_the_targets_own_law(name, draft, options):
    model = target(name)
    found, traces = law.counts(model, [PROMPT], make(draft, model, VARIANTS), N, 3, 3, chunk=1, max_new_tokens=6, **options)
    assert law.worst_p_value(found, [law.joint(model, PROMPT, 3, **options)], 3) > law.THRESHOLD
    assert sum(trace.proposed for trace in traces) > N / 2, "hardly anything was drafted, so hardly anything was shown"


def test_a_draft_that_lies_about_its_law_is_found_out():
    model = target("Qwen3.5 (text)")
    found, _ = law.counts(model, [PROMPT], Dishonest(perturbed(model, 0.4)), N, 2, 3, chunk=1, max_new_tokens=3)
    assert law.worst_p_value(found, [law.joint(model, PROMPT, 2)], 2) < law.THRESHOLD
