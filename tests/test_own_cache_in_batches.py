"""Rows of a batch whose cache is of a kind of its own: they go on from the same column, whatever each accepts, and are read as plain generate reads them."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_specdec.bench.simulated import SimulatedTable
from hf_specdec.caches import CACHE
from hf_specdec.drafts import ModelDraft, NGramRecyclingDraft
from hf_specdec.masks import Placing
from hf_specdec.own_cache import Snapshots
from tests.architectures import OWN_CACHES
from tests.helpers import enabled, new_tokens, padded, prompts, tiny_llama

HERE = {family.name: family for family in OWN_CACHES if family.kind in CONFIG_MAPPING and CACHE == "cache"}
pytestmark = pytest.mark.skipif(not HERE, reason="this transformers has none of these models")
every_kind = pytest.mark.parametrize("kind", HERE)
LEVEL = ("DeepSeek-V4", "MiniMax-M3 (text, sparse)")  # whose padding plain generate counts as tokens
PLAIN = dict(do_sample=False, pad_token_id=0, eos_token_id=None)


def call_of(kind: str, seed: int = 5, pad: int = 0) -> dict:
    """Prompts of a batch that plain generate reads as texts, and what has to be said beside them."""
    rows = prompts(*((12, 12, 12) if kind in LEVEL else (12, 1, 20, 12)), seed=seed)
    return {**padded(rows, pad), "use_cache": kind not in ("RWKV", "MiniMax")}


@every_kind
@pytest.mark.parametrize(("seed", "rate", "k"), [(0, 0.8, 4), (1, 0.5, 3)])
def test_texts_are_those_of_plain_generate_in_the_same_batch(kind, seed, rate, k):
    model, inputs = enabled(HERE[kind].model("eager", seed)), call_of(kind, seed)
    wanted = model.generate(**inputs, max_new_tokens=28, **PLAIN)
    draft = SimulatedTable(new_tokens(wanted, inputs), rate, seed)
    out = model.generate(**inputs, max_new_tokens=28, speculative={"num_assistant_tokens": k}, assistant_model=draft, return_dict_in_generate=True, **PLAIN)
    assert torch.equal(out.sequences, wanted)
    assert 0.1 < out.speculation.acceptance_rate < 1 and CACHE not in out


@every_kind
def test_rows_end_one_after_the_other(kind):
    model, inputs = enabled(HERE[kind].model("eager", 0)), call_of(kind)
    texts = new_tokens(model.generate(**inputs, max_new_tokens=30, **PLAIN), inputs)
    ends = [text[7 * b + 3] for b, text in enumerate(texts)]
    wanted = model.generate(**inputs, max_new_tokens=30, **{**PLAIN, "eos_token_id": ends})
    for draft in (SimulatedTable(texts, 0.7, 0), None):
        out = model.generate(**inputs, max_new_tokens=30, speculative={"num_assistant_tokens": 4}, assistant_model=draft, return_dict_in_generate=True, **{**PLAIN, "eos_token_id": ends})
        assert torch.equal(out.sequences, wanted) and len(set(out.speculation.new_tokens)) > 1


@pytest.mark.parametrize("kind", [kind for kind in ("xLSTM", "RWKV") if kind in HERE])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("beams", [1, 2])
def test_padding_that_plain_generate_reads_as_text_is_read_as_text(kind, rows, beams):
    model = enabled(HERE[kind].model("eager", 0))
    inputs = {**{name: part[-rows:] for name, part in padded(prompts(12, 1, 20, 9, seed=1), pad=7).items()}, "use_cache": False, "num_beams": beams}
    wanted = model.generate(**inputs, max_new_tokens=20, **PLAIN)
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, speculative=True, **PLAIN), wanted)
    inputs["input_ids"] = torch.where(inputs["attention_mask"] == 0, 8, inputs["input_ids"])
    assert not torch.equal(model.generate(**inputs, max_new_tokens=20, speculative=True, **PLAIN)[:, 20:], wanted[:, 20:])


@every_kind
@pytest.mark.parametrize("sample", [False, True])
def test_beams_are_those_of_plain_beam_search(kind, sample):
    model, inputs = enabled(HERE[kind].model("eager", 0)), call_of(kind)
    inputs = {name: part[:3] if torch.is_tensor(part) else part and kind != "xLSTM" for name, part in inputs.items()}
    options = dict(num_beams=3, num_return_sequences=2, max_new_tokens=14, **{**PLAIN, "do_sample": sample})
    torch.manual_seed(1)
    wanted = model.generate(**inputs, **options)
    torch.manual_seed(1)
    assert torch.equal(model.generate(**inputs, **options, speculative=True, num_assistant_tokens=3), wanted)


@every_kind
def test_hidden_states_are_told_row_by_row(kind):
    model, inputs = enabled(HERE[kind].model("eager", 0)), {**padded(prompts(9, 9, seed=1)), "use_cache": kind != "RWKV"}
    options = dict(max_new_tokens=9, output_hidden_states=True, output_logits=True, return_dict_in_generate=True, **PLAIN)
    wanted = model.generate(**inputs, **options)
    out = model.generate(**inputs, **options, speculative=True, assistant_model=SimulatedTable(new_tokens(wanted, inputs), 0.7, 0))
    torch.testing.assert_close([*out.logits], [*wanted.logits], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close([[*step] for step in out.hidden_states], [[*step] for step in wanted.hidden_states], atol=2e-3, rtol=1e-3)


def test_states_that_went_on_with_what_one_row_has_rejected_would_be_found_out(monkeypatch):
    """Negative control."""
    model, inputs = enabled((HERE.get("xLSTM") or pytest.skip("this transformers does not have it")).model("eager", 0)), call_of("xLSTM")
    wanted, right = model.generate(**inputs, max_new_tokens=40, **PLAIN), Snapshots.back_to

    def wrong(self, lengths, settled=True):
        last, there = self.kept[-1:], right(self, lengths, settled)
        self.kept = [(columns, last[0][1]) for columns, _ in self.kept]
        return there

    monkeypatch.setattr(Snapshots, "back_to", wrong)
    draft = SimulatedTable(new_tokens(wanted, inputs), 0.8, 0)
    assert not torch.equal(model.generate(**inputs, max_new_tokens=40, speculative={"num_assistant_tokens": 4}, assistant_model=draft, **PLAIN), wanted)


def test_padding_that_is_not_hidden_would_be_found_out(monkeypatch):
    """Negative control."""
    model, inputs = enabled((HERE.get("OpenAI GPT") or pytest.skip("this transformers does not have it")).model("eager", 0)), call_of("OpenAI GPT")
    wanted, right = model.generate(**inputs, max_new_tokens=20, **PLAIN), Placing._in_columns
    monkeypatch.setattr(Placing, "_in_columns", lambda *args: right(*args) | {"attention_mask": None})
    assert not torch.equal(model.generate(**inputs, max_new_tokens=20, speculative=True, **PLAIN), wanted)


@pytest.mark.parametrize(("kind", "call", "words"), [
    ("RWKV", {}, "target: plain generate\\(\\) of RwkvForCausalLM mixes the rows of a batch.*Pass use_cache=False"),
    ("RWKV", dict(lengths=(9,), num_return_sequences=2, do_sample=True), "mixes the rows of a batch"),
    ("MiniMax", {}, "attention_mask: plain generate\\(\\) of MiniMaxForCausalLM shows the padding.*first layer is no attention.*Pass use_cache=False"),
    ("MiniMax", dict(lengths=(9,), num_beams=2), "num_beams=2: the states of MiniMaxForCausalLM do not follow the beams.*Pass use_cache=False"),
    *((kind, {}, "attention_mask: plain generate.* counts the padding of a batch.*Give prompts of one length together, or generate the rows one by one") for kind in LEVEL)])
def test_what_plain_generate_mixes_up_itself_is_refused_by_name(kind, call, words):
    model = enabled((HERE.get(kind) or pytest.skip("this transformers does not have it")).model("eager", 0))
    inputs = padded(prompts(*call.pop("lengths", (9, 5)), seed=1))
    with pytest.raises(ValueError, match=words):
        model.generate(**inputs, max_new_tokens=4, speculative=True, **{**PLAIN, **call})


@pytest.mark.parametrize("kind", [kind for kind in ("OpenAI GPT", "xLSTM") if kind in HERE])
def test_a_draft_model_of_this_kind_serves_one_row_and_trees_none(kind):
    model, ids = HERE[kind].model("eager", 0), torch.tensor(prompts(9, 9, seed=1))
    with pytest.raises(ValueError, match="assistant_model: .*cache of its own kind, along one text, so rows .*one by one"):
        enabled(tiny_llama()).generate(ids, speculative=True, assistant_model=ModelDraft(model), **PLAIN)
    with pytest.raises(ValueError, match="along one text, which branches of a tree cannot share"):
        enabled(model).generate(ids, speculative=True, assistant_model=NGramRecyclingDraft(), **PLAIN)
