"""Where processors keep their state: in whatever Python has for it, shared or not. Each of these goes by all the calls that it has seen."""

import random
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from hf_specdec.drafts import ModelDraft, ModelTreeDraft
from hf_specdec.following import Following, remembers, that_follow
from hf_specdec.kept import MANY
from tests.helpers import VOCAB, generated, perturbed, plain, prompts, repetitive, speculate, tiny_llama

ROWS = repetitive(13) + prompts(1, seed=2)
MAX_NEW = 20
Pair = namedtuple("Pair", "seen counts")


def bumped(scores, *numbers):
    """scores [1, V] with what the numbers say made likely."""
    scores = scores.clone()
    for number in numbers:
        scores[:, int(number) % VOCAB] += 2.5
    return scores


class ByClass(LogitsProcessor):
    """Its attributes are those of its class, until it is called."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return bumped(scores, self.calls * 7)


class InSlots:
    __slots__ = ("calls", "__seen")

    def __init__(self):
        self.calls, self.__seen = 0, []

    def __call__(self, input_ids, scores):
        self.calls += 1
        self.__seen.append(int(input_ids[0, -1]))
        return bumped(scores, self.calls, sum(self.__seen))


class InModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(VOCAB))
        self.register_buffer("seen", torch.zeros(VOCAB))

    def forward(self, input_ids, scores):
        self.seen[input_ids[0, -1]] += 1
        with torch.no_grad():
            self.weight[input_ids[0, -1] // 2] += 0.5
        return scores - self.seen + self.weight


class InOwnPenalty(RepetitionPenaltyLogitsProcessor):
    def __init__(self):
        super().__init__(1.3)

    def __call__(self, input_ids, scores):
        self.penalty += 0.05 * (int(input_ids[0, -1]) % 3)
        return super().__call__(input_ids, scores)


@dataclass
class Tally:
    calls: int = 0
    seen: list = field(default_factory=list)


class Everywhere(LogitsProcessor):
    """Kinds of containers, some of which hold others, one another or themselves."""

    def __init__(self):
        self.counts, self.lists, self.order = Counter(), defaultdict(list), OrderedDict()
        self.window, self.pair, self.tally, self.space = deque([[0]], maxlen=4), Pair([], {}), Tally(), SimpleNamespace(calls=0)
        self.bytes, self.numbers, self.links = bytearray(b"a"), array("i", [0]), [0]
        self.links.append(self.links)
        self.me, self.lock, self.kind, self.library, self.sparse = self, Lock(), Tally, np, torch.zeros(2, 2).to_sparse()
        self.ones, self.fixed = torch.ones(1, 1).expand(1, VOCAB), np.zeros(3)
        self.fixed.flags.writeable = False

    def __call__(self, input_ids, scores):
        last = int(input_ids[0, -1])
        self.counts[last] += 1
        self.lists[last % 5].append(last)
        self.order[last] = len(self.order)
        self.order.move_to_end(last)
        self.window.append([last])
        self.window[0].append(1)
        self.pair.seen.append(last)
        self.tally.calls += 1
        self.tally.seen.append(last)
        self.space.calls += 1
        self.bytes.append(last)
        self.numbers.append(last)
        self.me.links[1][0] += 1
        return bumped(scores + self.ones, self.counts[last] * 9, len(self.lists[last % 5]), next(iter(self.order)), sum(map(sum, self.window)), sum(self.pair.seen),
                      self.tally.calls + sum(self.tally.seen), self.space.calls, sum(self.bytes) + sum(self.numbers), self.links[0])


class Aliased(LogitsProcessor):
    """Two names for one list, a row of a table, and a tensor and an array in the same memory."""

    def __init__(self):
        self.seen = self.again = []
        self.table, self.array = torch.zeros(3, VOCAB), np.zeros(VOCAB, dtype=np.float32)
        self.row, self.tensor = self.table[1], torch.from_numpy(self.array)

    def __call__(self, input_ids, scores):
        last = int(input_ids[0, -1])
        self.seen.append(last)
        self.row[last] += 1
        self.array[last] += 0.5
        return bumped(scores - self.table.sum(0) - self.tensor, len(self.again) * 3)


class Rolling(LogitsProcessor):
    def __init__(self):
        self.torch, self.python = torch.Generator().manual_seed(3), random.Random(4)
        self.numpy, self.older = np.random.default_rng(5), np.random.RandomState(6)

    def __call__(self, input_ids, scores):
        noise = torch.randn(scores.shape, generator=self.torch) + torch.from_numpy(self.numpy.normal(size=scores.shape)).float()
        return bumped(scores + noise, self.python.randrange(VOCAB), self.older.randint(VOCAB))


class LastScores(LogitsProcessor):
    """Keeps the very tensor that it is given."""

    def __init__(self):
        self.before = None

    def __call__(self, input_ids, scores):
        found = scores if self.before is None else scores + 0.5 * self.before
        self.before = scores
        return found


class Magic(LogitsProcessor):
    """Has every attribute, and one whose `fork` is no method."""

    def __init__(self):
        self.calls, self.other = 0, type("Forked", (), {"fork": 3})()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return 7

    def __call__(self, input_ids, scores):
        self.calls += 1
        return bumped(scores, self.calls)


def in_a_closure():
    calls, seen = 0, []

    def process(input_ids, scores):
        nonlocal calls
        calls += 1
        seen.append(int(input_ids[0, -1]))
        return bumped(scores, calls, sum(seen))

    return process


def in_a_cell_that_is_empty_at_first():
    calls: int

    def process(input_ids, scores):
        nonlocal calls
        try:
            calls += 1
        except NameError:
            calls = 1
        return bumped(scores, calls * 7)

    return process


def in_a_partial():
    def process(seen, input_ids, scores):
        seen.append(int(input_ids[0, -1]))
        return bumped(scores, sum(seen))

    return partial(process, [])


class OfAnother(LogitsProcessor):
    def __init__(self, other):
        self.other = other

    def __call__(self, input_ids, scores):
        return bumped(scores, self.other.calls * 5)


class Shared(LogitsProcessor):
    def __init__(self, seen, by):
        self.seen, self.by = seen, by

    def __call__(self, input_ids, scores):
        self.seen.append(int(input_ids[0, -1]) * self.by)
        return bumped(scores, sum(self.seen), len(self.seen))


def sharing():
    seen = []
    return [Shared(seen, 1), TemperatureLogitsWarper(0.7), Shared(seen, 3)]


def one_of_another():
    first = ByClass()
    return [first, OfAnother(first)]


ALONE = [ByClass, InSlots, InModule, InOwnPenalty, Everywhere, Aliased, Rolling, LastScores, Magic, in_a_closure, in_a_cell_that_is_empty_at_first, in_a_partial]
MADE = {**{make.__name__: lambda make=make: [make()] for make in ALONE}, "a method": lambda: [ByClass().__call__], "a list for two": sharing, "one in another": one_of_another,
        "one twice": lambda: [ByClass()] * 2}
every_kind = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


@pytest.mark.share(2)
@every_kind
def test_the_text_is_that_of_plain_generate(make):
    target = tiny_llama(3)
    expected = [plain(target, [row], logits_processor=LogitsProcessorList(make()), max_new_tokens=MAX_NEW)[0] for row in ROWS]
    assert expected != plain(target, ROWS, max_new_tokens=MAX_NEW)
    for draft in (ModelDraft(perturbed(target)), ModelTreeDraft(perturbed(target))):
        out = speculate(target, ROWS, draft, 5, logits_processor=LogitsProcessorList(make()), max_new_tokens=MAX_NEW)
        assert generated(out, ROWS) == expected


@pytest.mark.share(2)
@every_kind
def test_a_second_call_goes_on_as_with_plain_generate(make):
    target, ours, stock = tiny_llama(3), make(), make()
    for _ in range(2):
        expected = plain(target, ROWS[:1], logits_processor=LogitsProcessorList(stock), max_new_tokens=MAX_NEW)
        assert generated(speculate(target, ROWS[:1], None, 5, logits_processor=LogitsProcessorList(ours), max_new_tokens=MAX_NEW), ROWS[:1]) == expected


def test_a_list_of_the_callers_is_that_list():
    seen = []
    target, processor = tiny_llama(3), Shared(seen, 1)
    speculate(target, ROWS[:1], ModelDraft(perturbed(target)), 5, logits_processor=LogitsProcessorList([processor]), max_new_tokens=MAX_NEW)
    assert processor.seen is seen and len(seen) == MAX_NEW


def with_a_table_in_a_closure(table):
    return lambda input_ids, scores: scores + len(table)


@pytest.mark.parametrize("make", [with_a_table_in_a_closure, lambda table: partial(lambda table, ids, scores: scores, table), lambda table: Shared(table, 1),
                                  lambda table: Shared(table, 1).__call__], ids=["closure", "partial", "attribute", "method"])  # fmt: skip
def test_a_table_is_not_copied_wherever_it_is(make):
    table = [[i] for i in range(MANY + 1)]
    (following, other), = that_follow([[make(table), make(table)]], [[1, 2]])
    assert all(value is not table for one in (following, other) for value, *_ in one.first.held) and len(following.first.held) < 9


def test_parameters_stay_parameters():
    target, processor = tiny_llama(3), InModule()
    weight = processor.weight
    speculate(target, ROWS[:1], None, 5, logits_processor=LogitsProcessorList([processor]), max_new_tokens=MAX_NEW)
    assert processor.weight is weight and isinstance(weight, torch.nn.Parameter)


def test_no_more_is_kept_than_can_be_asked_for():
    """However long the text: one state for every candidate of the last rounds."""
    written = [1]
    following = Following([Aliased()], 1, written)
    for n in range(300):
        for candidate in ([], [5], [5, 6]):
            following(torch.tensor([[*written, *candidate]]), torch.zeros(1, VOCAB))
        written += [5, 6, n % VOCAB]
    assert len(following.told) > 880 and _texts(following.base) < 40


def _texts(text):
    return 1 + sum(map(_texts, text.longer.values()))


def test_what_does_not_change_is_there_all_the_time():
    class Constant(LogitsProcessor):
        def __init__(self):
            self.number, self.numbers, self.table = 2.0, [3, 4], {"a": [1]}

        def __call__(self, input_ids, scores):
            return scores + self.number + self.numbers[1] + self.table["a"][0]

    processor, failed = Constant(), []

    def ask():
        following, ids = Following([processor], 1), torch.tensor([[1, 2]])
        try:
            for _ in range(2000):
                following(ids, torch.zeros(1, 4))
        except Exception as error:
            failed.append(error)

    threads = [Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_wrong_shape_is_the_processors_own():
    class Flat(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores[0]

    with pytest.raises(ValueError, match="logits_processor: Flat was given one row"):
        speculate(tiny_llama(3), ROWS[:1], None, 3, logits_processor=LogitsProcessorList([Flat()]))


def test_classes_without_attributes_may_remember_too():
    assert remembers(ByClass()) and remembers(InSlots()) and remembers(in_a_closure())
