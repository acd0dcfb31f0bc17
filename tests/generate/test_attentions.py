"""output_attentions=True: what every token looked at, in the shapes of plain generate, whatever was drafted."""

import inspect
from functools import partial

import pytest
import torch

from hf_specdec import mx
from hf_specdec.drafts import ModelDraft, NGramRecyclingDraft
from tests import seeing
from tests.architectures import FAMILIES, OWN_CACHES
from tests.generate import per_token
from tests.generate.per_token import ROWS, SHARED, alone_and_in_a_batch, each_draft
from tests.helpers import KnowingTreeDraft, build, enabled, padded, perturbed, repetitive, tiny_llama

WANTED = SHARED | dict(output_attentions=True)
both = partial(per_token.both, WANTED)
SMALL = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
WINDOWED = dict(SMALL, sliding_window=5, layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False)


def eager_llama(seed: int = 0, **settings):
    return tiny_llama(seed, attn="eager", **settings)


def alike(ours, theirs, mask: torch.Tensor, lengths: list[int] | None = None) -> None:
    """Token by token, layer by layer; of tokens of padding (`mask` [B, P]), and after a row's end, ours has zeros."""
    assert torch.equal(ours.sequences, theirs.sequences) and len(ours.attentions) == len(theirs.attentions) > 0
    for step, (own, other) in enumerate(zip(ours.attentions, theirs.attentions)):
        assert len(own) == len(other) and [part.shape for part in own] == [part.shape for part in other]
        for part, wanted in zip(own, other):
            kept = mask[:, -part.shape[2] :] if step == 0 else torch.tensor([[int(step < n)] for n in lengths or [99] * len(mask)])
            torch.testing.assert_close(part, torch.where(kept[:, None, :, None].bool(), wanted, 0.0), atol=1e-4, rtol=0)


@alone_and_in_a_batch
@each_draft
def test_they_are_those_of_plain_generate(rows, draft):
    model = eager_llama()
    ours, theirs, mask = both(model, rows, draft(model))
    alike(ours, theirs, mask)
    assert ours.speculation.proposed and len(ours.attentions[0]) == model.config.num_hidden_layers


@pytest.mark.parametrize("model", [lambda: eager_llama(), lambda: build("gemma3_text", attn="eager", **WINDOWED)], ids=["Llama", "Gemma 3"])
def test_columns_of_other_branches_are_gone(model):
    """Trees of which a path is accepted that is not the first."""
    model, texts = model(), repetitive(9, 6)
    plain = enabled(model).generate(**padded(texts), **WANTED).sequences[:, 9:].tolist()
    ours, theirs, mask = both(model, texts, KnowingTreeDraft([text + new for text, new in zip(texts, plain)]), k=10)
    alike(ours, theirs, mask)
    assert ours.speculation.accepted


@pytest.mark.share(1 / 8)
@pytest.mark.parametrize("line", [line for line in FAMILIES if line not in OWN_CACHES and line.window != "own cache"], ids=lambda line: line.name)
def test_of_every_family(line):
    """Of rows that are together, those of every row by itself, but for the columns of padding."""
    if (model := line.model("eager")).config.is_encoder_decoder or "encoder_outputs" in inspect.signature(model.forward).parameters:
        pytest.skip("a decoder of what an encoder has read")
    rows, draft = ROWS if line.ragged else ROWS[:1], perturbed(model, 0.02)
    if line.kind in ("mamba", "mamba2", "falcon_mamba"):
        with pytest.raises(ValueError, match="output_attentions=True: no layer of the target is attention"):
            enabled(model).generate(**padded(rows), **WANTED, speculative=True, assistant_model=draft)
        return
    ours = enabled(model).generate(**padded(rows), **WANTED, speculative=True, assistant_model=draft, num_assistant_tokens=4)
    for b, row in enumerate(rows):
        theirs = model.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row)).long(), **WANTED)
        for own, other in zip(ours.attentions, theirs.attentions):
            assert len(own) == len(other)
            for part, wanted in zip(own, other):
                part = part[b : b + 1, :, -wanted.shape[2] :]
                columns = min(part.shape[3], wanted.shape[3])
                torch.testing.assert_close(part[..., -columns:], wanted[..., -columns:], atol=2e-3, rtol=0)
                assert not part[..., :-columns].any() and (len(rows) > 1 or part.shape == wanted.shape)
    assert len(ours.attentions) == WANTED["max_new_tokens"]


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["alone", "batch"])
@pytest.mark.parametrize("kind, settings", [("gemma3_text", WINDOWED), ("mistral", dict(SMALL, sliding_window=5)), ("gpt_oss", dict(WINDOWED, num_local_experts=4, num_experts_per_tok=2))],
                         ids=["Gemma 3", "Mistral", "GPT-OSS"])
def test_layers_with_a_window_have_its_columns_alone(kind, settings, rows):
    model = build(kind, attn="eager", **settings)
    ours, theirs, mask = both(model, rows, perturbed(model, 0.02))
    alike(ours, theirs, mask)
    assert ours.attentions[0][0].shape[3] == 7 and ours.attentions[-1][0].shape[3] == 5


@pytest.mark.share(1 / 6)
@pytest.mark.parametrize("line", [line for line in seeing.FAMILIES if line.ragged], ids=lambda line: line.name)
def test_beside_what_is_shown(line):
    model, inputs = line.model(), line.prompts(1)
    model.set_attn_implementation("eager")
    try:
        theirs = enabled(model).generate(**inputs, **WANTED)
    except AttributeError:
        pytest.skip("plain generate fails")
    alike(model.generate(**inputs, **WANTED, speculative=True, assistant_model=ModelDraft(perturbed(model, 0.02))), theirs, inputs["attention_mask"])


