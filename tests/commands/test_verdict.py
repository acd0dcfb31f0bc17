"""What is said of why speculation pays or not, from figures and from traces that were made up."""

import pytest

from hf_specdec import SpeculationTrace
from hf_specdec.commands.verdict import copies, hint, verdict
from hf_specdec.trace import Round


def trace(*rounds: tuple[int, int], draft: str = "prompt_lookup") -> SpeculationTrace:
    """Rounds as (proposed, accepted)."""
    made = SpeculationTrace({"draft": draft}, rounds=[[Round(0, proposed, accepted, accepted + 1, draft)] for proposed, accepted in rounds])
    made.drafted = [[True] * sum(accepted + 1 for _, accepted in rounds)]
    return made


def counted(made: SpeculationTrace) -> dict:
    """The figures of it that `verdict` looks at, as a report has them, beside the speed-up."""
    rounds = sum(map(len, made.rounds))
    return {"acceptance_rate": made.acceptance_rate if made.proposed else None, "block_efficiency": made.block_efficiency, "mean_k": made.proposed / rounds}


NEW, COPIED = list(range(100, 140)), list(range(40))  # nothing to copy, all of the prompt


MEASURED = {"acceptance_rate": 0.9, "block_efficiency": 2.5, "speed_up": 1.8, "mean_k": 4.0}


@pytest.mark.parametrize(("measured", "lookup", "shipped", "words"), [
    ({}, True, True, "answered by copying much of it, which is where prompt lookup pays"),
    ({}, True, False, ""),
    ({}, False, True, ""),
    ({"block_efficiency": 1.2, "acceptance_rate": 0.1, "speed_up": 0.9}, True, True, "did not pay here: 10% of the drafted tokens were accepted; the answer copies little"),
    ({"block_efficiency": 1.2, "acceptance_rate": 0.1, "speed_up": 1.1}, False, False, "brought little here: 10% of the drafted tokens were accepted; the draft is seldom right"),
    ({"block_efficiency": 1.1, "mean_k": 0.1, "speed_up": 1.0}, True, True, "did not pay here: what was drafted was mostly right, but it was little, 0.1 tokens a round"),
    ({"block_efficiency": 1.0, "acceptance_rate": None, "speed_up": 0.9}, True, False, "did not pay here: nothing was drafted, because the answer repeats nothing"),
    ({"speed_up": 0.8}, True, True, "did not pay here, although a target forward brought 2.5 tokens"),
])
def test_only_what_was_measured_is_said(measured, lookup, shipped, words):
    said = verdict(MEASURED | measured, lookup, shipped)
    assert words in said and bool(said) is bool(words) and ("copying much" in said) is ("copying much" in words)


def said(made: SpeculationTrace, speed_up: float = 0.95, **more) -> str:
    return verdict(counted(made) | {"speed_up": speed_up}, **{"lookup": False, "shipped": False, **more})


def test_where_auto_drafted_little_that_is_the_cause_and_not_the_acceptance():
    timid = trace((1, 0), (0, 0), (0, 0), (1, 1), (0, 0), (0, 0), (1, 0), (0, 0))
    told = said(timid, auto=True)
    assert "K auto drafted little, 0.4 tokens a round, 33% of which were accepted" in told and "busy" in told and "--k 5" in told and "seldom right" not in told
    assert "K auto drafted nothing, because" in said(trace((0, 0), (0, 0)), auto=True)
    assert "the draft is seldom right" in said(timid, auto=False) and "nothing was drafted." in said(trace((0, 0)))


def test_where_auto_drafted_and_was_wrong_the_acceptance_is_the_cause():
    assert "10% of the drafted tokens were accepted; the draft is seldom right" in said(trace((5, 1), (5, 0), (0, 0)), auto=True)


def test_lookup_had_nothing_to_copy_or_auto_let_it_lie():
    timid, inside = trace((1, 0), (0, 0), (1, 1), (0, 0), (0, 0)), copies(COPIED, COPIED)
    assert inside > 5 and copies(COPIED, NEW) == 1.0 and copies(COPIED, [1]) == 1.0
    told = said(timid, lookup=True, auto=True, copied=inside)
    assert "K auto drafted little" in told and f"would bring {inside:.1f} tokens a forward" in told
    assert "the answer copies little" in said(trace((3, 0), (0, 0)), lookup=True, auto=True, copied=1.0)
    assert "the answer repeats nothing" in said(trace((0, 0)), lookup=True, auto=True, copied=1.0)


def test_a_draft_is_named_where_lookup_had_nothing_to_copy_and_nowhere_else():
    wrong = trace(*[(1, 0)] * 40)
    assert hint(wrong, COPIED, NEW, []).endswith("try --draft mixture; whether that pays is the machine's to say.")
    assert "try --draft mixture, a or b;" in hint(wrong, COPIED, NEW, ["a", "b"])
    assert hint(trace(*[(0, 0)] * 40), COPIED, NEW, [])
    others = [(trace(*[(1, 0)] * 40, draft="mixture"), COPIED, NEW), (wrong, COPIED, COPIED), (trace(*[(4, 3)] * 10), COPIED, NEW), (wrong, COPIED, NEW[:5])]
    assert not [hint(*other, []) for other in others if hint(*other, [])]
