"""The metric, loaded by `evaluate` from its folder without a connection, says what the traces say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hf_specdec
from hf_specdec.theory import memory_bound_speedup

from ..helpers import VOCAB, perturbed, tiny_llama

FOLDER = Path(__file__).parents[2] / "metrics" / "speculation"


@pytest.fixture
def metric(monkeypatch, tmp_path):
    evaluate = pytest.importorskip("evaluate")
    monkeypatch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
    return evaluate.load(str(FOLDER), cache_dir=str(tmp_path))


def test_by_hand(metric):
    # two rounds of 4 (2 accepted, all accepted), then one round of 2 with none
    found = metric.compute(proposed=[[4, 4], [2]], accepted=[[2, 4], [0]], committed=[[3, 5], [1]], c=0.1)
    assert found["acceptance_rate"] == 6 / 10 and found["alpha"] == 6 / 8
    assert found["block_efficiency"] == 3 and found["rounds"] == 3 and found["new_tokens"] == 9
    assert found["mbsu"] == pytest.approx(3 / (0.1 * 10 / 3 + 1))


def test_it_agrees_with_the_traces_of_calls_of_one_row_and_of_several(metric):
    model = hf_specdec.enable(tiny_llama())
    draft = perturbed(model, 0.1)
    traces = []
    for batch in (1, 3):
        ids = torch.randint(VOCAB, (batch, 7), generator=torch.Generator().manual_seed(batch))
        out = model.generate(ids, max_new_tokens=12, assistant_model=draft, speculative=True, num_assistant_tokens=3, do_sample=False,
                             pad_token_id=0, return_dict_in_generate=True)
        traces.append(out.speculation)
        found = metric.compute(**metric.columns([out.speculation]))
        assert metric.columns([out]) == metric.columns([out.speculation]) == metric.columns(out) == metric.columns(out.speculation)
        assert found["acceptance_rate"] == out.speculation.acceptance_rate
        assert found["block_efficiency"] == found["mbsu"] == out.speculation.block_efficiency
    together = metric.compute(**metric.columns(traces), c=0.5)
    assert together["new_tokens"] == 4 * 12 and 0 < together["acceptance_rate"] < 1 and together["mbsu"] < together["block_efficiency"]


def test_a_text_that_ends_in_its_draft_has_rejected_nothing(metric):
    assert metric.compute(proposed=[[6]], accepted=[[2]], committed=[[2]])["alpha"] == 1
    model = hf_specdec.enable(tiny_llama())
    ids = torch.randint(VOCAB, (1, 7), generator=torch.Generator().manual_seed(1))
    end = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, -1].item()
    out = model.generate(ids, max_new_tokens=12, assistant_model=perturbed(model, 0), speculative=True, num_assistant_tokens=8, do_sample=False,
                         pad_token_id=0, eos_token_id=end, return_dict_in_generate=True)
    (last,) = out.speculation.rounds[-1]
    assert last.accepted == last.committed < last.proposed and metric.compute(**metric.columns([out]))["alpha"] == 1


def test_the_rounds_of_a_beam_search_are_counted(metric):
    model = hf_specdec.enable(tiny_llama())
    ids = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    out = model.generate(ids, max_new_tokens=8, num_beams=2, do_sample=False, pad_token_id=0, speculative=True, return_dict_in_generate=True)
    found = metric.compute(**metric.columns([out]))
    assert found["rounds"] == len(out.speculation.rounds) > 0 and found["block_efficiency"] == out.speculation.block_efficiency


def test_nothing_drafted_has_no_acceptance_rate(metric):
    found = metric.compute(proposed=[[0, 0]], accepted=[[0, 0]], committed=[[1, 1]])
    assert found["acceptance_rate"] is None and found["alpha"] is None and found["block_efficiency"] == found["mbsu"] == 1


def test_what_holds_no_trace_is_refused(metric):
    for given in ([torch.zeros(1)], [None], ["text"], None, 3):
        with pytest.raises(ValueError, match="^traces: expected SpeculationTraces"):
            metric.columns(given)


@pytest.mark.parametrize("proposed, accepted, committed", [([[2]], [[3]], [[3]]), ([[2]], [[1]], [[4]]), ([[2, 2]], [[1]], [[2]])])
def test_rounds_that_cannot_be_are_refused(metric, proposed, accepted, committed):
    with pytest.raises(ValueError, match="cannot be|for every round"):
        metric.compute(proposed=proposed, accepted=accepted, committed=committed)


def test_memory_bound_speedup_is_theorem_3_8_with_the_tokens_counted():
    from hf_specdec import theory

    assert memory_bound_speedup(theory.expected_tokens(0.7, 5), 5, 0.05) == theory.walltime_improvement(0.7, 5, 0.05)
    assert memory_bound_speedup(1.0, 0, 0.3) == 1
    with pytest.raises(ValueError, match="^k=-1 must be"):
        memory_bound_speedup(2.0, -1, 0.1)
    for wrong in (float("nan"), "x"):
        with pytest.raises(ValueError, match=f"^c={wrong!r} must be"):
            memory_bound_speedup(2.0, 1, wrong)
