"""The other ways in: transformers' custom_generate, the folder layout, and drafts under stock assisted decoding."""

import sys
from pathlib import Path

import pytest
import torch

import hf_specdec
from hf_specdec import SpeculativeConfig, SpeculativeDecoder
from hf_specdec.drafts import Draft, ModelDraft, NGramDraft, PromptLookupDraft
from tests.helpers import ScriptedDraft, padded, perturbed, plain, prompts, repetitive, tiny_llama

ROOT = Path(__file__).resolve().parents[2]
ROWS = repetitive(13) + prompts(2, 7, seed=2)
OPTIONS = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)


@pytest.fixture
def target():
    return tiny_llama(1)


@pytest.fixture
def expected(target):
    return plain(target, ROWS, max_new_tokens=12)


# --- custom_generate=SpeculativeDecoder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["none", "model", "draft"])
def test_the_decoder_object_works_on_a_model_that_is_not_enabled(target, expected, draft):
    made = {"none": None, "model": perturbed(target), "draft": PromptLookupDraft()}[draft]
    kind = type(target)
    out = target.generate(**padded(ROWS), custom_generate=SpeculativeDecoder(made, SpeculativeConfig(num_assistant_tokens=3)), **OPTIONS)
    assert out[:, 13:].tolist() == expected and type(target) is kind


def test_the_decoder_object_can_be_used_again_and_by_another_model(target, expected):
    decoder, other = SpeculativeDecoder(PromptLookupDraft(), {"num_assistant_tokens": 4}), tiny_llama(2)
    for model, texts in ((target, expected), (other, plain(other, ROWS, max_new_tokens=12)), (target, expected)):
        assert model.generate(**padded(ROWS), custom_generate=decoder, **OPTIONS)[:, 13:].tolist() == texts


def test_the_decoder_object_gives_the_dict_with_the_trace(target):
    out = target.generate(**padded(ROWS), custom_generate=SpeculativeDecoder(config={"num_assistant_tokens": 2}), return_dict_in_generate=True,
                          output_scores=True, **OPTIONS)
    assert out.speculation.config["num_assistant_tokens"] == 2 and len(out.scores) == 12


def test_the_decoder_object_samples_as_generate_does(target):
    config = {"seed": 4, "num_assistant_tokens": 3}
    options = {**OPTIONS, "do_sample": True, "temperature": 0.8}
    one = target.generate(**padded(ROWS), custom_generate=SpeculativeDecoder(perturbed(target), config), **options)
    two = hf_specdec.enable(target).generate(**padded(ROWS), assistant_model=perturbed(target), speculative=config, **options)
    assert torch.equal(one, two)


def test_the_decoder_object_works_on_an_enabled_model_too(target, expected):
    out = hf_specdec.enable(target).generate(**padded(ROWS), custom_generate=SpeculativeDecoder(), **OPTIONS)
    assert out[:, 13:].tolist() == expected


def test_a_stop_string_bound_to_the_decoder_ends_the_text(target):
    from tests.generate.test_stopping import letters, text_of

    row = ROWS[:1]
    stop = text_of(plain(target, row)[0][4:6])
    reference = target.generate(**padded(row), stop_strings=[stop], tokenizer=letters(), **OPTIONS)
    out = target.generate(**padded(row), custom_generate=SpeculativeDecoder(tokenizer=letters(), stop_strings=[stop]), **OPTIONS)
    assert torch.equal(out, reference) and out.shape[1] < 25


# --- the folder layout --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The repository's custom_generate folder where a user would have it, without its requirements, which a test has already."""
    source = ROOT / "custom_generate"
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text((source / "generate.py").read_text())
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path


def test_the_folder_can_be_named_in_custom_generate(target, expected, folder):
    out = target.generate(**padded(ROWS), custom_generate=str(folder), trust_remote_code=True, **OPTIONS)
    assert out[:, 13:].tolist() == expected


