"""Processors that keep a state from call to call (matchers of grammars, counts) see the calls that plain generate makes, whatever is drafted."""

from collections import deque

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, SynthIDTextWatermarkLogitsProcessor

from hf_specdec.drafts import CascadeDraft, MixtureDraft, ModelDraft, ModelTreeDraft, NGramRecyclingDraft, PromptLookupDraft, UniformDraft
from hf_specdec.following import Following
from hf_specdec.kept import LARGE, MANY
from tests import encoder_decoders
from tests.helpers import VOCAB, KnowingTreeDraft, ScriptedDraft, generated, perturbed, plain, prompts, repetitive, speculate, tiny_llama

ROWS = repetitive(13)
MAX_NEW = 24


class Counted(LogitsProcessor):
    """Forces a token after so many calls, and from then on another one: a budget, as many write it."""

    def __init__(self, after: int = 5):
        self.after, self.calls = after, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == self.after:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 7] = 0.0
        elif self.calls > self.after:
            scores[:, self.calls % 5] += 2.0
        return scores


class Matcher:
    """A walk along edges; a token that is none is an error, as with matchers."""

    def __init__(self, state: int = 0):
        self.state = state

    def accept(self, token: int) -> None:
        if token not in self.allowed():
            raise ValueError(f"{token} after {self.state}")
        self.state = (self.state * 3 + token) % 11

    def allowed(self) -> list[int]:
        return [token for token in range(VOCAB) if (token + self.state) % 4 < 2]

    def fork(self) -> "Matcher":
        return Matcher(self.state)


class Deep(Matcher):
    fork = None

    def deep_copy(self) -> "Deep":
        return Deep(self.state)


class Grammar(LogitsProcessor):
    """One matcher a row, made at the first call, told the last token of every later one."""

    def __init__(self, kind=Matcher):
        self.kind, self.matchers, self.begun = kind, [], False

    def __call__(self, input_ids, scores):
        if not self.begun:
            self.matchers, self.begun = [self.kind() for _ in input_ids], True
        else:
            for matcher, row in zip(self.matchers, input_ids):
                matcher.accept(int(row[-1]))
        mask = torch.full_like(scores, -torch.inf)
        for i, matcher in enumerate(self.matchers):
            mask[i, matcher.allowed()] = 0.0
        return scores + mask


class InContainers(LogitsProcessor):
    """What it does depends on all that it has ever seen, kept in every kind of container, changed in place."""

    def __init__(self):
        self.seen, self.window, self.kinds, self.counts = [], deque(maxlen=3), set(), {"last": [0], "all": {}}
        self.tensor, self.array = torch.zeros(VOCAB), np.zeros(VOCAB, dtype=np.float32)

    def __call__(self, input_ids, scores):
        last = int(input_ids[0, -1])
        self.seen.append(last)
        self.window.append(last)
        self.kinds.add(last)
        self.counts["last"][0] = last
        self.counts["all"][last] = self.counts["all"].get(last, 0) + 1
        self.tensor[last] += 0.7
        self.array[last] += 0.9
        scores = scores - self.tensor - torch.from_numpy(self.array)
        scores[:, (len(self.seen) + len(self.kinds)) % VOCAB] += 1.5
        scores[:, [*self.window][0]] += 0.5 * self.counts["all"][last]
        return scores


class Surprised(LogitsProcessor):
    """Goes by the scores that it has been given before, as mirostat does."""

    def __init__(self):
        self.surprise = 0.0

    def __call__(self, input_ids, scores):
        self.surprise = 0.7 * self.surprise + float(scores.amax() - scores.mean())
        scores[:, int(self.surprise * 10) % VOCAB] += 2.0
        return scores


def synthid():
    return SynthIDTextWatermarkLogitsProcessor(ngram_len=3, keys=[654, 400, 836, 123], sampling_table_size=2**10, sampling_table_seed=0, context_history_size=16, device="cpu")


