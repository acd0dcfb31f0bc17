"""Every family of the table decodes what plain generate decodes, alone and in ragged batches, or is refused by name."""

import pytest

import hf_specdec
from tests.architectures import ATTENTION, FAMILIES, OWN_WAYS, REFUSED, offers, outcome, reference
from tests.helpers import FULL, build

REQUIRED = FAMILIES.index(next(family for family in FAMILIES if family.name == "Apertus"))
CASES = [(family, attn) for i, family in enumerate(FAMILIES) for attn in ATTENTION
         if FULL or attn == ("sdpa" if i < REQUIRED and i % 2 and offers(family, "sdpa") else "eager")]
cases = pytest.mark.parametrize(("family", "attn"), CASES, ids=[f"{family.name}-{attn}" for family, attn in CASES])


def need(family, attn):
    if not offers(family, attn):
        pytest.skip(f"transformers has no {attn} attention for {family.name}")


@pytest.mark.share(1 / 4)
@cases
def test_batch_1_equals_plain_generate(family, attn):
    need(family, attn)
    assert outcome(family, attn, batch=1) == "exact"


@pytest.mark.share(1 / 4)
@cases
def test_a_ragged_batch_equals_plain_generate_row_by_row_or_is_refused(family, attn):
    need(family, attn)
    result = outcome(family, attn, batch=3)
    assert result == "exact" if family.ragged else result.startswith("refused: ") and "the rows one by one" in result


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize(("family", "attn"), CASES if FULL else CASES[:REQUIRED], ids=lambda value: getattr(value, "name", value))
def test_a_tree_equals_plain_generate_or_is_refused(family, attn):
    need(family, attn)
    result = outcome(family, attn, batch=3 if family.trees else 1, tree=True)
    assert result == "exact" if family.trees else result.startswith("refused: target:") and "tree" in result


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_reference_texts_are_neither_stuck_nor_alike(family):
    _, texts = reference(family.name, "eager")
    assert len({token for text in texts for token in text}) >= 5


@pytest.mark.parametrize(("name", "kind", "settings"), REFUSED, ids=[line[0] for line in REFUSED])
def test_recurrent_models_are_refused_when_they_are_enabled(name, kind, settings):
    model = build(kind, attn="eager", **settings)
    with pytest.raises(ValueError, match=f"(?s)model: {type(model).__name__}.*(recurrent state|layers of type|carries a state|keys of its own).*speculative=False"):
        hf_specdec.enable(model)


@pytest.mark.parametrize(("name", "kind", "settings"), OWN_WAYS, ids=[line[0] for line in OWN_WAYS])
def test_models_that_read_their_text_in_ways_of_their_own_are_refused_when_they_are_enabled(name, kind, settings):
    model = build(kind, attn="eager", **settings)
    with pytest.raises(ValueError, match=f"model: {type(model).__name__} .*(so its passes cannot be ours. Use speculative=False|pass it as assistant_model)"):
        hf_specdec.enable(model)


def test_a_recurrent_draft_whose_layers_have_a_forward_of_their_own_is_refused_by_its_argument():
    model = build("recurrent_gemma", attn="eager", vocab_size=61, hidden_size=32, num_attention_heads=4, num_key_value_heads=1, lru_width=32, num_hidden_layers=3)
    part = model.model.layers[0].temporal_block.rg_lru
    part.forward = part.forward
    with pytest.raises(ValueError, match="assistant_model: RecurrentGemma.*cannot be rolled back"):
        hf_specdec.SpeculativeDecoder(model)