def test_the_folder_takes_the_options_of_generate(target, expected, folder):
    out = target.generate(**padded(ROWS), custom_generate=str(folder), trust_remote_code=True, assistant_model=perturbed(target),
                          num_assistant_tokens=3, return_dict_in_generate=True, **OPTIONS)
    assert out.sequences[:, 13:].tolist() == expected
    assert out.speculation.config["num_assistant_tokens"] == 3
    assert {entry.source for entries in out.speculation.rounds for entry in entries} == {"model"}


def test_the_folder_asks_for_the_package_and_for_nothing_else():
    assert (ROOT / "custom_generate" / "requirements.txt").read_text().split() == ["hf-specdec"]
    assert len((ROOT / "custom_generate" / "generate.py").read_text().splitlines()) <= 12


# --- drafts as stock CandidateGenerators ----------------------------------------------------------------------------------------


def stock_assisted(target, row, draft, monkeypatch):
    """transformers' own assisted decoding, given `draft` in the place of the candidate generator that it would have made; cut, because
    transformers 5.10 leaves it to its own generators not to propose more than may still come."""
    monkeypatch.setattr(type(target), "_get_candidate_generator", lambda self, **kwargs: draft)
    return target.generate(**padded([row]), prompt_lookup_num_tokens=3, **OPTIONS)[0, len(row):].tolist()[: OPTIONS["max_new_tokens"]]