PROCESSORS = {"SynthID": synthid, "scores": Surprised, "a count": Counted, "matchers": Grammar, "matchers that copy deeply": lambda: Grammar(Deep), "containers": InContainers}
DRAFTS = {
    "lookup": lambda target: None,
    "tree": lambda target: KnowingTreeDraft([[*row, *text] for row, text in zip(ROWS, plain(target, ROWS, max_new_tokens=MAX_NEW))]),
    "uniform": lambda target: UniformDraft(),
    "model": lambda target: ModelDraft(perturbed(target)),
    "model tree": lambda target: ModelTreeDraft(perturbed(target)),
    "cascade": lambda target: CascadeDraft(perturbed(target), PromptLookupDraft(), 3),
    "recycling": lambda target: NGramRecyclingDraft(),
    "mixture": lambda target: MixtureDraft([PromptLookupDraft(), ModelDraft(perturbed(target))]),
}
every_processor, every_draft = pytest.mark.parametrize("make", PROCESSORS), pytest.mark.parametrize("draft", DRAFTS)


def constrained(*processors) -> dict:
    return {"logits_processor": LogitsProcessorList(processors), "max_new_tokens": MAX_NEW}


@pytest.mark.share(1 / 4)
@every_processor
@every_draft
def test_the_text_is_that_of_plain_generate(make, draft):
    target = tiny_llama(3)
    expected = plain(target, ROWS, **constrained(PROCESSORS[make]()))
    assert expected != plain(target, ROWS, max_new_tokens=MAX_NEW)
    for k in (1, 4, 7):
        assert generated(speculate(target, ROWS, DRAFTS[draft](target), k, **constrained(PROCESSORS[make]())), ROWS) == expected


def test_a_watermark_by_its_config():
    target, config = tiny_llama(3), SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123])
    options = {"watermarking_config": config, "do_sample": True, "top_k": 1, "max_new_tokens": MAX_NEW}
    rows = ROWS + prompts(2, 7, seed=2)
    assert generated(speculate(target, rows, ModelDraft(perturbed(target)), 5, **options), rows) == plain(target, rows, **options)


@every_processor
def test_candidates_are_tried_on_the_way(make):
    target = tiny_llama(3)
    text = plain(target, ROWS, **constrained(PROCESSORS[make]()))[0]
    wrong = [token if i % 4 else (token + 2) % VOCAB for i, token in enumerate(text)]
    draft = ScriptedDraft(lambda row: wrong[len(row) - len(ROWS[0]) :])
    out = speculate(target, ROWS, draft, 6, **constrained(PROCESSORS[make]()))
    assert generated(out, ROWS) == [text]
    assert 0 < out.speculation.accepted < out.speculation.proposed


@pytest.mark.share(2)
@every_processor
def test_each_row_of_a_batch_has_a_state_of_its_own(make):
    target, rows = tiny_llama(3), ROWS + prompts(2, 7, seed=2)
    expected = [plain(target, [row], **constrained(PROCESSORS[make]()))[0] for row in rows]
    assert generated(speculate(target, rows, None, 5, **constrained(PROCESSORS[make]())), rows) == expected
    twice = speculate(target, ROWS, None, 5, num_return_sequences=2, do_sample=True, top_k=1, **constrained(PROCESSORS[make]()))
    assert generated(twice, ROWS * 2) == [expected[0]] * 2


@pytest.mark.share(3)
@every_processor
def test_sampling_with_one_token_left_is_greedy_decoding(make):
    target = tiny_llama(3)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 1}
    expected = plain(target, ROWS, **options, **constrained(PROCESSORS[make]()))
    assert generated(speculate(target, ROWS, ModelDraft(perturbed(target)), 5, **options, **constrained(PROCESSORS[make]())), ROWS) == expected


@every_processor
def test_the_decoder_of_an_encoder_decoder_too(make):
    model, inputs = encoder_decoders.family("T5").model(seed=1), encoder_decoders.source()
    expected = encoder_decoders.plain(model, inputs, **constrained(PROCESSORS[make]()))
    assert torch.equal(encoder_decoders.speculate(model, inputs, None, 5, **constrained(PROCESSORS[make]())).sequences, expected)


def test_over_long_texts():
    target = tiny_llama(3, max_position_embeddings=1024)
    options = {**constrained(Counted(300)), "max_new_tokens": 400}
    expected = plain(target, ROWS, **options)
    processor = Counted(300)
    out = speculate(target, ROWS, None, 7, **{**options, "logits_processor": LogitsProcessorList([processor])})
    assert generated(out, ROWS) == expected and processor.calls == 400 and out.speculation.accepted > 0


