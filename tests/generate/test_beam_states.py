"""output_hidden_states=True and output_attentions=True with beams: step for step those of plain beam search, whatever was drafted."""

import pytest
import torch

from hf_specdec.drafts import ModelTreeDraft, RecyclingDraft
from tests import seeing
from tests.architectures import FAMILIES
from tests.encoder_decoders import FAMILIES as READERS, sources
from tests.helpers import build, enabled, padded, perturbed, repetitive, tiny_llama

WANTED = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, num_beams=3, output_scores=True,
              output_hidden_states=True, output_attentions=True)
SMALL = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
WINDOWED = dict(SMALL, sliding_window=5, layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False)
KINDS = {"Llama": lambda: tiny_llama(attn="eager"), "Gemma 3": lambda: build("gemma3_text", attn="eager", **WINDOWED)}
DRAFTS = {"lookup": lambda model: None, "model": lambda model: perturbed(model, 0.02), "tree": lambda model: ModelTreeDraft(perturbed(model, 0.1), (3, 2, 1)),
          "recycling": lambda model: RecyclingDraft(branches=3)}
NAMES = ("hidden_states", "attentions", "decoder_hidden_states", "decoder_attentions", "cross_attentions", "encoder_hidden_states", "encoder_attentions")


def alike(ours, theirs, mask: torch.Tensor, atol: float = 1e-5) -> None:
    """Of tokens of padding (`mask` [B * beams, P]) ours has zeros. atol: of a number of the size 1."""
    assert torch.equal(ours.sequences, theirs.sequences) and torch.equal(ours.beam_indices, theirs.beam_indices)
    seen = 0
    for name in NAMES:
        own, other = getattr(ours, name, None), getattr(theirs, name, None)
        assert (own is None) == (other is None)
        if name.startswith("encoder") or own is None:
            assert own is None or len(own) == len(other) and all(torch.equal(*pair) for pair in zip(own, other))
            continue
        assert len(own) == len(other) > 0
        for step, (layers, wanted) in enumerate(zip(own, other)):
            assert [None if part is None else part.shape for part in layers] == [None if part is None else part.shape for part in wanted]
            for part, meant in zip(layers, wanted):
                if part is not None:
                    kept = mask.bool() if step == 0 else torch.ones(len(mask), 1).bool()
                    kept = kept[:, None, :, None] if "attentions" in name else kept.view(*kept.shape, *[1] * (meant.ndim - 2 if meant.shape[:2] == kept.shape else 1))
                    scale = 1 if "attentions" in name else max(1.0, float(meant.abs().max()))
                    torch.testing.assert_close(part, torch.where(kept, meant, 0.0), atol=atol * scale, rtol=0)
                    seen += 1
    assert seen


def both(model, inputs, draft=None, k=4, **more):
    options = {**WANTED, **more}
    theirs = enabled(model).generate(**inputs, **options)
    return model.generate(**inputs, **options, speculative=True, assistant_model=draft, num_assistant_tokens=k), theirs


def mask_of(inputs: dict, beams: int = 3) -> torch.Tensor:
    return inputs["attention_mask"].repeat_interleave(beams, 0)


