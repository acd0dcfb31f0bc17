"""What comes back: sequences, scores, logits and the trace."""

import copy
import dataclasses
import json
import math

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdec import SpeculationTrace, SpeculativeConfig, SpeculativeOutput
from hf_specdec.drafts import ModelDraft, PromptLookupDraft, UniformDraft
from hf_specdec.sequences import Sequences
from tests.helpers import (
    KnowingTreeDraft, ScriptedDraft, TreeDraft, enabled, generated, padded, perturbed, plain, prompts, repetitive, speculate, tiny_llama,
)

ROWS = repetitive(13) + prompts(2, 7, seed=2)
MAX_NEW = 18


def drafts(target, **options):
    texts = plain(target, ROWS, max_new_tokens=MAX_NEW, **options)
    finished = [row + text for row, text in zip(ROWS, texts)]
    return {"scripted": ScriptedDraft.knowing(finished, wrong=4), "tree": KnowingTreeDraft(finished), "model": perturbed(target), "lookup": None}


every_draft = pytest.mark.parametrize("draft", ["scripted", "tree", "model", "lookup"])


def test_a_tensor_comes_back_unless_a_dict_is_asked_for():
    target = enabled(tiny_llama(1))
    out = target.generate(**padded(ROWS), speculative=True, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.is_tensor(out) and out.dtype == torch.int64 and out.shape == (3, 17)


def test_token_ids_come_back_as_int64_whatever_they_went_in_as():
    target, inputs = enabled(tiny_llama(1)), padded(ROWS)
    given = {**inputs, "input_ids": inputs["input_ids"].int(), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected, out = target.generate(**given), target.generate(**given, speculative=True)
    assert out.dtype == expected.dtype == torch.int64 and torch.equal(out, expected)


def test_the_dict_is_transformers_own_kind_and_carries_the_trace():
    out = speculate(tiny_llama(1), ROWS)
    assert isinstance(out, SpeculativeOutput) and isinstance(out, GenerateDecoderOnlyOutput)
    assert isinstance(out.speculation, SpeculationTrace)
    assert out.scores is None and out.logits is None and torch.equal(out["sequences"], out.sequences)


@pytest.mark.parametrize("beams", [1, 2])
def test_the_trace_is_there_by_key_too_and_the_keys_are_transformers_own(beams):
    target, options = enabled(tiny_llama(1)), dict(return_dict_in_generate=True, max_new_tokens=4, do_sample=False, pad_token_id=0, num_beams=beams)
    out, stock = target.generate(**padded(ROWS), speculative=True, **options), target.generate(**padded(ROWS), **options)
    assert out["speculation"] is out.speculation is not None and out["sequences"] is out.sequences is out[0]
    assert "speculation" not in out.keys() and out.keys() <= stock.keys() and copy.copy(out).speculation is out.speculation
    with pytest.raises(KeyError):
        out["speculations"]


def test_the_sequences_begin_with_the_prompt_as_it_was_passed():
    inputs = padded(ROWS, pad=5)
    out = enabled(tiny_llama(1)).generate(**inputs, speculative=True, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(out[:, :13], inputs["input_ids"])


# --- scores and logits ------------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("options", [{}, dict(repetition_penalty=1.5), dict(suppress_tokens=[1, 2, 3])], ids=str)
@every_draft
def test_scores_and_logits_are_plain_generates_at_every_committed_position(draft, options):
    target = tiny_llama(1)
    wanted = dict(output_scores=True, output_logits=True, max_new_tokens=MAX_NEW, do_sample=False, pad_token_id=0, **options)
    out = speculate(target, ROWS, drafts(target, **options)[draft], 5, **wanted)
    for b, row in enumerate(ROWS):
        stock = target.generate(**padded([row]), return_dict_in_generate=True, **wanted)
        for ours, theirs in ((out.scores, stock.scores), (out.logits, stock.logits)):
            assert len(ours) == len(theirs) == MAX_NEW
            assert all(torch.allclose(a[b], c[0], atol=1e-3, rtol=1e-4) for a, c in zip(ours, theirs))


def test_scores_alone_do_not_bring_logits_and_the_reverse():
    target = tiny_llama(1)
    assert speculate(target, ROWS, output_scores=True).logits is None
    assert speculate(target, ROWS, output_logits=True).scores is None


def test_scores_of_committed_tokens_keep_no_others_in_memory(monkeypatch):
    target, kept, append = tiny_llama(3), [], Sequences.append

    def watched(self, row, tokens, accepted, scores, raw):
        kept.extend([*scores, *raw])
        return append(self, row, tokens, accepted, scores, raw)

    monkeypatch.setattr(Sequences, "append", watched)
    speculate(target, ROWS, perturbed(target), 4, output_scores=True, output_logits=True)
    assert kept and all(own.untyped_storage().nbytes() == 4 * len(own) for own in kept)


def test_rows_that_have_ended_have_no_more_scores_of_their_own_and_the_others_go_on():
    target = tiny_llama(1)
    text = plain(target, ROWS)[0]
    out = speculate(target, ROWS, perturbed(target), 4, eos_token_id=text[3], output_scores=True)
    assert len(out.scores) == max(out.speculation.new_tokens) and all(step.shape == (3, 61) for step in out.scores)


@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_scores_of_sampled_text_are_the_warped_logits_of_the_committed_prefix(draft):
    target = tiny_llama(1)
    made = perturbed(target) if draft == "model" else None
    out = speculate(target, ROWS, made, 4, seed=2, do_sample=True, temperature=0.5, top_k=7, max_new_tokens=MAX_NEW, output_scores=True)
    for b, (row, text) in enumerate(zip(ROWS, generated(out, ROWS))):
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([row + text])).logits[0, len(row) - 1 : -1] / 0.5
        kept = logits >= logits.topk(7).values[:, -1:]
        ours = torch.stack([step[b] for step in out.scores])
        assert torch.equal(ours.isfinite(), kept) and torch.allclose(ours[kept], logits[kept], atol=1e-3)


def test_compute_transition_scores_works_on_the_output():
    target = enabled(tiny_llama(1))
    out = speculate(target, ROWS[:1], perturbed(target), 4, seed=2, do_sample=True, output_scores=True)
    scores = target.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert scores.shape == (1, 20) and bool((scores <= 0).all()) and bool(scores.isfinite().all())


# --- the trace --------------------------------------------------------------------------------------------------------------

CALLS = {
    "lookup": lambda target: (None, {}),
    "model": lambda target: (perturbed(target), {}),
    "model, sampled": lambda target: (perturbed(target), dict(do_sample=True)),
    "itself": lambda target: (ModelDraft(target), {}),
    "uniform": lambda target: (UniformDraft(), dict(do_sample=True)),
    "tree": lambda target: (KnowingTreeDraft([row + text for row, text in zip(ROWS, plain(target, ROWS))]), {}),
    "random tree": lambda target: (TreeDraft(), dict(do_sample=True)),
    "eos": lambda target: (perturbed(target), dict(eos_token_id=plain(target, ROWS)[0][4])),
}


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("k", [1, 5, "auto"])
@pytest.mark.parametrize("call", CALLS)
def test_the_trace_adds_up(call, k):
    target = tiny_llama(1)
    draft, options = CALLS[call](target)
    out = speculate(target, ROWS, draft, k, seed=3, **options)
    trace = out.speculation
    entries = [entry for entries in trace.rounds for entry in entries]
    for row in range(3):
        own = [entry for entry in entries if entry.row == row]
        assert sum(entry.committed for entry in own) == trace.new_tokens[row]
        assert sum(entry.accepted for entry in own) == int(trace.draft_mask[row].sum())
        assert all(entry.committed == entry.accepted + 1 for entry in own[:-1])
        assert own[-1].committed - own[-1].accepted in (0, 1)
    assert all(0 <= entry.accepted <= entry.proposed <= (k if k != "auto" else 16) for entry in entries)
    assert 0 <= trace.target_calls - len(trace.rounds) <= ("tree" in call)  # a tree comes after the prompt pass, a chain with it
    assert trace.proposed == sum(entry.proposed for entry in entries) and trace.accepted == sum(entry.accepted for entry in entries)
    assert trace.block_efficiency == pytest.approx(sum(trace.new_tokens) / len(entries))
    assert trace.draft_mask.shape == (3, max(trace.new_tokens)) and trace.draft_mask.dtype == torch.bool
    if trace.proposed:
        assert trace.acceptance_rate == pytest.approx(trace.accepted / trace.proposed)


@pytest.mark.parametrize("call", CALLS)
def test_the_trace_is_json_and_says_what_the_trace_says(call):
    target = tiny_llama(1)
    draft, options = CALLS[call](target)
    trace = speculate(target, ROWS, draft, 4, seed=3, **options).speculation
    read = json.loads(trace.to_json(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert read["new_tokens"] == trace.new_tokens and read["target_calls"] == trace.target_calls
    assert read["config"]["num_assistant_tokens"] == 4 and read["lossless"] is True
    assert len(read["rounds"]) == len(trace.rounds)


def test_a_call_without_a_single_proposal_has_no_acceptance_rate_and_is_json_all_the_same():
    trace = speculate(tiny_llama(1), prompts(1), PromptLookupDraft(min_match=8), 4, max_new_tokens=2).speculation
    assert trace.proposed == 0 and math.isnan(trace.acceptance_rate)
    json.loads(trace.to_json(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


@pytest.mark.parametrize("call", CALLS)
def test_the_trace_prints_as_one_line_of_what_it_counts(call):
    target = tiny_llama(1)
    draft, options = CALLS[call](target)
    trace = speculate(target, ROWS, draft, 4, seed=3, **options).speculation
    text = repr(trace)
    assert text == str(trace) and text.startswith(f"SpeculationTrace({sum(trace.new_tokens)} tokens of 3 rows in {trace.target_calls} passes, ")
    assert f", {trace.block_efficiency:.2f} tokens per forward, {trace.acceptance_rate:.0%} accepted, lossless)" in text
    assert trace == copy.deepcopy(trace) != dataclasses.replace(trace, target_calls=0)


def test_a_trace_of_one_row_of_a_lossy_call_and_of_nothing_prints_too():
    trace = speculate(tiny_llama(1), ROWS[:1], ModelDraft(tiny_llama(1)), 4, max_new_tokens=10, lenience=0.5).speculation
    assert repr(trace) == "SpeculationTrace(10 tokens in 2 passes, 5.00 tokens per forward, 100% accepted, not lossless)"
    assert repr(SpeculationTrace({})) == "SpeculationTrace(0 tokens in 0 passes, nothing drafted, lossless)"


@pytest.mark.parametrize("k", [1, 3, 20, 64])
def test_num_assistant_tokens_is_obeyed_and_echoed(k):
    target = tiny_llama(1)
    trace = speculate(target, ROWS[:1], ModelDraft(target), k, max_new_tokens=70).speculation
    assert trace.config["num_assistant_tokens"] == k
    assert [entries[0].proposed for entries in trace.rounds[:-1]] == [k] * (len(trace.rounds) - 1)


def test_a_draft_that_is_the_target_is_accepted_whole_and_never_runs_more_than_k_times_a_round():
    target = tiny_llama(1)
    trace = speculate(target, ROWS, ModelDraft(target), 4, max_new_tokens=50).speculation
    assert trace.acceptance_rate == 1.0 and len(trace.rounds) == 10 and trace.block_efficiency == 5.0
    assert trace.draft_calls <= 4 * len(trace.rounds) + 1


def test_a_sampling_draft_that_is_the_target_is_accepted_whole():
    target = tiny_llama(1)
    trace = speculate(target, ROWS, ModelDraft(target), 4, seed=1, do_sample=True, temperature=0.8, top_p=0.9, max_new_tokens=50).speculation
    assert trace.acceptance_rate > 0.999


@pytest.mark.parametrize("source", ["prompt_lookup", "uniform", "scripted"])
def test_every_round_names_its_source(source):
    draft = {"prompt_lookup": None, "uniform": UniformDraft(), "scripted": ScriptedDraft(lambda row: [])}[source]
    trace = speculate(tiny_llama(1), ROWS, draft, 3).speculation
    assert {entry.source for entries in trace.rounds for entry in entries} == {source}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("lenience", [1.0, 0.5])
def test_the_trace_says_whether_the_text_is_the_targets_own(lenience, do_sample):
    trace = speculate(tiny_llama(1), ROWS, lenience=lenience, do_sample=do_sample).speculation
    assert trace.lossless == (lenience == 1.0) and trace.config["lenience"] == lenience


def test_lenient_greedy_text_keeps_to_its_bound():
    target = tiny_llama(1)
    out = speculate(target, ROWS, perturbed(target), 4, lenience=0.3, max_new_tokens=40)
    strict = speculate(target, ROWS, perturbed(target), 4, max_new_tokens=40)
    for b, (row, text) in enumerate(zip(ROWS, generated(out, ROWS))):
        with torch.no_grad():
            p = target(input_ids=torch.tensor([row + text])).logits[0, len(row) - 1 : -1].softmax(-1)
        said = p.gather(1, torch.tensor(text)[:, None])[:, 0]
        drafted = out.speculation.draft_mask[b, : len(text)]
        assert bool((said >= 0.3 * p.max(-1).values - 1e-4).all())
        assert torch.equal(said[~drafted], p.max(-1).values[~drafted])
    assert out.speculation.acceptance_rate > strict.speculation.acceptance_rate


def test_the_settings_may_come_as_true_as_a_dict_as_a_config_or_beside_it():
    target = enabled(tiny_llama(1))
    options = dict(return_dict_in_generate=True, max_new_tokens=6, do_sample=False, pad_token_id=0)
    calls = [
        dict(speculative=True, num_assistant_tokens=3), dict(speculative={"num_assistant_tokens": 3}),
        dict(speculative=SpeculativeConfig(num_assistant_tokens=3)), dict(speculative=SpeculativeConfig(), num_assistant_tokens=3),
        dict(speculative=SpeculativeConfig(num_assistant_tokens=9), num_assistant_tokens=3),
        dict(speculative={"num_assistant_tokens": 3}, num_assistant_tokens=3),
    ]
    for call in calls:
        assert target.generate(**padded(ROWS), **call, **options).speculation.config["num_assistant_tokens"] == 3


@pytest.mark.parametrize("speculative", [True, {"num_assistant_tokens": 3}, SpeculativeConfig(num_assistant_tokens=3)], ids=["True", "dict", "config"])
def test_a_generation_config_that_is_passed_may_say_speculative(speculative):
    target, inputs = enabled(tiny_llama(1)), padded(ROWS)
    options = dict(return_dict_in_generate=True, max_new_tokens=6, do_sample=False, pad_token_id=0)
    config = GenerationConfig(speculative=speculative, num_assistant_tokens=3, **options)
    for out in (target.generate(**inputs, generation_config=config), target.generate(inputs["input_ids"], config, attention_mask=inputs["attention_mask"])):
        assert out.speculation.config["num_assistant_tokens"] == 3
    assert not hasattr(target.generate(**inputs, generation_config=config, speculative=False), "speculation")
    assert config.speculative == speculative and not hasattr(target.generation_config, "speculative")


@pytest.mark.parametrize("name", ["prompt_lookup", "uniform"])
def test_the_draft_may_be_named_in_the_config(name):
    trace = speculate(tiny_llama(1), ROWS, speculative={"draft": name}).speculation
    assert {entry.source for entries in trace.rounds for entry in entries} == {name} and trace.config["draft"] == name


@pytest.mark.parametrize(("make", "options", "name"), [
    (lambda target: perturbed(target), {}, "model"), (lambda target: perturbed(target), {"draft": "model_tree"}, "model_tree"),
    (lambda target: UniformDraft(), {}, "uniform"), (lambda target: UniformDraft(), SpeculativeConfig(draft="mixture"), "uniform"),
    (lambda target: ScriptedDraft(lambda row: [1]), SpeculativeConfig(draft="model", draft_source="nowhere"), "scripted"),
], ids=["model", "tree", "draft", "draft beside a name", "own draft beside a source"])
@pytest.mark.parametrize("beams", [1, 2])
def test_the_trace_names_the_draft_that_was_passed(make, options, name, beams):
    target = tiny_llama(1)
    if beams > 1 and name in ("uniform", "scripted"):
        pytest.skip("does not follow beams")
    trace = speculate(target, ROWS, make(target), speculative=options, max_new_tokens=4, num_beams=beams).speculation
    assert trace.config["draft"] == name and trace.config["draft_source"] is None and trace.config["acceptance"] == "greedy"
    assert name == "scripted" or SpeculativeConfig.from_dict(trace.config).draft == name


# --- what every round says of its tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_every_round_holds_the_ids_it_committed_and_those_it_rejected(call):
    target = tiny_llama(1)
    draft, options = CALLS[call](target)
    out = speculate(target, ROWS, draft, 4, seed=3, **options)
    for row, text in enumerate(generated(out, ROWS)):
        own = [entry for entries in out.speculation.rounds for entry in entries if entry.row == row]
        assert [token for entry in own for token in entry.tokens] == text
        assert all(entry.accepted + len(entry.rejected) == entry.proposed for entry in own[:-1])
        assert all(entry.p is None and entry.q is None for entry in own)
    assert len(out.speculation.round_seconds) == len(out.speculation.rounds)
    measured, prompt = map(sum, zip(*out.speculation.round_seconds)), sum(out.speculation.round_seconds[0])
    assert sum(measured) == pytest.approx(prompt + sum(out.speculation.seconds[name] for name in ("draft", "verify", "rest")))
    assert prompt == pytest.approx(out.speculation.seconds["prompt"])


@pytest.mark.parametrize("rule", ["greedy", "sampled"])
def test_rejected_ids_of_a_chain_are_what_the_script_said(rule):
    target = tiny_llama(1)
    text = plain(target, ROWS[:1])[0]
    script = ScriptedDraft.knowing([ROWS[0] + text], wrong=3)
    out = speculate(target, ROWS[:1], script, 4, seed=0, do_sample=rule == "sampled", temperature=1e-3 if rule == "sampled" else 1.0)
    for seen, (entry,) in zip(script.seen, out.speculation.rounds):
        start = len(seen[0])
        truth = (ROWS[0] + text)[start : start + entry.proposed]
        said = [(token + 1) % 61 if (start + i) % 3 == 0 else token for i, token in enumerate(truth)]
        assert entry.tokens[: entry.accepted] + entry.rejected == said
    assert any(entries[0].rejected for entries in out.speculation.rounds)


@pytest.mark.parametrize("call", ["model, sampled", "random tree", "model", "tree", "lookup"])
def test_recorded_probabilities_are_those_of_the_two_models(call):
    """p against a forward of the target over the text; q, for a chain, against a forward of the draft."""
    target = tiny_llama(1)
    draft, options = CALLS[call](target)
    options |= dict(temperature=0.7, top_k=20) if options.get("do_sample") else {}
    out = speculate(target, ROWS, draft, 4, speculative={"seed": 3, "record_probs": True}, **options)
    entries = [entry for entries in out.speculation.rounds for entry in entries]
    assert all(len(entry.p) == len(entry.q) == len(entry.tokens) + len(entry.rejected) for entry in entries)
    for row, (prompt, text) in enumerate(zip(ROWS, generated(out, ROWS))):
        own = [entry for entry in entries if entry.row == row]
        p = law(target, prompt + text, len(prompt), options)[range(len(text)), text]
        assert [value for entry in own for value in entry.p[: entry.committed]] == pytest.approx(p.tolist(), abs=1e-5)
        if call == "model, sampled":
            q = law(draft, prompt + text, len(prompt), options)[range(len(text)), text].tolist()
            flags = out.speculation.draft_mask[row].tolist()
            said = [value for entry in own for value in entry.q[: entry.committed]]
            assert [value for value, flag in zip(said, flags) if flag] == pytest.approx([value for value, flag in zip(q, flags) if flag], abs=1e-5)
            assert all(value is None for value, flag in zip(said, flags) if not flag)
    rejected = [q for entry in entries for q in entry.q[entry.committed :]]
    assert rejected and all((q is not None) == ("do_sample" in options) for q in rejected)
    json.loads(out.speculation.to_json(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def test_recorded_probabilities_of_the_first_rejected_token_are_at_its_own_place():
    target = tiny_llama(1)
    draft = perturbed(target, 0.3)
    out = speculate(target, ROWS[:1], draft, 4, do_sample=True, top_k=0, max_new_tokens=60,
                    speculative={"seed": 3, "record_probs": True})
    text, seen = list(ROWS[0]), 0
    for (entry,) in out.speculation.rounds:
        before = text + entry.tokens[: entry.accepted]
        text += entry.tokens
        if entry.rejected:
            p, q = (law(model, before + [0], len(before), {})[0, entry.rejected[0]].item() for model in (target, draft))
            assert (entry.p[entry.committed], entry.q[entry.committed]) == pytest.approx((p, q), abs=1e-5) and p < q
            seen += 1
    assert seen > 5


def law(model, tokens: list[int], start: int, options: dict) -> torch.Tensor:
    """Warped probabilities [n, V] of what stands at `start` and after it."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, start - 1 : -1] / options.get("temperature", 1.0)
    lowest = logits.topk(options.get("top_k", logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < lowest, -torch.inf).softmax(-1)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_record_probs_is_true_or_false(value):
    with pytest.raises(ValueError, match="record_probs"):
        SpeculativeConfig(record_probs=value)


# --- random numbers ---------------------------------------------------------------------------------------------------------


def test_a_seed_repeats_a_call_and_torchs_own_seed_does_too():
    target = tiny_llama(1)
    options = dict(do_sample=True, temperature=1.5)
    a, b, c = (generated(speculate(target, ROWS, seed=seed, **options), ROWS) for seed in (5, 5, 6))
    assert a == b != c
    torch.manual_seed(7)
    d = generated(speculate(target, ROWS, **options), ROWS)
    e = generated(speculate(target, ROWS, **options), ROWS)
    torch.manual_seed(7)
    assert d == generated(speculate(target, ROWS, **options), ROWS) != e


def test_a_seeded_call_leaves_torchs_generator_alone():
    target = tiny_llama(1)
    before = torch.get_rng_state()
    speculate(target, ROWS, TreeDraft(), seed=5, do_sample=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_greedy_call_leaves_torchs_generator_alone():
    target = tiny_llama(1)
    before = torch.get_rng_state()
    speculate(target, ROWS, perturbed(target))
    assert torch.equal(torch.get_rng_state(), before)


def test_k_auto_with_a_seed_repeats_itself_round_by_round():
    target = tiny_llama(1)
    first, second = (speculate(target, ROWS, perturbed(target), "auto", seed=3, do_sample=True, max_new_tokens=60) for _ in range(2))
    assert first.speculation.rounds == second.speculation.rounds and torch.equal(first.sequences, second.sequences)


@pytest.mark.parametrize("largest", [1, 5, 30])
def test_k_auto_never_exceeds_its_largest(largest):
    target = tiny_llama(1)
    speculative = {"max_auto_tokens": largest, "seed": 0}
    trace = speculate(target, ROWS[:1], ModelDraft(target), "auto", max_new_tokens=90, speculative=speculative).speculation
    proposed = {entry.proposed for entries in trace.rounds for entry in entries}
    assert max(proposed) <= largest


def test_k_auto_speculates_where_a_free_draft_is_right_and_stops_where_it_is_wrong():
    target, row = tiny_llama(1), prompts(9)
    (text,) = plain(target, row, max_new_tokens=150)
    right = ScriptedDraft.knowing([row[0] + text])
    wrong = ScriptedDraft(lambda tokens: [(token + 1) % 61 for token in right.script(tokens)])
    right.cost_ratio = wrong.cost_ratio = 0.05
    traces = [speculate(target, row, draft, "auto", seed=0, max_new_tokens=150).speculation for draft in (right, wrong)]
    assert traces[0].block_efficiency > 4
    plain_rounds = [entries[0].proposed == 0 for entries in traces[1].rounds]
    assert sum(plain_rounds) > 100 and traces[1].proposed < 100
