"""What an enabled model does in calls that say nothing of speculation: enable(model, speculative=..., assistant_model=...)."""

import copy
import pickle
import warnings

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList, TextStreamer, pipeline

import hf_specdec
from hf_specdec import SpeculativeConfig, loop
from hf_specdec.drafts import ModelDraft, UniformDraft
from tests.helpers import padded, perturbed, plain, prompts, repetitive, tiny_llama, word_tokenizer

ROWS = repetitive(12)
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def rounds(monkeypatch):
    """Counts the rounds of speculative loops."""
    seen, own = [], loop.SpeculativeLoop.round

    def round(self):
        seen.append(self.draft.name)
        own(self)

    monkeypatch.setattr(loop.SpeculativeLoop, "round", round)
    return seen


def call(model, rows=ROWS, **options):
    return model.generate(**padded(rows), **OPTIONS, **options)


def test_a_draft_that_is_named_replaces_one_that_was_passed(rounds):
    model = hf_specdec.enable(tiny_llama(), speculative=True, assistant_model=UniformDraft())
    hf_specdec.enable(model, speculative={"num_assistant_tokens": 3})
    call(model)
    assert set(rounds) == {"uniform"}
    hf_specdec.enable(model, speculative={"draft": "suffix_automaton"})
    rounds.clear()
    call(model)
    assert set(rounds) == {"suffix_automaton"}


def test_a_call_that_says_nothing_speculates(rounds):
    model = hf_specdec.enable(tiny_llama(), speculative=True)
    text = call(model)
    assert rounds and text[0, 12:].tolist() == plain(tiny_llama(), ROWS, max_new_tokens=12)[0]
    rounds.clear()
    assert torch.equal(call(model, speculative=False), text) and not rounds


@pytest.mark.parametrize("speculative", [{"draft": "uniform"}, SpeculativeConfig(draft="uniform", num_assistant_tokens=3)], ids=["dict", "config"])
def test_with_options(speculative, rounds):
    call(hf_specdec.enable(tiny_llama(), speculative=speculative))
    assert set(rounds) == {"uniform"}


def test_with_a_draft(rounds):
    target = tiny_llama()
    model = hf_specdec.enable(tiny_llama(), speculative=True, assistant_model=ModelDraft(perturbed(target)))
    call(model)
    assert set(rounds) == {"model"}
    rounds.clear()
    call(model, assistant_model=UniformDraft())
    assert set(rounds) == {"uniform"}


@pytest.mark.parametrize("wrapped", [False, True], ids=["model", "draft"])
def test_a_draft_with_another_vocabulary_is_refused_as_it_is_said(wrapped):
    model, other = hf_specdec.enable(tiny_llama()), tiny_llama(2, vocab_size=31)
    with pytest.raises(ValueError, match=r"vocabulary of 31 tokens, the target one of 61.*TranslatedDraft\(model, tokenizer, draft_tokenizer\)"):
        hf_specdec.enable(model, speculative=True, assistant_model=ModelDraft(other) if wrapped else other)
    with pytest.raises(ValueError, match="vocabulary of 31 tokens"):
        hf_specdec.enable(model, assistant_model=other)
    assert torch.equal(call(model), call(hf_specdec.disable(model)))


def test_a_draft_alone_is_that_of_calls_which_ask_for_speculation(rounds):
    target = tiny_llama()
    model = hf_specdec.enable(tiny_llama(), assistant_model=perturbed(target))
    call(model)
    assert not rounds
    call(model, speculative=True)
    assert set(rounds) == {"model"}


def test_what_was_said_stays_until_it_is_taken_back(rounds):
    model = hf_specdec.enable(tiny_llama(), speculative=True)
    assert hf_specdec.enable(model) is model and (call(model) is not None and rounds)
    rounds.clear()
    hf_specdec.enable(model, speculative=False)
    call(model)
    assert not rounds
    hf_specdec.enable(model, speculative=True)
    hf_specdec.enable(hf_specdec.disable(model))
    call(model)
    assert not rounds


def test_code_that_calls_generate_itself(rounds):
    model, tokenizer = hf_specdec.enable(tiny_llama(), speculative=True), word_tokenizer(range(64))
    made = pipeline("text-generation", model=model, tokenizer=tokenizer, max_new_tokens=5, do_sample=False)
    assert made(tokenizer.decode(ROWS[0])) and rounds


