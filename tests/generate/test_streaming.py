"""Streamers get what plain generate gives them; callbacks get every row's tokens, and which of them were drafted."""

import threading

import pytest
import torch
from transformers import TextIteratorStreamer, TextStreamer

import hf_specdec
from tests.generate.test_stopping import letters
from tests.helpers import ScriptedDraft, enabled, generated, padded, perturbed, plain, prompts, repetitive, speculate, tiny_llama

ROW = repetitive(9)
ROWS = ROW + prompts(4, 6, seed=2)


class Tape:
    """A text streamer that writes down what it is given."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        assert value.device.type == "cpu"
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


def stock_tape(target, **options):
    tape = Tape()
    target.generate(**padded(ROW), streamer=tape, **{"max_new_tokens": 15, "do_sample": False, "pad_token_id": 0, **options})
    return tape.calls


@pytest.mark.parametrize("eos", [None, 5], ids=["to the end", "eos in a block"])
@pytest.mark.parametrize("draft", ["scripted", "lookup", "model"])
def test_a_text_streamer_gets_what_plain_generate_gives_it(draft, eos):
    target = tiny_llama(6)
    text = plain(target, ROW)[0]
    made = {"scripted": ScriptedDraft.knowing([ROW[0] + text]), "lookup": None, "model": perturbed(target)}[draft]
    options = {} if eos is None else dict(eos_token_id=text[eos])
    tape = Tape()
    speculate(target, ROW, made, 7, max_new_tokens=15, streamer=tape, **options)
    assert tape.calls == stock_tape(target, **options)


def test_transformers_text_streamer_prints_the_same_text(capsys):
    target = tiny_llama(6)
    stock = target.generate(**padded(ROW), streamer=TextStreamer(letters()), max_new_tokens=15, do_sample=False, pad_token_id=0)
    expected = capsys.readouterr().out
    out = speculate(target, ROW, perturbed(target), 4, max_new_tokens=15, streamer=TextStreamer(letters()))
    assert capsys.readouterr().out == expected and expected.strip()
    assert torch.equal(out.sequences, stock)


def test_a_text_iterator_streamer_works_from_a_thread():
    target = enabled(tiny_llama(6))
    streamer = TextIteratorStreamer(letters(), skip_prompt=True, timeout=60)
    options = dict(**padded(ROW), streamer=streamer, speculative=True, max_new_tokens=15, do_sample=False, pad_token_id=0)
    thread = threading.Thread(target=target.generate, kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == letters().decode(plain(target, ROW, max_new_tokens=15)[0])


def test_a_streamer_bound_to_the_decoder_gets_what_plain_generate_gives_it(capsys):
    """The prompt, too: a streamer that skips it takes the first thing that it is given for it."""
    target, tape = tiny_llama(6), Tape()
    for streamer in (tape, TextStreamer(letters(), skip_prompt=True)):
        target.generate(**padded(ROW), custom_generate=hf_specdec.SpeculativeDecoder(perturbed(target), streamer=streamer), max_new_tokens=9,
                        do_sample=False, pad_token_id=0)
    assert tape.calls == stock_tape(target, max_new_tokens=9)
    assert capsys.readouterr().out.strip() == letters().decode(plain(target, ROW, max_new_tokens=9)[0])


@pytest.mark.parametrize("rows", [ROW, ROWS], ids=["one row", "ragged"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_callback_gets_every_token_of_every_row_and_whether_it_was_drafted(rows, do_sample):
    target, seen = tiny_llama(6), []
    out = speculate(target, rows, perturbed(target), 4, seed=1, do_sample=do_sample, streamer=lambda *call: seen.append(call))
    for row, text in enumerate(generated(out, rows)):
        assert [token for b, tokens, _ in seen if b == row for token in tokens] == text
        flags = [flag for b, _, drafted in seen if b == row for flag in drafted]
        assert flags == out.speculation.draft_mask[row, : len(text)].tolist()


def test_a_callback_is_called_once_per_round_and_row():
    target, seen = tiny_llama(6), []
    out = speculate(target, ROWS, perturbed(target), 4, streamer=lambda row, tokens, drafted: seen.append((row, len(tokens), sum(drafted))))
    assert seen == [(entry.row, entry.committed, entry.accepted) for entries in out.speculation.rounds for entry in entries]


def test_a_callback_gets_nothing_after_the_end_of_its_row():
    target, seen = tiny_llama(6), []
    texts = plain(target, ROWS)
    draft = ScriptedDraft.knowing([row + text for row, text in zip(ROWS, texts)])
    speculate(target, ROWS, draft, 7, eos_token_id=texts[1][3], streamer=lambda row, tokens, drafted: seen.append((row, tokens)))
    assert [token for row, tokens in seen if row == 1 for token in tokens] == texts[1][: texts[1].index(texts[1][3]) + 1]
