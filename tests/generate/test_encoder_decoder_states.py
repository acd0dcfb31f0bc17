"""Hidden states and attentions of encoder-decoders: what plain generate returns of the encoder, of the decoder's own text, and of what it looks at in the source."""

import pytest
import torch

import hf_specdec
from hf_specdec.drafts import ModelDraft
from tests.encoder_decoders import FAMILIES, family, seeds, source, sources, speculate
from tests.generate.test_encoder_decoder import whisper
from tests.generate.test_encoder_decoder_batches import heard
from tests.helpers import perturbed

WANTED = dict(max_new_tokens=10, do_sample=False, num_beams=1, return_dict_in_generate=True, output_attentions=True, output_hidden_states=True)
OF_TOKENS, OF_THE_SOURCE = ("decoder_hidden_states", "decoder_attentions", "cross_attentions"), ("encoder_hidden_states", "encoder_attentions")
CHANGED = {"moonshine_streaming"}  # the decoder adds to what the encoder has put out, pass by pass


def same(ours, theirs, lengths: list[int] | None = None) -> None:
    """Of the shapes, and the numbers, of plain generate; lengths: new tokens per row, behind which ours has zeros."""
    if ours is None or theirs is None or torch.is_tensor(theirs):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
        return
    assert type(ours) is type(theirs) and len(ours) == len(theirs)
    if isinstance(theirs, dict):  # Pegasus-X
        return same(tuple(ours.values()), tuple(theirs.values()))
    for step, (own, other) in enumerate(zip(ours, theirs)):
        if lengths is not None:
            other = tuple(torch.where(torch.tensor([step < n for n in lengths]).view(-1, *[1] * (part.ndim - 1)), part, 0.0) for part in other)
        same(own, other)


def check(ours, theirs, kind: str = "", lengths: list[int] | None = None) -> None:
    assert torch.equal(ours.sequences, theirs.sequences) and ours.keys() == theirs.keys()
    for name in OF_TOKENS:
        same(ours.get(name), theirs.get(name), lengths)
    for name in OF_THE_SOURCE if kind not in CHANGED else ():
        same(ours.get(name), theirs.get(name))


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("line", FAMILIES, ids=lambda line: line.name)
def test_they_are_those_of_plain_generate(line, rows):
    model = line.model("eager", seeds(line.name, 1)[0])
    inputs = source(line.kind) if rows == 1 else sources(line.kind, 0, rows)
    theirs = model.generate(**inputs, **WANTED)
    for draft in (None, perturbed(model, 0.03)):
        check(speculate(model, inputs, draft, **WANTED), theirs, line.kind)
    assert all(part is not None for part in theirs.decoder_hidden_states)


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_rows_that_have_ended_have_zeros(name):
    model, inputs = family(name).model("eager", seeds(name, 1)[0]), sources(family(name).kind, 0, 3)
    free = model.generate(**inputs, **WANTED).sequences[:, 1:]
    eos = int(free[1, 4])
    lengths = [(row.tolist() + [eos]).index(eos) + 1 for row in free]
    assert min(lengths) < max(lengths)
    theirs = model.generate(**inputs, **WANTED, eos_token_id=eos)
    check(speculate(model, inputs, perturbed(model, 0.03), **WANTED, eos_token_id=eos), theirs, lengths=lengths)


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_behind_a_text_of_the_decoders_own(name):
    model, inputs = family(name).model("eager", seeds(name, 1)[0]), source(family(name).kind)
    start = torch.tensor([[0, 5, 7, 5]])
    theirs = model.generate(**inputs, **WANTED, decoder_input_ids=start)
    assert theirs.decoder_attentions[0][0].shape[2] > 3
    check(speculate(model, inputs, perturbed(model, 0.03), **WANTED, decoder_input_ids=start), theirs)


def test_one_of_them_alone_and_neither():
    model, inputs = family("T5").model("eager", seeds("T5", 1)[0]), source("t5")
    for name in ("output_attentions", "output_hidden_states"):
        options = WANTED | {name: False}
        ours, theirs = speculate(model, inputs, **options), model.generate(**inputs, **options)
        check(ours, theirs)
        assert (ours.cross_attentions is None) == (name == "output_attentions")
    assert speculate(model, inputs).keys() == model.generate(**inputs, max_new_tokens=5, return_dict_in_generate=True).keys()


def test_encoder_outputs_that_were_given_say_what_is_known_of_the_source():
    model, inputs = family("T5").model("eager", seeds("T5", 1)[0]), source("t5")
    for more in ({}, {"output_hidden_states": True}):
        given = {"encoder_outputs": model.get_encoder()(**inputs, **more)}
        check(speculate(model, given, **WANTED), model.generate(**given, **WANTED))


def test_time_stamps_of_tokens():
    """What Whisper reads off cross-attentions, of one sound."""
    model = whisper()
    model.set_attn_implementation("eager")
    model.generation_config.alignment_heads, model.generation_config.no_timestamps_token_id = [[0, 0], [1, 2]], 40
    options = dict(max_new_tokens=9, return_token_timestamps=True)
    theirs = model.generate(heard(1), **options)
    hf_specdec.enable(model)
    for draft in (None, ModelDraft(perturbed(model, 0.03))):
        ours = model.generate(heard(1), **options, speculative=True, assistant_model=draft)
        assert torch.equal(ours["sequences"], theirs["sequences"]) and torch.equal(ours["token_timestamps"], theirs["token_timestamps"])


def test_beams_without_a_cache_are_refused():
    model, inputs = family("T5").model("eager", seeds("T5", 1)[0]), source("t5")
    with pytest.raises(ValueError, match="output_(hidden_states|attentions)=True: not available of num_beams=2 beams with use_cache=False.*speculative=False"):
        speculate(model, inputs, **WANTED | {"num_beams": 2, "use_cache": False})
