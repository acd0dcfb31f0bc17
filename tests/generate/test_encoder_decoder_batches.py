"""Batches of encoder-decoders, and of decoders that make their masks or positions themselves: every row as plain generate writes it, whatever the others accept."""

import copy
from threading import Thread

import pytest
import torch
from transformers import WhisperForCausalLM, WhisperForConditionalGeneration

import hf_specdec
from hf_specdec import compat
from hf_specdec.compat import CACHE
from hf_specdec.cached_model import CachedModel
from hf_specdec.drafts import ModelDraft, PromptLookupDraft, RecyclingDraft, SuffixAutomatonDraft, UniformDraft
from hf_specdec.positions import counted_by_row, counting
from hf_specdec.proposal import Proposal
from tests import architectures
from tests.architectures import offers
from tests.encoder_decoders import DRAFTS, FAMILIES, MAX_NEW, family, outcome, plain, seeds, source, sources, speculate
from tests.generate.test_encoder_decoder import counted, model_and_source, whisper
from tests.helpers import FULL, ScriptedDraft, perturbed

CASES = [(line, attn) for i, line in enumerate(FAMILIES) for attn in ("eager", "sdpa") if FULL or attn == ("sdpa" if i % 2 and offers(line, "sdpa") else "eager")]


def ends_apart(text: torch.Tensor) -> int | None:
    """A token that ends some rows of `text` early and others late, or never."""
    rows = [row[1:] for row in text.tolist()]
    ends = {token: [row.index(token) if token in row else len(row) for row in rows] for row in rows for token in row}
    best = max(ends, key=lambda token: max(ends[token]) - min(ends[token]) + len(set(ends[token])))
    return best if max(ends[best]) - min(ends[best]) >= 8 else None


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize(("line", "attn"), CASES, ids=[f"{line.name}-{attn}" for line, attn in CASES])
def test_the_rows_of_a_batch_are_plain_generates_whatever_drafts(line, attn):
    if not offers(line, attn):
        pytest.skip(f"transformers has no {attn} attention for {line.name}")
    assert outcome(line, attn, 4 if FULL else 1, ks=(1, 4, 7) if FULL else (4,), rows=3) == "exact"


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("line", FAMILIES, ids=lambda line: line.name)
def test_rows_that_end_leave_the_others_what_they_read(line, draft):
    """With a token that ends them in different rounds."""
    shown = 0
    for seed in seeds(line.name, 4):
        model, inputs = line.model(seed=seed), sources(line.kind, seed, rows=4)
        eos = ends_apart(plain(model, inputs))
        if eos is None or shown and not FULL:
            continue
        text = plain(model, inputs, eos_token_id=eos)
        out = speculate(model, inputs, DRAFTS[draft](model), eos_token_id=eos)
        assert torch.equal(out.sequences, text) and len(set(out.speculation.new_tokens)) > 1
        shown += 1
    assert shown, "all rows ended together, so nothing was shown"


@pytest.mark.share(2)
@pytest.mark.parametrize("name", ["T5", "BART", "Whisper", "Marian"])
@pytest.mark.parametrize("k", [1, 7, "auto"])
def test_other_drafts_and_numbers_of_tokens(name, k):
    line = family(name)
    model, inputs = line.model(seed=seeds(name, 1)[0]), sources(line.kind, seeds(name, 1)[0], rows=5)
    text = plain(model, inputs)
    for draft in (RecyclingDraft(), SuffixAutomatonDraft(), UniformDraft(), ModelDraft(perturbed(model, 0.1))):
        assert torch.equal(speculate(model, inputs, draft, k).sequences, text)


@pytest.mark.parametrize("name", ["T5", "M2M100", "LED"])
def test_left_padded_sources_are_read_as_plain_generate_reads_them(name):
    model, _ = model_and_source(name)
    inputs = {"input_ids": torch.tensor([[9, 8, 7, 6, 5, 4], [0, 0, 0, 12, 13, 14]]), "attention_mask": torch.tensor([[1] * 6, [0] * 3 + [1] * 3])}
    for draft in (ModelDraft(perturbed(model, 0.03)), ModelDraft(model), None):
        assert torch.equal(speculate(model, inputs, draft).sequences, plain(model, inputs))