def test_rows_that_have_ended_have_zeros():
    alike(*per_token.with_rows_that_end(WANTED, eager_llama()))


@pytest.mark.parametrize("model", [lambda: eager_llama(), lambda: build("gemma3_text", attn="eager", **WINDOWED)], ids=["Llama", "Gemma 3"])
def test_behind_a_filled_cache_the_first_are_those_of_what_is_new(model):
    ours, theirs, mask = per_token.behind_a_filled_cache(WANTED, model())
    alike(ours, theirs, mask)
    assert ours.attentions[0][-1].shape[2:] == (4, mask.shape[1])


def test_behind_a_prompt_of_embeddings():
    alike(*per_token.behind_embeddings(WANTED, eager_llama()))


def test_behind_a_mask_with_holes():
    model, ids = enabled(eager_llama()), torch.tensor([[1, 2, 3, 1, 2, 7, 8], [4, 3, 5, 6, 7, 3, 4]])
    mask = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 1, 1]])
    theirs = model.generate(ids, attention_mask=mask, **WANTED)
    alike(model.generate(ids, attention_mask=mask, **WANTED, speculative=True, num_assistant_tokens=4), theirs, mask)


@pytest.mark.parametrize("change", [mx.compress, mx.to_tiles], ids=["mx", "tiles"])
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_of_the_kernels(change, kind):
    """GPT-OSS knows no sdpa; its attention is the kernel's where nobody asks for weights."""
    settings = dict(WINDOWED, num_local_experts=4, num_experts_per_tok=2) if kind == "gpt_oss" else SMALL
    model = change(build(kind, attn="eager", **dict(settings, hidden_size=64, intermediate_size=96)))
    alike(*both(model, ROWS))


def test_sampling_prompts_in_pieces_and_several_sequences():
    model = enabled(eager_llama())
    options = dict(WANTED, do_sample=True, num_return_sequences=2)
    one, other = (model.generate(**padded(ROWS), **options, prefill_chunk_size=chunk, speculative={"seed": 3}, num_assistant_tokens=4) for chunk in (None, 3))
    alike(one, other, padded(ROWS)["attention_mask"].repeat_interleave(2, 0))
    whole = model(input_ids=one.sequences[:1], output_attentions=True).attentions
    for step, own in enumerate(one.attentions[1:], start=7):
        torch.testing.assert_close(own[-1][:1], whole[-1][:, :, step : step + 1, : step + 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", [lambda: eager_llama(), lambda: build("gemma3_text", attn="eager", **WINDOWED)], ids=["Llama", "Gemma 3"])
@pytest.mark.parametrize("draft", [lambda model: perturbed(model, 0.02), lambda model: NGramRecyclingDraft()], ids=["model", "tree"])
def test_without_a_cache_every_pass_is_one_over_the_whole_text(model, draft):
    model = model()
    ours, theirs, mask = both(model, ROWS, draft(model), use_cache=False, output_hidden_states=True)
    assert torch.equal(ours.sequences, theirs.sequences) and len(ours.attentions) == len(theirs.attentions)
    for step in range(len(theirs.attentions)):
        kept = torch.cat([mask, mask.new_ones(3, step)], dim=1).bool()
        for part, wanted in zip(ours.attentions[step], theirs.attentions[step]):
            torch.testing.assert_close(part, torch.where(kept[:, None, :, None], wanted, 0.0), atol=1e-4, rtol=0)
        for part, wanted in zip(ours.hidden_states[step], theirs.hidden_states[step]):
            torch.testing.assert_close(part, torch.where(kept[:, :, None], wanted, 0.0), atol=2e-3, rtol=0)


def test_passes_are_not_compiled_then():
    model = enabled(eager_llama())
    ours = model.generate(**padded(ROWS[:1]), **WANTED, speculative={"compile": True}, num_assistant_tokens=4)
    alike(ours, model.generate(**padded(ROWS[:1]), **WANTED), torch.ones(1, 7))


def test_beside_hidden_states():
    ours, theirs, mask = both(eager_llama(), ROWS, NGramRecyclingDraft(), output_hidden_states=True)
    alike(ours, theirs, mask)
    torch.testing.assert_close(ours.hidden_states[-1][-1], theirs.hidden_states[-1][-1], atol=2e-3, rtol=0)


def test_sdpa_has_none_in_plain_generate_either():
    ours, theirs, _ = both(tiny_llama(), ROWS)
    assert ours.attentions == theirs.attentions
    assert enabled(eager_llama()).generate(**padded(ROWS), **WANTED | {"output_attentions": False}, speculative=True).attentions is None
    assert torch.is_tensor(enabled(eager_llama()).generate(**padded(ROWS), **WANTED | {"return_dict_in_generate": False}, speculative=True))


def test_what_is_drafted_and_rejected_leaves_nothing():
    """A draft that is always wrong, and one that is always right."""
    model = eager_llama()
    for draft in (eager_llama(7), eager_llama()):
        alike(*both(model, [*ROWS, *repetitive(9)], draft, k=6))


def test_another_token_is_seen():
    """The comparison rejects what belongs to another place."""
    ours, theirs, mask = both(eager_llama(), ROWS)
    ours.attentions[3][0][..., [2, 3]] = ours.attentions[3][0][..., [3, 2]]
    with pytest.raises(AssertionError):
        alike(ours, theirs, mask)
