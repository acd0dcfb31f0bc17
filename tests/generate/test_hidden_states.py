"""output_hidden_states=True: what layers put out at every position, in the shapes of plain generate, whatever was drafted."""

import copy
import inspect
from functools import partial

import pytest
import torch

from hf_specdec import mx
from hf_specdec.caches import CACHE, GOES_ON
from hf_specdec.drafts import ModelDraft
from tests import seeing
from tests.architectures import FAMILIES, OWN_CACHES
from tests.generate import per_token
from tests.generate.per_token import ROWS, SHARED, alone_and_in_a_batch, each_draft
from tests.helpers import enabled, padded, perturbed, repetitive, tiny_llama

WANTED = SHARED | dict(output_hidden_states=True)
both = partial(per_token.both, WANTED)


def _places(part: torch.Tensor, rows: int) -> int:
    """L of [B, L, H], [streams, B, L, H] or [B, L, streams, H]."""
    return part.shape[2] if part.ndim == 4 and part.shape[0] != rows else part.shape[1]


def alike(ours, theirs, mask: torch.Tensor, lengths: list[int] | None = None) -> None:
    """Entry by entry, layer by layer; where there is padding (`mask` [B, P]), and after a row's end, ours has zeros."""
    assert torch.equal(ours.sequences, theirs.sequences) and len(ours.hidden_states) == len(theirs.hidden_states) > 0
    for step, (own, other) in enumerate(zip(ours.hidden_states, theirs.hidden_states)):
        assert [part.shape for part in own] == [part.shape for part in other]
        kept = mask[:, -_places(own[0], len(mask)) :] if step == 0 else torch.tensor([[int(step < n)] for n in lengths or [99] * len(mask)])
        for part, wanted in zip(own, other):
            shape = (1, *kept.shape, 1) if wanted.ndim == 4 and wanted.shape[:2] != kept.shape else (*kept.shape, *[1] * (wanted.ndim - 2))  # streams may come first
            torch.testing.assert_close(part, torch.where(kept.view(shape).bool(), wanted, 0.0), atol=2e-3, rtol=0)


@alone_and_in_a_batch
@each_draft
def test_they_are_those_of_plain_generate(rows, draft):
    model = tiny_llama()
    ours, theirs, mask = both(model, rows, draft(model))
    alike(ours, theirs, mask)
    assert ours.speculation.proposed and len(ours.hidden_states[0]) == 1 + model.config.num_hidden_layers


@pytest.mark.share(1 / 8)
@pytest.mark.parametrize("line", FAMILIES, ids=lambda line: line.name)
def test_of_every_family(line):
    """Of rows that are together, those of every row by itself."""
    if (model := line.model("eager")).config.is_encoder_decoder or "encoder_outputs" in inspect.signature(model.forward).parameters:
        pytest.skip("a decoder of what an encoder has read")
    rows = ROWS if line.ragged else ROWS[:1]
    ours = enabled(model).generate(**padded(rows), **WANTED, speculative=True, assistant_model=perturbed(model, 0.02), num_assistant_tokens=4)
    for b, row in enumerate(rows):
        theirs, pad = model.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row)).long(), **WANTED), len(rows[0]) - len(row)
        for step, (own, other) in enumerate(zip(ours.hidden_states, theirs.hidden_states)):
            for part, wanted in zip(own, other):
                if wanted.ndim == 4 and wanted.shape[0] != 1:  # Gemma 3n's streams come first
                    part, wanted = part.transpose(0, 1), wanted.transpose(0, 1)
                part = part[b : b + 1]
                if wanted.ndim == 3:
                    part = part[:, -wanted.shape[1] :]
                elif step == 0:
                    part = part[:, :, pad:] if part.shape[2] == len(rows[0]) else part[:, pad:]
                torch.testing.assert_close(part, wanted, atol=2e-3, rtol=0)
    assert len(ours.hidden_states) == WANTED["max_new_tokens"]


@pytest.mark.share(1 / 6)
@pytest.mark.parametrize("line", [line for line in seeing.FAMILIES if line.ragged], ids=lambda line: line.name)
def test_beside_what_is_shown(line):
    model, inputs = line.model(), line.prompts(1)
    try:
        theirs = enabled(model).generate(**inputs, **WANTED)
    except AttributeError:  # Phi-4's own passes, once its image encoder has been asked for its states, too
        pytest.skip("plain generate fails")
    alike(model.generate(**inputs, **WANTED, speculative=True, assistant_model=ModelDraft(perturbed(model, 0.02))), theirs, inputs["attention_mask"])


def test_rows_that_have_ended_have_zeros():
    alike(*per_token.with_rows_that_end(WANTED, tiny_llama()))