@pytest.mark.parametrize("name", ["BART", "LED"])
def test_passes_over_one_token_of_rows_of_unequal_lengths(name):
    """LED's decoder looks at no mask in them."""
    model, inputs = family(name).model(seed=1), sources(seed=25, rows=2)
    text = plain(model, inputs)
    first = text[0].tolist()
    apart = 1 + int((text[0] != text[1]).int().argmax())

    def script(tokens):  # one token of the first row, behind what the two have in common
        return first[apart : apart + 1] if tokens == first[:apart] else []

    out = speculate(model, inputs, ScriptedDraft(script), output_logits=True)
    expected = model.generate(**inputs, max_new_tokens=MAX_NEW, num_beams=1, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(out.sequences, text) and out.speculation.accepted == 1
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


def test_an_encoder_is_shown_where_its_attention_is_global():
    model, inputs = family("LED").model(seed=1), sources()
    whole = torch.zeros_like(inputs["input_ids"]).index_fill(1, torch.tensor([0, 5]), 1)
    text = plain(model, inputs, global_attention_mask=whole)
    assert not torch.equal(text, plain(model, inputs))
    for draft in (ModelDraft(perturbed(model, 0.03)), None):
        assert torch.equal(speculate(model, inputs, draft, global_attention_mask=whole).sequences, text)
    beams = [run(model, inputs, None, global_attention_mask=whole, num_beams=3) for run in (lambda m, i, _, **o: plain(m, i, **o), lambda *a, **o: speculate(*a, **o).sequences)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("name", ["T5", "Whisper"])
def test_the_encoder_reads_the_batch_once_and_a_draft_with_its_own_does(name):
    line = family(name)
    model, inputs = line.model(seed=seeds(name, 1)[0]), sources(line.kind, 0)
    draft = ModelDraft(perturbed(model, 0.05))
    encoded, own = counted(model.get_encoder()), counted(draft.model.get_encoder())
    speculate(model, inputs, draft)
    assert len(encoded) == len(own) == 1 and draft.reads == "its own"


def test_lookups_look_into_what_was_read_for_the_row_and_go_on_doing_so_when_others_have_ended():
    class Watching(PromptLookupDraft):
        seen: list = []

        def propose(self, context, k):
            self.seen.append([row[:4] for row in context.texts])
            return super().propose(context, k)

    model, draft = family("T5").model(seed=seeds("T5", 1)[0]), Watching()
    inputs = {"input_ids": torch.tensor([[9, 8, 7, 0], [10, 11, 12, 13], [20, 21, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0], [1] * 4, [1, 1, 0, 0]])}
    eos = ends_apart(plain(model, inputs))
    out = speculate(model, inputs, draft, eos_token_id=eos)
    assert torch.equal(out.sequences, plain(model, inputs, eos_token_id=eos))
    first = out.speculation.new_tokens.index(min(out.speculation.new_tokens))
    assert draft.seen[0][0][:3] == [9, 8, 7] and draft.seen[0][1] == [10, 11, 12, 13] and draft.seen[0][2][:2] == [20, 21]
    gone, last = draft.seen[0][first], draft.seen[-1]
    assert len(last) < 3 and all(row in draft.seen[len(draft.seen) // 2] and row != gone for row in last)


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_several_sequences_of_each_source_come_back(name):
    line = family(name)
    model, inputs = line.model(seed=seeds(name, 1)[0]), sources(line.kind, 0, rows=2)
    for draft in (ModelDraft(perturbed(model, 0.05)), ModelDraft(model), None):
        out = speculate(model, inputs, draft, seed=3, do_sample=True, num_return_sequences=3)
        again = speculate(model, inputs, draft, seed=3, do_sample=True, num_return_sequences=3)
        assert out.sequences.shape[0] == 6 and torch.equal(out.sequences, again.sequences)
        assert len({tuple(row) for row in out.sequences.tolist()}) == 6
        if draft is not None and draft.model is model:
            assert out.speculation.acceptance_rate > 0.9


@pytest.mark.parametrize("name", ["BART", "T5", "Whisper"])
def test_scores_logits_and_caches_come_back_as_plain_generates(name):
    line = family(name)
    model, inputs = line.model(seed=seeds(name, 1)[0]), sources(line.kind, seeds(name, 1)[0])
    eos = ends_apart(plain(model, inputs, max_new_tokens=15))
    options = dict(return_dict_in_generate=True, output_logits=True, max_new_tokens=15, eos_token_id=eos)
    theirs = model.generate(**inputs, do_sample=False, **options)
    ours = speculate(model, inputs, ModelDraft(perturbed(model, 0.03)), **options)
    assert torch.equal(ours.sequences, theirs.sequences) and len(set(ours.speculation.new_tokens)) > 1
    for step, (a, b) in enumerate(zip(ours.logits, theirs.logits)):
        for row, count in enumerate(ours.speculation.new_tokens):
            assert step >= count or torch.allclose(a[row], b[row], atol=1e-4)
    for a, b in zip(ours[CACHE].cross_attention_cache.layers, theirs[CACHE].cross_attention_cache.layers):
        assert torch.allclose(a.keys, b.keys, atol=1e-4) and torch.allclose(a.values, b.values, atol=1e-4)
    for a, b in zip(ours[CACHE].self_attention_cache.layers, theirs[CACHE].self_attention_cache.layers):
        assert a.keys.shape == b.keys.shape
        for row, count in enumerate(ours.speculation.new_tokens):
            assert torch.allclose(a.keys[row, :, :count], b.keys[row, :, :count], atol=1e-4)


def test_the_decoders_context_may_be_filled_to_its_end_by_rows_that_get_there_at_different_times():
    for name in ("BART", "Marian", "LED", "Blenderbot"):
        settings = dict(max_decoder_position_embeddings=20) if name == "LED" else dict(max_position_embeddings=20)
        model, inputs = family(name).model(seed=1, **settings), sources(rows=4)
        text = plain(model, inputs, max_new_tokens=19)
        for draft in (ModelDraft(perturbed(model, 0.02)), ModelDraft(perturbed(model, 0.05)), None):
            assert torch.equal(speculate(model, inputs, draft, 7, max_new_tokens=19).sequences, text)


# --- Whisper's own generate -------------------------------------------------------------------------------------------------


def heard(rows: int, frames: int = 40) -> torch.Tensor:
    return torch.randn((rows, 8, frames), generator=torch.Generator().manual_seed(4))


def test_whisper_transcribes_a_batch():
    model = whisper()
    text = model.generate(heard(4), max_new_tokens=MAX_NEW)
    hf_specdec.enable(model)
    for draft in (None, ModelDraft(perturbed(model, 0.03))):
        assert torch.equal(model.generate(heard(4), max_new_tokens=MAX_NEW, assistant_model=draft, speculative=True), text)
    out = model.generate(heard(4), max_new_tokens=MAX_NEW, speculative=True, return_dict_in_generate=True)
    assert len(out.speculation.new_tokens) == 4


def test_whisper_transcribes_a_batch_of_long_recordings_of_unequal_lengths():
    model = whisper()
    model.generation_config.no_timestamps_token_id = 40
    mask = torch.ones(3, 130, dtype=torch.long)
    mask[1, 70:] = 0
    options = dict(max_new_tokens=12, attention_mask=mask, return_timestamps=True)
    text = model.generate(heard(3, 130), **options)
    hf_specdec.enable(model)
    for draft in (None, ModelDraft(perturbed(model, 0.03))):
        assert torch.equal(model.generate(heard(3, 130), **options, assistant_model=draft, speculative=True), text)


def test_a_draft_that_has_a_decoder_alone_reads_the_encoder_outputs_of_every_row():
    model = whisper()
    draft = ModelDraft(WhisperForCausalLM(copy.deepcopy(model.config)).eval())
    draft.model.model.decoder.load_state_dict(model.model.decoder.state_dict())
    draft.model.set_output_embeddings(copy.deepcopy(model.proj_out))
    inputs = {"input_features": heard(3)}
    out = speculate(model, inputs, draft)
    assert torch.equal(out.sequences, plain(model, inputs)) and out.speculation.acceptance_rate > 0.9


# --- every logit ---------------------------------------------------------------------------------------------------------------

OWN = [line for line in architectures.FAMILIES if not line.branches and line.ragged and line.window != "states"]


@pytest.mark.share(2)
@torch.no_grad()
@pytest.mark.parametrize("line", OWN, ids=lambda line: line.name)
def test_every_logit_of_rows_that_accept_different_numbers_of_tokens_is_that_of_a_whole_pass(line):
    """Rounds of candidates of which each row keeps another number, with a row that ends and prompts of unequal lengths; beyond a sliding window."""
    model, generator = line.model("eager"), torch.Generator().manual_seed(0)

    def some(n: int) -> list[int]:
        return torch.randint(3, 61, (n,), generator=generator).tolist()

    rows = [some(9), some(2), some(5), some(1)]
    cached = CachedModel(model, 80, traits=compat.traits_of(model, "target"))
    for turn in range(7):
        sizes = [int(torch.randint(0, 5, (), generator=generator)) for _ in rows]
        drafted = [some(size) for size in sizes]
        logits = cached.score(rows, Proposal.from_lists(drafted, torch.device("cpu")))
        for row, tokens, own in zip(rows, drafted, logits):
            whole = model(input_ids=torch.tensor([row + tokens]), use_cache=False).logits[0, len(row) - 1 :]
            torch.testing.assert_close(own[: len(tokens) + 1], whole, atol=2e-4, rtol=2e-4)
        kept = [int(torch.randint(0, size + 1, (), generator=generator)) for size in sizes]
        cached.commit([1 + n for n in kept])
        rows = [row + tokens[:n] + some(1) for row, tokens, n in zip(rows, drafted, kept)]
        if turn == 3:
            cached.keep([0, 2, 3])
            rows = [rows[0], rows[2], rows[3]]


def test_a_source_is_kept_by_rows():
    model, inputs = family("T5").model(), sources(rows=3)
    from hf_specdec.seq2seq import Source

    outputs = model.get_encoder()(**inputs)
    read = Source.of(model, inputs["input_ids"], {"attention_mask": inputs["attention_mask"], "encoder_outputs": outputs}, 3)
    read.keep([2, 0])
    assert torch.equal(read.inputs, inputs["input_ids"][[2, 0]]) and torch.equal(read.mask, inputs["attention_mask"][[2, 0]])
    assert torch.equal(read.outputs[0], outputs[0][[2, 0]]) and [len(row) for row in read.tokens] == [8, 12]
    assert source("t5")["input_ids"].shape == (1, 12)


WHISPER = ["Whisper"] if "prepare_inputs_for_generation" in vars(WhisperForConditionalGeneration) else []  # else it counts padding as text, transformers 5.10


@pytest.mark.parametrize("name", ["T5", "UMT5", *WHISPER])
def test_rows_of_a_decoder_may_begin_with_texts_of_unequal_lengths(name):
    line = family(name)
    model, inputs = line.model(seed=seeds(name, 1)[0]), sources(line.kind, 0)
    starts = dict(decoder_input_ids=torch.tensor([[2, 9, 10, 11], [0, 0, 2, 12], [0, 2, 13, 14]]), decoder_attention_mask=torch.tensor([[1] * 4, [0, 0, 1, 1], [0, 1, 1, 1]]))
    text = plain(model, inputs, **starts)
    for draft in (ModelDraft(perturbed(model, 0.03)), ModelDraft(model), None):
        assert torch.equal(speculate(model, inputs, draft, **starts).sequences, text)


def test_hooks_of_other_threads_come_and_go_in_the_midst_of_a_pass():
    """torch notes apart that a hook takes keyword arguments, so a pass may meet one, of another thread, without that note."""
    module = counting(family("BART").model())[0]
    with counted_by_row([module], [3, 1], 2):
        for notes in (module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs):
            notes.clear()
        out = []
        other = Thread(target=lambda: out.append(module(torch.zeros(1, 2, dtype=torch.long), 4)))
        other.start()
        other.join()
    assert torch.equal(out[0], module(torch.zeros(1, 2, dtype=torch.long), 4)) and not module._forward_hooks and not module._forward_pre_hooks


@pytest.mark.parametrize("name", ["BART"] if WHISPER else ["BART", "Whisper"])
def test_where_padding_counts_as_text_it_is_refused(name):
    model = family(name).model()
    starts = dict(decoder_input_ids=torch.tensor([[2, 9], [0, 2]]), decoder_attention_mask=torch.tensor([[1, 1], [0, 1]]))
    with pytest.raises(ValueError, match="decoder_attention_mask: .*ForConditionalGeneration counts padding.*pass them without"):
        speculate(model, sources(family(name).kind, rows=2), **starts)


@pytest.mark.skipif(not WHISPER, reason="this transformers counts padding as text")
def test_whisper_goes_on_from_what_it_has_transcribed_of_every_recording():
    """condition_on_prev_tokens: the rows' decoders begin with texts of unequal lengths."""
    model = whisper()
    generation = model.generation_config
    generation.no_timestamps_token_id, generation.prev_sot_token_id, generation.prev_bos_token_id = 40, 39, 39
    mask = torch.ones(3, 170, dtype=torch.long)
    mask[1, 90:] = 0
    options = dict(max_new_tokens=9, attention_mask=mask, return_timestamps=True, condition_on_prev_tokens=True)
    text = model.generate(heard(3, 170), **options)
    hf_specdec.enable(model)
    for draft in (None, ModelDraft(perturbed(model, 0.03))):
        assert torch.equal(model.generate(heard(3, 170), **options, assistant_model=draft, speculative=True), text)


def test_time_stamps_of_the_tokens_of_several_rows_are_refused_by_the_name_that_asked_for_them():
    model = hf_specdec.enable(whisper())
    model.generation_config.alignment_heads, model.generation_config.no_timestamps_token_id = [[0, 0]], 40
    with pytest.raises(ValueError, match="output_attentions=True, which return_token_timestamps asks for: not available of several rows.*speculative=False"):
        model.generate(heard(2), max_new_tokens=5, speculative=True, return_token_timestamps=True)