DRAFTS = {
    "model": lambda target: ModelDraft(perturbed(target)),
    "lookup": lambda target: PromptLookupDraft(),
    "ngram": lambda target: NGramDraft.from_tokens([ROWS[0] * 3], order=3, vocab_size=61, min_order=1),
    "a user's own": lambda target: ScriptedDraft.knowing([ROWS[0] + plain(target, ROWS[:1])[0]]),
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_is_a_candidate_generator_of_transformers(target, expected, draft, monkeypatch):
    from transformers.generation import CandidateGenerator

    made = DRAFTS[draft](target)
    assert isinstance(made, Draft) and isinstance(made, CandidateGenerator)
    assert stock_assisted(target, ROWS[0], made, monkeypatch) == expected[0]


def test_a_draft_serves_stock_decoding_and_ours_in_turn(target, expected, monkeypatch):
    draft = ModelDraft(perturbed(target))
    for row, text in zip(ROWS, expected):
        with monkeypatch.context() as patched:
            assert stock_assisted(target, row, draft, patched) == text
    out = target.generate(**padded(ROWS), custom_generate=SpeculativeDecoder(draft, {"num_assistant_tokens": 3}), **OPTIONS)
    assert out[:, 13:].tolist() == expected
    with monkeypatch.context() as patched:
        assert stock_assisted(target, ROWS[0], draft, patched) == expected[0]


def test_stock_decoding_goes_on_with_the_same_text_after_a_call_of_ours(target):
    for draft in (PromptLookupDraft(), ModelDraft(perturbed(target))):
        before = draft.get_candidates(torch.tensor(ROWS[:1]))[0]
        target.generate(**padded(ROWS), custom_generate=SpeculativeDecoder(draft, {"num_assistant_tokens": 3}), **OPTIONS)
        assert torch.equal(draft.get_candidates(torch.tensor(ROWS[:1]))[0], before)


def test_stock_decoding_is_batch_1(target):
    with pytest.raises(ValueError, match="batch size 1"):
        PromptLookupDraft().get_candidates(torch.tensor([[1, 2], [3, 4]]))


def test_a_draft_proposes_num_assistant_tokens_to_stock_decoding(target):
    draft = ModelDraft(target)
    draft.num_assistant_tokens = 7
    ids, laws = draft.get_candidates(torch.tensor(ROWS[:1]))
    assert ids.shape == (1, 20) and laws is None
    assert ids[0, 13:].tolist() == plain(target, ROWS[:1], max_new_tokens=7)[0]


# --- a user's own draft -----------------------------------------------------------------------------------------------------------


def test_the_draft_that_the_documents_show_drafts_and_changes_nothing(target, expected):
    text = (ROOT / "docs" / "drafts.md").read_text(encoding="utf-8")
    program = text.split("## A draft of your own")[1].split("```python\n")[1].split("model.generate(")[0]
    names: dict = {}
    exec(compile(program, "drafts.md", "exec"), names)  # noqa: S102
    out = hf_specdec.enable(target).generate(**padded(ROWS), assistant_model=names["EchoDraft"](), speculative=True, return_dict_in_generate=True, **OPTIONS)
    assert out.sequences[:, 13:].tolist() == expected and out.speculation.proposed > 0
    assert names["after_the_last"]([5, 1, 7, 5, 2, 5]) == [2, 5] and names["after_the_last"]([5]) == []


def test_what_a_draft_is_told_of_the_call(target):
    seen = []

    class Curious(ScriptedDraft):
        def start(self, context):
            seen.append((context.max_length, context.vocab_size, context.device.type, context.sampler.do_sample, [list(row) for row in context.rows]))

    hf_specdec.enable(target).generate(**padded(ROWS), assistant_model=Curious(lambda row: []), speculative=True, **OPTIONS)
    ((most, vocab, device, sampled, rows),) = seen
    assert (most, vocab, device, sampled) == (13 + 12, 61, "cpu", False)
    assert [row[: len(prompt)] for row, prompt in zip(rows, ROWS)] == ROWS


def test_a_draft_is_told_of_the_end_of_the_call(target):
    finished = []

    class Tidy(ScriptedDraft):
        def finish(self):
            finished.append(True)

    hf_specdec.enable(target).generate(**padded(ROWS), assistant_model=Tidy(lambda row: []), speculative=True, **OPTIONS)
    assert finished == [True]


def test_no_test_of_this_file_has_left_a_module_of_the_folder_behind():
    assert not [name for name in sys.modules if name.startswith("transformers_modules") and name.endswith("speculative")]


# --- inputs of the model that a draft cannot follow -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids"])
@pytest.mark.parametrize("family", ["GPT-2", "CodeGen"])
def test_positions_and_token_types_of_the_callers_own_are_honoured_or_refused_but_never_ignored(family, name):
    from tests.architectures import FAMILIES

    model = next(line for line in FAMILIES if line.name == family).model("eager")
    own = {"position_ids": torch.arange(13)[None] + 5, "token_type_ids": torch.full((1, 13), 7)}[name]
    reference = model.generate(**padded(ROWS[:1]), **{name: own}, **OPTIONS)
    try:
        out = hf_specdec.enable(model).generate(**padded(ROWS[:1]), **{name: own}, speculative=True, **OPTIONS)
    except ValueError as error:
        assert name in str(error)
    else:
        assert torch.equal(out, reference)


def test_a_mask_that_transformers_infers_from_the_padding_is_used(target):
    inputs = {"input_ids": padded(ROWS)["input_ids"]}
    stock = target.generate(**inputs, **OPTIONS)
    assert torch.equal(hf_specdec.enable(target).generate(**inputs, speculative=True, **OPTIONS), stock)


@pytest.mark.parametrize("way", ["positional", "inputs=", "bool mask", "inference mode"])
def test_other_ways_to_call_generate(target, expected, way):
    ids, model = torch.tensor(ROWS[:1]), hf_specdec.enable(target)
    with torch.inference_mode(way == "inference mode"):
        arguments = {"positional": ((ids,), {}), "inputs=": ((), dict(inputs=ids)), "inference mode": ((ids,), {}),
                     "bool mask": ((ids,), dict(attention_mask=torch.ones_like(ids, dtype=torch.bool)))}[way]
        out = model.generate(*arguments[0], **arguments[1], speculative=True, **OPTIONS)
    assert out[:, 13:].tolist() == expected[:1]