def test_what_transformers_fills_into_a_config_is_not_asked_for(rounds):
    """The pipelines of transformers 5.17 pass a config with a value for everything."""
    filled = dict(num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.4, assistant_lookbehind=10, target_lookbehind=10)
    model = hf_specdec.enable(tiny_llama(), speculative=True)
    for drafted, k in ((20, "auto"), (5, 5)):
        config = GenerationConfig(max_new_tokens=5, num_assistant_tokens=drafted, **filled)
        output = model.generate(**padded(ROWS), generation_config=config, return_dict_in_generate=True)
        assert rounds and output.speculation.config["num_assistant_tokens"] == k
        rounds.clear()
    with pytest.raises(ValueError, match="assistant_lookbehind=3: this tunes transformers' own"):
        model.generate(**padded(ROWS), generation_config=GenerationConfig(max_new_tokens=5, assistant_lookbehind=3), speculative=True)


@pytest.mark.parametrize(("options", "word"), [(dict(max_matching_ngram_size=3, prompt_lookup_num_tokens=3, eos_token_id=63), "max_matching_ngram_size"),
                                               (dict(guidance_scale=1.5, num_beams=2, do_sample=True), "guidance_scale")], ids=["lookup", "guidance"])  # fmt: skip
def test_a_call_that_is_refused_is_stock_and_says_why(options, word, rounds):
    model, stock = hf_specdec.enable(tiny_llama(), speculative=True), tiny_llama()
    results = []
    for each in (model, stock):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            results.append(each.generate(**padded(ROWS), **{**OPTIONS, **options}))
        said = [str(one.message) for one in seen if "without speculation" in str(one.message)]
        assert (len(said) == 1 and word in said[0]) if each is model else not said
    assert torch.equal(*results) and not rounds
    with pytest.raises(ValueError, match=word):
        model.generate(**padded(ROWS), speculative=True, **{**OPTIONS, **options})


def test_an_error_in_the_midst_of_a_call_is_not_hidden():
    class Broken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise ValueError("in the midst")

    model = hf_specdec.enable(tiny_llama(), speculative=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="in the midst"):
            call(model, stopping_criteria=StoppingCriteriaList([Broken()]))


def test_a_wrong_call_fails_as_it_does_without():
    model = hf_specdec.enable(tiny_llama(), speculative=True)
    with pytest.warns(UserWarning, match="without speculation"), pytest.raises(ValueError, match="nonsense"):
        call(model, nonsense=1)


def test_options_that_no_call_could_have_are_refused_at_once():
    for speculative, word in (({"num_assistant_tokens": 0}, "num_assistant_tokens"), ({"nonsense": 1}, "nonsense"), ("yes", "speculative")):
        with pytest.raises((ValueError, TypeError), match=word):
            hf_specdec.enable(tiny_llama(), speculative=speculative)
    with pytest.raises((ValueError, TypeError), match="assistant_model"):
        hf_specdec.enable(tiny_llama(), speculative=True, assistant_model=3)


def test_the_draft_is_no_part_of_the_model(tmp_path, rounds):
    model = tiny_llama()
    before = sum(parameter.numel() for parameter in model.parameters()), len(model.state_dict()), len(list(model.modules()))
    hf_specdec.enable(model, speculative=True, assistant_model=perturbed(model))
    assert before == (sum(parameter.numel() for parameter in model.parameters()), len(model.state_dict()), len(list(model.modules())))
    model.save_pretrained(tmp_path)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        rounds.clear()
        assert torch.equal(call(other), call(model, speculative=False)) and rounds


