"""Log-probabilities that `hf-specdec serve` tells, and streams that tell them: the target's own, whatever was drafted and however it was drawn."""

import asyncio
import json
from collections import deque

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from hf_specdec.commands.logprobs import Entry, Places, Tap, Tapped, Words, check_logprobs, of_chat, of_text, wanted
from hf_specdec.commands.requests import Penalties
from hf_specdec.commands.streams import Pieces, Streamed, in_turn

from ..bench.conftest import byte_tokenizer, tiny_model
from .test_serve import answering, ids_of

TEXT = ids_of(*range(20, 40), 5, 6, 7, 5, 6, 7)


def law(model, text: torch.Tensor) -> torch.Tensor:
    """Of a plain forward: log-probabilities [P - 1, V] of the tokens from the second on."""
    with torch.no_grad():
        return model(text).logits[0, :-1].float().log_softmax(-1)


def told(entries: list[Entry]) -> torch.Tensor:
    return torch.tensor([entry.logprob for entry in entries])


def tapped(top: int = 3, echo: bool = False, k: int = 3, keep: int = 2, turns: int = 1, **said):
    """(model, text, tap) of an answer."""
    model, text = tiny_model(), TEXT
    answer = answering(model, keep, num_assistant_tokens=k)
    for _ in range(turns):
        tap = Tap(top, echo)
        text = answer(input_ids=text, attention_mask=torch.ones_like(text), tap=tap, **{"max_new_tokens": 12, "do_sample": False, "eos_token_id": None} | said)
    return model, text, tap


SAID = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 2.0, "top_k": 20}, "a turn": {"turns": 2}, "not kept": {"keep": 0, "turns": 2}, "K 8": {"k": 8},
        "penalties": {"logits_processor": LogitsProcessorList([Penalties(TEXT.shape[1], 2.0, 2.0)])}, "without speculation": {"speculative": False}}


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_they_are_a_plain_forwards(said, echo):
    model, text, tap = tapped(echo=echo, **said)
    own, new = law(model, text), len(tap.answer)
    assert [entry.token for entry in tap.answer] == text[0, -new:].tolist() and new == 12
    wanted = own.gather(1, text[0, 1:, None])[:, 0]
    torch.testing.assert_close(told(tap.answer), wanted[-new:], rtol=0, atol=1e-4)
    for entry, row in zip(tap.answer, own[-new:]):
        values, tokens = row.topk(3)
        assert [token for token, _ in entry.top] == tokens.tolist()
        torch.testing.assert_close(torch.tensor([value for _, value in entry.top]), values, rtol=0, atol=1e-4)
    if echo:
        assert [entry.token for entry in tap.prompt] == text[0, :-new].tolist() and tap.prompt[0].logprob is None
        torch.testing.assert_close(told(tap.prompt[1:]), wanted[:-new], rtol=0, atol=1e-4)
    assert echo or not tap.prompt


def test_those_behind_temperature_and_penalties_are_others():
    """A negative control: what was drawn from is not what is told."""
    model, text, tap = tapped(**SAID["sampled"])
    warmed = (law(model, text)[-12:] / 2.0).log_softmax(-1).gather(1, text[0, -12:, None])[:, 0]
    assert (warmed - told(tap.answer)).abs().max() > 0.1


def test_a_text_is_the_same_without_them_and_its_prompt_is_read_once():
    model, text, _ = tapped()
    widths = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    answer = answering(model)
    assert torch.equal(answer(input_ids=TEXT, max_new_tokens=12, do_sample=False, eos_token_id=None), text)
    answer = answering(model)
    widths.clear()
    answer(input_ids=TEXT, max_new_tokens=12, do_sample=False, eos_token_id=None, tap=Tap(0, True))
    assert widths[0] == TEXT.shape[1] > 4 >= max(widths[1:])


def test_beams_have_none():
    with pytest.raises(ValueError, match="logprobs: .*generation_config"):
        answering(tiny_model())(input_ids=TEXT, generation_config=GenerationConfig(max_new_tokens=4, num_beams=2), tap=Tap(0, False))


# --- as the API has them ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said, message", [
    ({"messages": [], "logprobs": 5}, "logprobs: expected true or false"), ({"messages": [], "top_logprobs": 2}, "say logprobs=true"),
    ({"messages": [], "logprobs": True, "top_logprobs": 21}, "top_logprobs: expected an int from 0 to 20"), ({"messages": [], "logprobs": True, "top_logprobs": True}, "top_logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs: expected an int"), ({"prompt": "a", "logprobs": -1}, "logprobs"), ({"prompt": "a", "logprobs": 1.0}, "logprobs"),
    ({"prompt": "a", "logprobs": 0, "echo": True, "stream": True}, "echo: "), ({"input": "a", "top_logprobs": 21}, "top_logprobs: expected an int from 0 to 20")], ids=str)
def test_what_means_nothing_is_refused(said, message):
    with pytest.raises(ValueError, match=message):
        check_logprobs(said)


