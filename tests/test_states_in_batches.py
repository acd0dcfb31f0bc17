"""Rows of a batch whose layers carry states: every row stands where its own text does, whatever the others accept."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_specdec.bench.meter import measured
from hf_specdec.cached_model import CachedModel
from hf_specdec.bench.simulated import SimulatedTable
from hf_specdec.caches import GOES_ON
from hf_specdec.compat import traits_of
from hf_specdec.drafts import CascadeDraft, ModelDraft, NGramRecyclingDraft, PromptLookupDraft
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.medusa import MedusaDraft
from hf_specdec.probe import obeys_masks
from hf_specdec.proposal import Proposal
from hf_specdec.training import build_drafter
from tests.architectures import STATEFUL
from tests.conformance.builders import medusa_heads
from tests.helpers import ScriptedDraft, enabled, generated, padded, perturbed, plain, prompts, speculate, tiny_llama
from tests.test_states import CONVOLUTIONS, CPU, HERE, KINDS, RECURRENT, UNKNOWN, every_kind, model_of, needs_unknown, refused

pytestmark = pytest.mark.skipif(not GOES_ON, reason="this transformers does not go on from a state over several tokens")
ROWS = prompts(12, 1, 20, 12, seed=5)


def tried(kind: str, seed: int = 0):
    """A model that has been asked whether it takes a batch: its first call would do so by passes of its own."""
    model = model_of(kind, seed)
    assert obeys_masks(model, traits_of(model, "target"))
    return model


def texts(model, rows, **options):
    """What plain generate makes of every row alone."""
    return [plain(model, [row], **options)[0] for row in rows]


@pytest.mark.share(2)
@every_kind
@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_whatever_each_row_drafts_keeps_and_forgets_its_logits_are_those_of_its_whole_text(kind, seed):
    """Odd orders of score, extend, crop, feed and keep, another for every row; every logit is compared with that of a pass without a cache."""
    model, rng = model_of(kind), random.Random(seed)
    cached, rows = CachedModel(model, 300), prompts(7, 1, 23, 7, seed=seed)

    def whole(tokens):
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    for turn in range(14):
        drafted = [[rng.randrange(1, 60) for _ in range(rng.choice([0, 0, 1, 3, 6]))] for _ in rows]
        logits = cached.score(rows, Proposal.from_lists(drafted, CPU))
        for own, row, more in zip(logits, rows, drafted):
            torch.testing.assert_close(own[: len(more) + 1], whole(row + more)[len(row) - 1 :], atol=2e-3, rtol=0)
        kept = [rng.randint(0, len(more)) for more in drafted]
        cached.commit([1 + n for n in kept])
        rows = [row + more[:n] for row, more, n in zip(rows, drafted, kept)]
        assert all(length <= len(row) for length, row in zip(cached.lengths, rows))
        if rng.random() < 0.4 and [len(row) for row in rows] == cached.lengths:  # as a draft does: one token a time, of which some rows want fewer
            wanted = [rng.randint(0, 3) for _ in rows]
            for i, token in enumerate((5, 6, 7)):
                step = cached.extend(torch.full((len(rows), 1), token), [int(i < n) for n in wanted])
                for b, n in enumerate(wanted):
                    if i < n:
                        torch.testing.assert_close(step[b, 0], whole(rows[b] + [5, 6, 7][: i + 1])[-1], atol=2e-3, rtol=0)
            rows = [row + [5, 6, 7][: rng.randint(0, n)] for row, n in zip(rows, wanted)]
            cached.crop([len(row) - rng.randint(0, 1) for row in rows])
        if turn == 8:
            cached.keep([3, 1, 2])
            rows = [rows[3], rows[1], rows[2]]
        rows = [[*row, rng.randrange(1, 60)] for row in rows]


@pytest.mark.share(2)
@every_kind
@pytest.mark.parametrize("k", [1, 4, "auto"])
def test_every_row_gets_the_text_that_it_gets_alone(kind, k):
    model, expected = model_of(kind), texts(model_of(kind), ROWS, max_new_tokens=30)
    for draft in (perturbed(model, 0.02), PromptLookupDraft(), CascadeDraft(perturbed(model, 0.02), PromptLookupDraft())):
        assert generated(speculate(model, ROWS, draft, k=k, max_new_tokens=30), ROWS) == expected, draft


@pytest.mark.share(3)
@every_kind
def test_rows_end_one_after_the_other_with_sampling_processors(kind):
    model, options = model_of(kind), dict(max_new_tokens=30, repetition_penalty=1.3)
    expected = texts(model, ROWS, **options)
    ends = [text[5 * b + 3] for b, text in enumerate(expected)]
    wanted = texts(model, ROWS, **options, eos_token_id=ends)
    assert len({len(text) for text in wanted}) > 1
    for draft in (perturbed(model, 0.02), PromptLookupDraft()):
        out = speculate(model, ROWS, draft, k=4, **options, eos_token_id=ends)
        assert [text[: len(own)] for text, own in zip(generated(out, ROWS), wanted)] == wanted


BIASED = {"Bamba": "mamba_proj_bias", "Nemotron-H": "use_bias", "LFM2": "conv_bias", "Falcon-H1": "mamba_proj_bias", "Mamba 2": "use_bias", "Granite 4 (hybrid)": "mamba_proj_bias"}


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("kind", [kind for kind in BIASED if kind in HERE])
@torch.no_grad()
def test_padding_is_nothing_to_a_convolution_although_a_bias_makes_something_of_it(kind):
    family = next(family for family in STATEFUL if family.name == kind)
    model = replace(family, settings={**family.settings, BIASED[kind]: True}).model("eager", 0)
    biases = [part for name, part in model.named_parameters() if name.endswith("in_proj.bias")]
    for part in biases:
        part.add_(0.1 * torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    rows = prompts(12, 1, 20, 3, 2, 1, seed=3)
    assert biases and generated(speculate(model, rows, PromptLookupDraft(), k=3, max_new_tokens=12), rows) == texts(model, rows, max_new_tokens=12)


@torch.no_grad()
def test_all_who_watch_a_pass_over_padded_prompts_see_the_text_first():
    model, rows = model_of(RECURRENT), prompts(5, 2)
    cached = CachedModel(model, 64)
    taps = [cached.watch((1,)), cached.watch((0, 1))]
    cached.score(rows)
    (first, starts), (both, others) = (tap.passes[0] for tap in taps)
    alone = CachedModel(model, 64)
    tap = alone.watch((1,))
    alone.score(rows[1:])
    assert starts == others == [0, 0] and torch.equal(first, both[..., -first.shape[-1] :])
    torch.testing.assert_close(first[1, :2], tap.passes[0][0][0], atol=1e-5, rtol=1e-4)


@needs_unknown
def test_a_pass_is_no_wider_than_candidates_make_it_and_reads_what_was_rejected_once():
    model, k = tried(UNKNOWN), 5
    with measured(model) as cost:
        out = speculate(model, ROWS, ScriptedDraft(lambda row: [1] * k), k=k, max_new_tokens=60)
    widths = cost.target.widths
    assert generated(out, ROWS) == texts(model, ROWS, max_new_tokens=60)
    assert widths[0] == 20 and max(widths[1:]) == k + 1 and len(widths) < 60 + 3, "one pass a round, whatever is rejected"


@needs_unknown
def test_rows_that_have_to_be_told_what_was_rejected_get_fewer_candidates_and_the_others_all():
    model, k = tried(UNKNOWN), 3
    expected = texts(model, ROWS, max_new_tokens=60)
    with measured(model) as cost:
        out = speculate(model, ROWS, SimulatedTable(expected, 0.8, seed=0), k=k, max_new_tokens=60)
    assert generated(out, ROWS) == expected and max(cost.target.widths[2:]) == k + 1
    sizes = {entry.proposed for entries in out.speculation.rounds for entry in entries}
    assert sizes == {0, 1, 2, 3} and out.speculation.block_efficiency > 2.2, "2.5 by the chain of what is to be read again; 2.95 without"


@every_kind
def test_every_row_gets_all_candidates_and_nothing_is_read_twice(kind):
    if kind == UNKNOWN:
        pytest.skip("see above")
    model = tried(kind)
    with measured(model) as cost:
        trace = speculate(model, ROWS, ScriptedDraft(lambda row: [56] * 4), k=4, max_new_tokens=30).speculation
    assert max(cost.target.widths[1:]) == 5 and {entry.proposed for entries in trace.rounds[:20] for entry in entries} == {4}


@pytest.mark.parametrize("kind", [RECURRENT, CONVOLUTIONS])
def test_a_draft_model_reads_no_text_again_whatever_its_rows_accept(kind):
    model = tried(kind)
    draft = perturbed(model, 0.02)
    assert obeys_masks(draft, traits_of(draft, "assistant_model"))
    for make in (ModelDraft, lambda draft: CascadeDraft(draft, PromptLookupDraft())):
        with measured(draft) as cost:
            out = speculate(model, ROWS, make(draft), k=5, max_new_tokens=40)
        widths = cost.target.widths
        assert generated(out, ROWS) == texts(model, ROWS, max_new_tokens=40) and 0.3 < out.speculation.acceptance_rate < 0.95
        assert widths[0] == 20 and max(widths[1:]) < 12, make


def test_one_drafts_for_a_target_without_states_and_the_other_way_round():
    llama, hybrid = tiny_llama(vocab_size=61), model_of(RECURRENT)
    for target, draft in ((llama, hybrid), (hybrid, llama), (hybrid, model_of("Falcon-H1")), (hybrid, model_of(CONVOLUTIONS, seed=1))):
        assert generated(speculate(target, ROWS, draft, k=3, max_new_tokens=25), ROWS) == texts(target, ROWS, max_new_tokens=25)


def test_drafts_that_read_logits_or_hidden_states_of_the_prompts_see_each_row_without_its_padding():
    model = model_of(RECURRENT)
    expected = texts(model, ROWS, max_new_tokens=24)
    drafter = build_drafter(model, [1], None, (0, 1, 2))
    for draft in (FeatureDraft(drafter, model), MedusaDraft(medusa_heads(model), model), build_drafter(model, [0]), NGramRecyclingDraft(branches=1, read_prompt=True)):
        assert generated(speculate(model, ROWS, draft, k=3, max_new_tokens=24), ROWS) == expected
    alone = [speculate(model, [row], FeatureDraft(drafter, model), k=3, max_new_tokens=24).speculation for row in ROWS]
    together = speculate(model, ROWS, FeatureDraft(drafter, model), k=3, max_new_tokens=24).speculation
    first = [next(entry.accepted for entries in own.rounds for entry in entries if entry.proposed) for own in alone]
    assert [next(entry.accepted for entries in together.rounds for entry in entries if entry.row == b and entry.proposed) for b in range(len(ROWS))] == first


@pytest.mark.share(3)
@every_kind
def test_beams_are_those_of_plain_beam_search(kind):
    model, inputs = model_of(kind), padded(ROWS[:1] + ROWS[2:3])
    options = dict(num_beams=3, num_return_sequences=2, max_new_tokens=14, pad_token_id=0)
    for rows in (padded(ROWS[:1]), padded(ROWS[2:3])):  # of several prompts, plain beams read padding
        expected = model.generate(**rows, **options)
        for draft in (perturbed(model, 0.02), PromptLookupDraft()):
            assert torch.equal(enabled(model).generate(**rows, **options, speculative=True, assistant_model=draft, num_assistant_tokens=4), expected)
    assert enabled(model).generate(**inputs, **options, speculative=True).shape[0] == 4


def test_samples_of_one_prompt_are_rows_too_and_coupled_noise_gives_the_text_of_each_alone():
    model, row = model_of(RECURRENT), prompts(9)[0]
    inputs, options = padded([row]), dict(do_sample=True, max_new_tokens=20, pad_token_id=0)
    config = {"acceptance": "coupled", "num_assistant_tokens": 4}
    together = enabled(model).generate(**inputs, **options, num_return_sequences=3, speculative={**config, "seed": 7}, assistant_model=perturbed(model, 0.02))
    alone = [enabled(model).generate(**inputs, **options, speculative={**config, "seed": 7 + b})[0] for b in range(3)]
    assert [own.tolist() for own in together] == [own.tolist() for own in alone] and len({tuple(own.tolist()) for own in alone}) > 1


def test_what_takes_no_ragged_batch_is_refused_by_name():
    if "inkling_text" in CONFIG_MAPPING:
        refused("target: Inkling.*gives a row other logits in a ragged batch.*batch size 1", lambda: speculate(model_of("Inkling (text)"), ROWS, max_new_tokens=4))
        refused("assistant_model: Inkling.*batch size 1", lambda: speculate(tiny_llama(vocab_size=61), ROWS, model_of("Inkling (text)"), max_new_tokens=4))
    model = model_of(RECURRENT)
    draft = FeatureDraft(build_drafter(model, [0], None, (0, 1, 2)), model)
    refused("feature drafter that carry states take one row", lambda: speculate(model, ROWS, draft, max_new_tokens=4))


def test_all_kinds_of_layers_are_among_those_tested():
    assert len(KINDS) >= 4