def test_a_streamer_and_a_config_are_as_ever(capsys, rounds):
    model, tokenizer = hf_specdec.enable(tiny_llama(), speculative=True), word_tokenizer(range(64))
    call(model, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out and rounds
    rounds.clear()
    model.generate(**padded(ROWS), generation_config=GenerationConfig(speculative=False, **OPTIONS))
    assert not rounds


class LikeMultiToken(StoppingCriteria):
    """As lm-eval has it: rows counted, the prompt's length that of the padded batch."""

    def __init__(self, token: int, initial_decoder_input_length: int, batch_size: int):
        self.token, self.initial_decoder_input_length, self.done_tracker = token, initial_decoder_input_length, [False] * batch_size

    def __call__(self, input_ids, scores, **kwargs):
        texts = input_ids[:, self.initial_decoder_input_length :].tolist()
        for i, done in enumerate(self.done_tracker):
            self.done_tracker[i] = done or self.token in texts[i]
        return False not in self.done_tracker


def test_lm_evals_criterion_ends_every_row_of_a_batch_where_it_ends_alone(rounds):
    rows, target = ROWS + prompts(5, seed=2), tiny_llama()
    texts = plain(target, rows, max_new_tokens=12)
    token = texts[1][4]
    model = hf_specdec.enable(tiny_llama(), speculative=True)
    inputs = padded(rows)
    criteria = StoppingCriteriaList([LikeMultiToken(token, inputs["input_ids"].shape[1], 2)])
    out = model.generate(**inputs, **OPTIONS, stopping_criteria=criteria)[:, inputs["input_ids"].shape[1] :].tolist()
    expected = [text[: text.index(token) + 1] if token in text else text for text in texts]
    assert [row[: len(text)] for row, text in zip(out, expected)] == expected and rounds
    assert all(set(row[len(text) :]) <= {0} for row, text in zip(out, expected))


# --- refusals of the draft, and what they leave ---------------------------------------------------------------------------


class Refusing(UniformDraft):
    """Says no as the call begins, as drafts do that cannot follow a batch or an encoder."""

    def start(self, context):
        raise ValueError("assistant_model: not with this text")


class Puts:
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


def sampled(model, **options):
    torch.manual_seed(5)
    return model.generate(**padded(ROWS), **{**OPTIONS, "do_sample": True}, **options)


@pytest.mark.parametrize("busy", [True, False], ids=["in use", "refuses"])
def test_a_draft_that_refuses_leaves_a_stock_call(busy, rounds):
    draft = UniformDraft() if busy else Refusing()
    model, ours, stock = hf_specdec.enable(tiny_llama(), speculative=True, assistant_model=draft), Puts(), Puts()
    with draft.in_use() if busy else warnings.catch_warnings(), pytest.warns(UserWarning, match="without speculation.*assistant_model"):
        out = sampled(model, streamer=ours)
    assert torch.equal(out, sampled(tiny_llama(), streamer=stock)) and ours.tokens == stock.tokens and not rounds
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with draft.in_use() if busy else warnings.catch_warnings(), pytest.raises(ValueError, match="assistant_model"):
        call(model, speculative=True)
    assert torch.equal(before, torch.get_rng_state())


def test_the_warning_is_at_the_call():
    model = hf_specdec.enable(tiny_llama(), speculative=True)
    with pytest.warns(UserWarning, match="without speculation") as seen:
        model.generate(**padded(ROWS), num_beams=2, guidance_scale=1.5, **OPTIONS)
    assert {one.filename for one in seen if "without speculation" in str(one.message)} == {__file__}


def test_a_draft_of_a_call_that_is_refused_is_left_out():
    model = hf_specdec.enable(tiny_llama(), speculative=True)
    with pytest.warns(UserWarning, match="without speculation"):
        text = call(model, assistant_model=UniformDraft(), guidance_scale=1.5, num_beams=2)
    assert torch.equal(text, call(tiny_llama(), guidance_scale=1.5, num_beams=2))


def test_no_options_are_all_defaults(rounds):
    call(hf_specdec.enable(tiny_llama(), speculative={}))
    assert set(rounds) == {"prompt_lookup"}
    rounds.clear()
    call(hf_specdec.enable(tiny_llama(), assistant_model=UniformDraft()), speculative={})
    assert set(rounds) == {"uniform"}


def test_no_draft_by_position_is_the_one_that_was_said(rounds):
    model = hf_specdec.enable(tiny_llama(), speculative=True, assistant_model=UniformDraft())
    model.generate(padded(ROWS)["input_ids"], None, None, None, None, None, None, **OPTIONS)
    assert set(rounds) == {"uniform"}


def test_a_draft_by_position_is_taken_whatever_its_truth(rounds):
    class Empty(UniformDraft):
        def __len__(self):
            return 0

    model = hf_specdec.enable(tiny_llama(), speculative=True)
    model.generate(padded(ROWS)["input_ids"], None, None, None, None, None, Empty(), **OPTIONS)
    assert set(rounds) == {"uniform"}


def test_a_draft_that_is_the_model_itself(rounds):
    model = tiny_llama()
    hf_specdec.enable(model, speculative=True, assistant_model=model)
    for own in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        rounds.clear()
        assert torch.equal(call(own), call(tiny_llama())) and set(rounds) == {"model"}