@pytest.mark.parametrize("said, top", [({"prompt": "a"}, None), ({"prompt": "a", "logprobs": None}, None), ({"prompt": "a", "logprobs": False}, None), ({"prompt": "a", "logprobs": 0}, 0),
                                       ({"messages": []}, None), ({"messages": [], "logprobs": False, "top_logprobs": 0}, None), ({"messages": [], "logprobs": True}, 0),
                                       ({"messages": [], "logprobs": True, "top_logprobs": 20}, 20), ({"input": "a", "top_logprobs": 0, "include": []}, None)], ids=str)
def test_how_many_are_asked_for(said, top):
    check_logprobs(said)
    assert wanted(said) == top


def test_tokens_have_their_texts_and_bytes_and_places():
    tokenizer = byte_tokenizer()
    words, text = Words(tokenizer), "aé \U0001f98a."
    ids = tokenizer(text)["input_ids"]
    entries = [Entry(token, -1.0, [(token, -1.0), (ids[0], -2.0)], place == 0) for place, token in enumerate([*ids, tokenizer.eos_token_id])]
    assert b"".join(words(token)[1] for token in ids).decode() == text and words(ids[1])[0] == "\\xc3"
    places = Places(words)
    assert places(entries[:4]) + places(entries[4:]) == [0, 1, 1, 2, 3, 3, 3, 3, 4, 5]
    chat = of_chat(entries[:2], words)["content"]
    assert chat[1] == {"token": "\\xc3", "logprob": -1.0, "bytes": [195],
                       "top_logprobs": [{"token": "\\xc3", "logprob": -1.0, "bytes": [195]}, {"token": "a", "logprob": -2.0, "bytes": [97]}]}
    completion = of_text([Entry(ids[0], None, [], True), entries[1]], Places(words))
    assert completion == {"tokens": ["a", "bytes:\\xc3"], "token_logprobs": [None, -1.0], "top_logprobs": [None, {"bytes:\\xc3": -1.0, "a": -2.0}], "text_offset": [0, 1]}


# --- streams ----------------------------------------------------------------------------------------------------------


def handed(items: list, stops: list[str]) -> list[tuple]:
    """[(item, [token])] of what Pieces hands out."""
    queue, told = asyncio.Queue(), deque()
    for item in [*items, None]:
        queue.put_nowait(Entry(item, -1.0, [], False) if isinstance(item, int) else item)
    pieces, got = Pieces(queue, stops, told=told), []
    while not got or got[-1] is not None:
        got.append(pieces.get_nowait())
    return [(item, [entry.token for entry in each]) for item, each in zip(got, told)]


def test_each_comes_with_its_text_and_those_of_stop_strings_do_not():
    assert handed([1, "ab", 2, 3, "\xe9", 4], []) == [("ab", [1]), ("\xe9", [2, 3]), (None, [4])]
    assert handed([1, "ab", 2, "c", 3, "d"], ["bcx"]) == [("a", [1]), ("bcd", [2, 3]), (None, [])]
    assert handed([1, "ab", 2, "c", 3, "d", 4], ["bc"]) == [("a", [1]), (None, [])]
    assert handed([1, "ab", 2, b"a call", 3], ["bc"]) == [("a", [1]), ("b", []), (b"a call", [2]), (None, [3])]


def test_several_answers_come_one_after_the_other_with_their_index_and_one_usage():
    async def events(*texts: str):
        for text in texts:
            yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n"
        yield f"data: {json.dumps({'choices': [{'index': 0, 'text': '', 'finish_reason': 'stop'}], 'usage': {'prompt_tokens': 5, 'completion_tokens': 2}})}\n\n"

    async def all_of(usage: bool, count: int):
        left = []
        streams = [Streamed(events("a", "b"), deque([[1], [2], [3]]), list, lambda place=place: left.append(place)) for place in range(4)]
        got = [json.loads(event.removeprefix("data: ")) async for event in in_turn(streams, count, usage)]
        assert left == [0, 1, 2, 3]
        return got

    got = asyncio.run(all_of(True, 2))
    assert [choice["index"] for each in got for choice in each["choices"]] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert [choice["logprobs"] for choice in got[0]["choices"] + got[2]["choices"]] == [[1], [3]] and sum("usage" in each for each in got) == 1
    assert got[-1]["choices"] == [] and got[-1]["usage"] == {"prompt_tokens": 10, "completion_tokens": 8, "total_tokens": 18}
    assert not any("usage" in each for each in asyncio.run(all_of(False, 4)))


def test_a_stream_without_speculation_says_that_it_has_none():
    class Streamer:
        _queue, put = asyncio.Queue(), lambda self, tokens: None

    streamer = Tapped(Streamer(), Tap(0, False))
    streamer.put(TEXT)
    with pytest.raises(ValueError, match="logprobs: in a stream"):
        streamer.put(torch.tensor([5]))