@pytest.mark.share(1 / 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rows", [repetitive(13), repetitive(12, 7, 4)], ids=["alone", "ragged"])
def test_they_are_those_of_plain_beam_search(kind, draft, rows):
    model, inputs = KINDS[kind](), padded(rows)
    ours, theirs = both(model, inputs, DRAFTS[draft](model))
    alike(ours, theirs, mask_of(inputs))


def test_several_steps_a_pass_and_what_is_not_shown_costs_nothing():
    """A draft that is the model itself: later steps are answered out of earlier passes."""
    model, inputs = KINDS["Llama"](), padded(repetitive(9, 6))
    ours, theirs = both(model, inputs, ModelTreeDraft(KINDS["Llama"](), (6, 6)), num_beams=2)
    alike(ours, theirs, mask_of(inputs, 2))
    assert ours.speculation.target_calls < len(ours.hidden_states)
    assert torch.is_tensor(both(model, inputs, return_dict_in_generate=False)[0])


def test_sampled_beams_that_end_and_prompts_in_pieces():
    model, inputs = KINDS["Gemma 3"](), padded(repetitive(12, 7))
    options = dict(WANTED, do_sample=True, eos_token_id=[5, 9, 14], num_return_sequences=2, prefill_chunk_size=4)
    found = []
    for more in ({}, dict(speculative=True, num_assistant_tokens=4)):
        torch.manual_seed(3)
        found.append(enabled(model).generate(**inputs, **options | ({} if more else dict(prefill_chunk_size=None)), **more))
    alike(found[1], found[0], mask_of(inputs))


def test_holes_in_the_mask_and_embeddings():
    model = KINDS["Llama"]()
    inputs = dict(input_ids=torch.tensor([[1, 2, 3, 1, 2, 7, 8], [4, 3, 5, 6, 7, 3, 4]]), attention_mask=torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 1, 1]]))
    ours, theirs = both(model, inputs, perturbed(model, 0.02))
    alike(ours, theirs, mask_of(inputs))
    embeds = dict(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]), attention_mask=torch.ones(2, 7).long())
    ours, theirs = both(model, embeds)
    alike(ours, theirs, mask_of(embeds))


@pytest.mark.parametrize("name", ["T5", "BART", "T5Gemma", "LED"])
def test_of_encoder_decoders(name):
    line = next(line for line in READERS if line.name == name)
    model, inputs = line.model(), sources(line.kind)
    ours, theirs = both(model, inputs, perturbed(model, 0.02))
    alike(ours, theirs, torch.ones(3 * len(next(iter(inputs.values()))), 1).long())
    assert ours.cross_attentions[0][0].shape[3] == theirs.cross_attentions[0][0].shape[3] > 1 and ours.encoder_attentions


@pytest.mark.share(1 / 8)
@pytest.mark.parametrize("name", ["BLOOM", "MPT", "Falcon (ALiBi)", "GPT-Neo (local layers)", "Mistral", "GPT-OSS", "Gemma 3n (text)", "Qwen3-Next", "LFM2", "Falcon-H1", "DeepSeek-V3", "HY v4"])
def test_of_families_with_ways_of_their_own(name):
    line = next((line for line in FAMILIES if line.name == name), None)
    if line is None:
        pytest.skip("not of this transformers")
    model, inputs = line.model("eager"), padded(repetitive(12, 7))
    ours, theirs = both(model, inputs, perturbed(model, 0.02), use_cache=True)
    alike(ours, theirs, mask_of(inputs), 5e-5)


@pytest.mark.share(1 / 8)
@pytest.mark.parametrize("line", [line for line in seeing.FAMILIES if line.ragged], ids=lambda line: line.name)
def test_beside_what_is_shown(line):
    model, inputs = line.model(), line.prompts(1)
    model.set_attn_implementation("eager")
    try:
        theirs = enabled(model).generate(**inputs, **WANTED)
    except (AttributeError, RuntimeError, ValueError):
        pytest.skip("plain generate fails")
    ours = model.generate(**inputs, **WANTED, speculative=True, num_assistant_tokens=4)
    alike(ours, theirs, mask_of(inputs), 5e-5)


def test_another_beam_is_seen():
    """The comparison rejects what belongs to another beam, layer or step."""
    model, inputs = KINDS["Llama"](), padded(repetitive(9))
    for spoil in (lambda out: out.hidden_states[4][1].copy_(out.hidden_states[4][1][[1, 0, 2]].clone()), lambda out: out.attentions[4][1].copy_(out.attentions[4][0]),
                  lambda out: out.hidden_states[4][1].copy_(out.hidden_states[5][1])):
        ours, theirs = both(model, inputs)
        spoil(ours)
        with pytest.raises(AssertionError):
            alike(ours, theirs, mask_of(inputs))