def test_behind_a_filled_cache_the_first_are_those_of_what_is_new():
    ours, theirs, mask = per_token.behind_a_filled_cache(WANTED, tiny_llama())
    alike(ours, theirs, mask)
    assert ours.hidden_states[0][0].shape[1] == 4


def test_behind_a_prompt_of_embeddings():
    alike(*per_token.behind_embeddings(WANTED, tiny_llama()))


@pytest.mark.parametrize("change", [mx.compress, mx.to_tiles], ids=["mx", "tiles"])
def test_of_the_kernels(change):
    model = change(tiny_llama(hidden_size=64, intermediate_size=96))
    ours, theirs, mask = both(model, ROWS, perturbed(tiny_llama(hidden_size=64, intermediate_size=96), 0.02))
    alike(ours, theirs, mask)


def test_sampling_prompts_in_pieces_and_several_sequences():
    model = enabled(tiny_llama())
    options = dict(WANTED, do_sample=True, num_return_sequences=2)
    one, other = (model.generate(**padded(ROWS), **options, prefill_chunk_size=chunk, speculative={"seed": 3}, num_assistant_tokens=4) for chunk in (None, 3))
    alike(one, other, padded(ROWS)["attention_mask"].repeat_interleave(2, 0))
    whole = model(input_ids=one.sequences[:1], output_hidden_states=True).hidden_states
    torch.testing.assert_close(torch.cat([step[-1][:1] for step in one.hidden_states], dim=1), whole[-1][:, :-1], atol=2e-4, rtol=0)


def test_passes_are_not_compiled_then():
    model = enabled(tiny_llama())
    ours = model.generate(**padded(ROWS[:1]), **WANTED, speculative={"compile": True}, num_assistant_tokens=4)
    alike(ours, model.generate(**padded(ROWS[:1]), **WANTED), torch.ones(1, 7))


def test_without_them_there_are_none():
    model = enabled(tiny_llama())
    assert model.generate(**padded(ROWS), **WANTED | {"output_hidden_states": False}, speculative=True).hidden_states is None
    assert torch.is_tensor(model.generate(**padded(ROWS), **WANTED | {"return_dict_in_generate": False}, speculative=True))


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("line", OWN_CACHES if GOES_ON and CACHE == "cache" else [], ids=lambda line: line.name)
def test_behind_caches_of_their_own_kind(line):
    """Tokens that were accepted are read again in front of the next candidates, or not; and behind a cache that was filled before, where it is handed back."""
    model = enabled(line.model("eager"))
    theirs = model.generate(**padded(ROWS[:1]), **WANTED | {"max_new_tokens": 40})
    for draft in (None, perturbed(model, 0.02)):
        ours = model.generate(**padded(ROWS[:1]), **WANTED | {"max_new_tokens": 40}, speculative=True, assistant_model=draft, num_assistant_tokens=4)
        assert torch.equal(ours.sequences, theirs.sequences)
        for own, other in zip(ours.hidden_states, theirs.hidden_states):
            for part, wanted in zip(own, other):
                torch.testing.assert_close(part, wanted, atol=4e-3, rtol=1e-3)
    if ours.get(CACHE) is not None:
        ids = torch.cat([ours.sequences, torch.tensor([[9, 8, 7]])], dim=1)
        cache = {CACHE: copy.deepcopy(ours[CACHE])}
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **WANTED, **{CACHE: ours[CACHE]})
        ours = model.generate(ids, attention_mask=torch.ones_like(ids), **WANTED, **cache, speculative=True, assistant_model=perturbed(model, 0.02))
        alike(ours, theirs, torch.ones_like(ids))


def test_beams_and_attentions_of_caches_of_their_own_kind_are_refused_by_name():
    with pytest.raises(ValueError, match="output_hidden_states=True: not available of num_beams=2 beams with use_cache=False.*speculative=False"):
        enabled(tiny_llama()).generate(**padded(ROWS[:1]), **WANTED, num_beams=2, use_cache=False, speculative=True)
    for line in OWN_CACHES[:1] if GOES_ON and CACHE == "cache" else ():
        with pytest.raises(ValueError, match="output_attentions=True: not available of a model whose cache is of its own kind.*speculative=False"):
            enabled(line.model("eager")).generate(**padded(ROWS[:1]), **WANTED, output_attentions=True, speculative=True)


def test_what_is_drafted_and_rejected_leaves_nothing():
    """A draft that is always wrong, and one that is always right."""
    model = tiny_llama()
    for draft in (tiny_llama(7), tiny_llama()):
        ours, theirs, mask = both(model, [*ROWS, *repetitive(9)], draft, k=6)
        alike(ours, theirs, mask)
