import random
import re

from rich.console import Console

from hf_specdec.viz.highlights import DRAFTED, Highlighter
from hf_specdec.viz.text import Detokenizer, visible

from ..bench.conftest import byte_tokenizer


def test_control_zero_width_and_bidirectional_characters_are_spelled_out():
    text = "a\x1b[31m\r\x07b\u200bc\u202ed\u2066e\ufefff\u2028g\x9b"
    assert visible(text) == "a<U+001B>[31m<U+000D><U+0007>b<U+200B>c<U+202E>d<U+2066>e<U+FEFF>f<U+2028>g<U+009B>"
    assert visible("tab\tand\nline, é, 漢, 🎉, �") == "tab\tand\nline, é, 漢, 🎉, �"


def test_pieces_join_to_the_text_and_no_character_is_split():
    tokenizer = byte_tokenizer()
    text = "naïve 漢字 🎉 done"
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokenizer(text)["input_ids"]] + [detokenizer.flush()]
    assert "".join(pieces) == text
    assert "🎉" in pieces and "�" not in "".join(pieces)


def test_bytes_that_never_become_a_character_are_shown_as_such_in_the_end():
    tokenizer = byte_tokenizer()
    cut = tokenizer("🎉")["input_ids"][:2]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in cut] == ["", ""]
    assert set(detokenizer.flush()) == {"�"}
    detokenizer = Detokenizer(tokenizer)
    assert "�" in "".join(detokenizer.push(token) for token in cut[:1] * 40)


def shown(text: str, drafted: list[bool], tokenizer, seed: int = 0) -> str:
    """What a terminal gets when the tokens of `text` arrive in blocks of random size."""
    console = Console(record=True, force_terminal=True, color_system="standard", width=40)
    highlighter, tokens, chance = Highlighter(tokenizer, console), tokenizer(text)["input_ids"], random.Random(seed)
    while tokens:
        n = chance.randrange(1, 5)
        highlighter(0, tokens[:n], drafted[:n])
        tokens, drafted = tokens[n:], drafted[n:]
    highlighter.end()
    return console.export_text(styles=True)


def test_markup_in_a_models_text_is_text():
    text = "[bold]x[/bold] [link=https://example.org]y[/link] :smile: [/]"
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown(text, [False] * len(text), byte_tokenizer())) == text + "\n"


def test_drafted_tokens_and_no_others_are_coloured():
    assert DRAFTED == "black on green"
    coloured = shown("abcd", [False, True, True, False], byte_tokenizer())
    assert "".join(re.findall(r"\x1b\[30;42m(.*?)\x1b\[0m", coloured)) == "bc"


def test_without_colour_brackets_mark_them_where_asked_for():
    for marks, text in ((True, "a[bc]d[e]\n"), (False, "abcde\n")):
        console = Console(record=True, color_system=None, width=40)
        highlighter, tokens = Highlighter(byte_tokenizer(), console, marks=marks), byte_tokenizer()("abcde")["input_ids"]
        for token, drafted in zip(tokens, [False, True, True, False, True]):
            highlighter(0, [token], [drafted])
        highlighter.end()
        assert console.export_text() == text


def test_a_models_escape_sequence_never_reaches_the_terminal():
    output = shown("x\x1b]0;title\x07y", [False] * 12, byte_tokenizer())
    assert "\x1b" not in output and "\x07" not in output and "<U+001B>]0;title<U+0007>" in output