def test_it_is_left_as_plain_generate_leaves_it():
    target, ours, stock = tiny_llama(3), InContainers(), InContainers()
    plain(target, ROWS, **constrained(stock))
    speculate(target, ROWS, None, 5, **constrained(ours))
    assert (ours.seen, ours.window, ours.kinds, ours.counts) == (stock.seen, stock.window, stock.kinds, stock.counts)
    assert torch.equal(ours.tensor, stock.tensor) and np.array_equal(ours.array, stock.array)


def test_after_an_exception_no_candidate_is_left_in_it():
    class Interrupted(Counted):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == len(ROWS[0]) + 9:
                raise KeyboardInterrupt
            return super().__call__(input_ids, scores)

    target, processor = tiny_llama(3), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        speculate(target, ROWS, ScriptedDraft(lambda row: [1, 2, 3, 4]), 4, **constrained(processor))
    assert processor.calls <= 9


# --- what is put back, and what is not ------------------------------------------------------------------------------------


class Keeps(LogitsProcessor):
    def __init__(self, value):
        self.value = value

    def __call__(self, input_ids, scores):
        return scores


def after_a_call_on_another_text(value, change):
    """What an attribute is after calls on [1, 2, 3] and [1, 2, 4], the first of which changes it."""
    processor = Keeps(value)
    following = Following([processor], 2)
    following(torch.tensor([[1, 2]]), torch.zeros(1, 4))
    processor.__class__ = type("Changing", (Keeps,), {"__call__": lambda self, ids, scores: (change(self), scores)[1]})
    following(torch.tensor([[1, 2, 3]]), torch.zeros(1, 4))
    processor.__class__ = Keeps
    following(torch.tensor([[1, 2, 4]]), torch.zeros(1, 4))
    return processor.value


@pytest.mark.parametrize("value", [[1, [2]], {"a": {"b": 1}}, {1, 2}, deque([1])], ids=["list", "dict", "set", "deque"])
def test_containers_are_put_back(value):
    def change(self):
        for part in (self.value, *(self.value if isinstance(self.value, list) else ())):
            if hasattr(part, "clear"):
                part.clear()

    before = repr(value)
    assert repr(after_a_call_on_another_text(value, change)) == before


def test_a_table_is_not_copied():
    table = {i: [i] for i in range(MANY)}
    for value in (table, torch.zeros(LARGE // 4 + 1), np.zeros(LARGE // 8 + 1)):
        first = Following([Keeps(value)], 2).first
        assert all(held is not value for held, *_ in first.held)
    assert len(Following([Keeps({i: i for i in range(MANY)})], 2).first.held) == 2


def test_a_table_that_a_call_makes_is_not_copied():
    following = Following([Keeps(None)], 2)
    following.processors[0].value = {i: i for i in range(MANY + 1)}
    assert len(following._kept().held) == 1


def test_an_attribute_that_a_call_has_added_goes_again():
    def change(self):
        self.other = 1

    processor = Keeps(0)
    following = Following([processor], 1)
    following(torch.tensor([[1]]), torch.zeros(1, 4))
    processor.__class__ = type("Adding", (Keeps,), {"__call__": lambda self, ids, scores: (change(self), scores)[1]})
    following(torch.tensor([[1, 3]]), torch.zeros(1, 4))
    processor.__class__ = Keeps
    following(torch.tensor([[1, 2]]), torch.zeros(1, 4))
    assert not hasattr(processor, "other")


def test_texts_that_were_left_out_are_told_in_order():
    grammar = Grammar()
    following = Following([grammar], 1)
    tokens = []
    for _ in range(5):
        tokens.append(Matcher().allowed()[0] if not tokens else _walked(tokens).allowed()[1])
    following(torch.tensor([[1, *tokens]]), torch.zeros(1, VOCAB))
    assert grammar.matchers[0].state == _walked(tokens).state


def _walked(tokens: list[int]) -> Matcher:
    matcher = Matcher()
    for token in tokens:
        matcher.accept(token)
    return matcher


def test_processors_of_transformers_are_called_as_they_are():
    from transformers import RepetitionPenaltyLogitsProcessor

    from hf_specdec.following import remembers

    assert not remembers(RepetitionPenaltyLogitsProcessor(1.2))
    assert remembers(Counted()) and remembers(lambda ids, scores: scores)
