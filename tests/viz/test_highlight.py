"""The lines, the page and the terminal's text of a trace: one line per round, a colour per kind of token, nothing of the model's
text taken for markup."""

import html
import re
from html.parser import HTMLParser
from io import BytesIO, StringIO, TextIOWrapper

import pytest
import torch
from rich.console import Console

import hf_specdec
from hf_specdec import SpeculationTrace, viz
from hf_specdec.trace import Round
from tests.helpers import ScriptedDraft, perturbed, plain, speculate

from ..bench.conftest import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def entry(accepted: str, own: str, rejected: str = "", row: int = 0, **more) -> Round:
    drafted, others, last = ids(accepted), ids(rejected), ids(own)
    return Round(row, len(drafted) + len(others), len(drafted), len(drafted + last), "scripted", drafted + last, others, **more)


def trace(*rounds: Round) -> SpeculationTrace:
    made = SpeculationTrace({}, rounds=[[each] for each in rounds])
    made.drafted = [[i < each.accepted for each in rounds for i in range(each.committed)]]
    return made


class Reader(HTMLParser):
    """Spans as (class, title, text), the number of list items, and every tag."""

    def __init__(self, text: str):
        super().__init__()
        self.spans, self.tags, self.items, self.inside = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "li":
            self.items.append("")
        if tag == "span" and self.items:
            self.inside = [dict(attributes)["class"], dict(attributes)["title"], ""]

    def handle_data(self, data):
        if self.inside:
            self.inside[2] += data
            self.items[-1] += data

    def handle_endtag(self, tag):
        if tag == "span" and self.inside:
            self.spans.append(tuple(self.inside))
            self.inside = None


def classes(page: str) -> list[tuple[str, str]]:
    return [(name, text) for name, _, text in Reader(page).spans]


THREE = trace(entry("ab", "c", "xy"), entry("def", "g"), entry("", "h"))


def test_every_kind_of_token_has_its_colour_in_html():
    assert classes(viz.highlight(THREE, TOKENIZER, rejected=True).to_html()) == [
        ("accepted", "a"), ("accepted", "b"), ("rejected", "x"), ("rejected", "y"), ("own", "c"),
        ("accepted", "d"), ("accepted", "e"), ("accepted", "f"), ("own", "g"), ("own", "h"),
    ]  # fmt: skip


def test_rejected_proposals_are_shown_on_demand_only():
    shown = viz.highlight(THREE, TOKENIZER)
    assert "rejected" not in {name for name, _ in classes(shown.to_html())} and str(shown).splitlines()[1] == "1 [ab]c"
    assert "not taken" not in str(shown) and "not taken" in str(viz.highlight(THREE, TOKENIZER, rejected=True))
    assert str(viz.highlight(THREE, TOKENIZER, rejected=True)).splitlines()[1] == "1 [ab][-xy-]c"


def test_every_kind_of_token_has_its_colour_in_the_terminal():
    lines = viz.highlight(THREE, TOKENIZER, rejected=True).to_terminal().splitlines()
    green, red, blue = "\x1b[30;42m", "\x1b[9;37;41m", "\x1b[37;44m"
    assert f"{green}a\x1b[0m{green}b\x1b[0m{red}x\x1b[0m{red}y\x1b[0m{blue}c\x1b[0m" in lines[1]
    assert f"{blue}g\x1b[0m" in lines[2] and lines[3].endswith(f"{blue}h\x1b[0m")


@pytest.mark.parametrize("settings", [{"force_terminal": False}, {"force_terminal": True, "no_color": True}], ids=["a pipe or a file", "NO_COLOR"])
def test_without_colour_marks_tell_the_kinds_of_tokens_apart(settings):
    shown, console = viz.highlight(THREE, TOKENIZER, rejected=True), Console(file=StringIO(), width=300, **settings)
    console.print(shown)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()
    assert lines == str(shown).splitlines() and lines[:4] == [
        "[drafted and accepted]  [-drafted, not taken-]  the target's own: correction, bonus or plain", "1 [ab][-xy-]c", "2 [def]g", "3 h"]


def test_there_is_a_line_per_round_whatever_the_text_says():
    many = trace(entry("a\nb", "\n\n"), entry("", "\r"), entry("\u2028", "x"))
    shown = viz.highlight(many, TOKENIZER)
    assert len(shown.lines) == 3 and len(Reader(shown.to_html()).items) == 3
    assert len(shown.to_terminal().splitlines()) == 3 + 2  # legend and summary
    assert str(shown).splitlines()[1:3] == ["1 [a↵b]↵↵", "2 <U+000D>"]


def test_a_models_markup_is_text():
    text = "<script>alert('x')</script><img src=x onerror=y>&amp;\"' title=\"z [bold]b[/bold]"
    page = viz.highlight(trace(entry(text, "</li>", "</div>")), TOKENIZER, rejected=True).to_html()
    assert Reader(page).items == [text + "</div>" + "</li>"]
    assert set(Reader(page).tags) == {"div", "style", "p", "span", "ol", "li", "small"}
    assert "<script" not in page and "<img" not in page


def test_a_sources_name_cannot_leave_the_title():
    made = trace(Round(0, 1, 1, 1, '"><script>', ids("a"), []))
    page = viz.highlight(made, TOKENIZER).to_html()
    assert "<script" not in page and '"><script>' in Reader(page).spans[0][1]


def test_escape_sequences_and_bidirectional_controls_are_spelled_out():
    made = trace(entry("\x1b]0;t\x07", "\u202e"))
    for text in (viz.highlight(made, TOKENIZER).to_html(), str(viz.highlight(made, TOKENIZER))):
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
        assert "<U+001B>]0;t<U+0007>" in html.unescape(re.sub(r"</?span[^>]*>", "", text))


def test_titles_say_where_a_token_comes_from_and_how_likely_it_was():
    made = trace(entry("a", "c", "x", p=[0.5, 0.25, 0.125], q=[0.75, None, 0.8]), entry("d", "e"))
    a, x, c, d, e = (title for _, title, _ in Reader(viz.highlight(made, TOKENIZER, rejected=True).to_html()).spans)
    assert a == "drafted and accepted; round 1, position 1, token %d; source: scripted; p = 0.5; q = 0.75" % ids("a")[0]
    assert x.startswith("drafted, not taken; round 1, position 2") and x.endswith("p = 0.125; q = 0.8")
    assert c.startswith("the target's own, after a rejection; round 1, position 2") and c.endswith("p = 0.25")
    assert "p =" not in d and "round 2, position 3" in d and "after all drafted" in e


def test_a_character_of_several_tokens_is_shown_whole_and_once():
    first, second = ids("🎉")[:2], ids("🎉")[2:]
    made = trace(Round(0, 1, 1, 2, "s", first, []), Round(0, 0, 0, len(second), "s", second, []))
    text = "".join(piece.text for line in viz.highlight(made, TOKENIZER).lines for piece in line)
    assert text == "🎉"
    cut = trace(Round(0, 1, 1, 2, "s", first, ids("é")))
    shown = viz.highlight(cut, TOKENIZER, rejected=True)
    assert set(shown.lines[-1][-1].text) == {"\ufffd"}


def test_half_a_character_at_the_end_of_a_text_belongs_to_the_last_token_that_was_taken():
    half = Round(0, 4, 1, 1, "model", ids("é")[:1], ids("no"))  # the text ended in its draft
    (line,) = viz.highlight(trace(half), byte_tokenizer(), rejected=True).lines
    assert [(piece.kind, piece.text[-1]) for piece in line] == [("accepted", "\ufffd"), ("rejected", "n"), ("rejected", "o")]


def test_rejected_text_leaves_what_follows_alone():
    made = trace(Round(0, 3, 0, 1, "s", ids("é")[:1], ids("🎉")[:3]), Round(0, 0, 0, 1, "s", ids("é")[1:], []))
    kept = [piece.text for line in viz.highlight(made, TOKENIZER, rejected=True).lines for piece in line if piece.kind != "rejected"]
    assert "".join(kept) == "é"


# --- real calls -----------------------------------------------------------------------------------------------------------


PROMPTS = [ids("abcabcabc"), ids("hello")]


@pytest.fixture(scope="module")
def out():
    target = tiny_model(0)
    return speculate(target, PROMPTS, perturbed(target, 0.1), 4, do_sample=True, speculative={"seed": 1, "record_probs": True})


@pytest.mark.parametrize("row", [0, 1])
def test_lines_of_a_real_call_add_up_to_its_text(out, row):
    shown = viz.highlight(out, TOKENIZER, row=row)
    new = out.sequences[row, len(PROMPTS[0]) :].tolist()
    assert [piece.token for line in shown.lines for piece in line] == new
    own = [each for rounds in out.speculation.rounds for each in rounds if each.row == row]
    assert len(shown.lines) == len(own) == len(Reader(shown.to_html()).items)
    assert [sum(piece.kind == "accepted" for piece in line) for line in shown.lines] == [each.accepted for each in own]
    assert [piece.position for line in shown.lines for piece in line] == list(range(1, len(new) + 1))
    assert all(piece.p is not None and (piece.q is not None) == (piece.kind == "accepted") for line in shown.lines for piece in line)
    assert viz.highlight(out.speculation, TOKENIZER, row=row).to_html() == shown.to_html()


def test_positions_of_rejected_proposals_are_where_they_would_have_stood():
    target = tiny_model(0)
    text = plain(target, PROMPTS[:1], max_new_tokens=12)[0]
    wrong = ScriptedDraft.knowing([PROMPTS[0] + text], wrong=3, vocab=257)
    lines = viz.highlight(speculate(target, PROMPTS[:1], wrong, 4, max_new_tokens=12), TOKENIZER, rejected=True).lines
    pieces = [piece for line in lines for piece in line if piece.kind == "rejected"]
    assert pieces
    for piece in pieces:
        place = len(PROMPTS[0]) + piece.position - 1
        assert piece.token == (text[piece.position - 1] + (place % 3 == 0)) % 257


def test_a_notebook_shows_the_html_and_rich_the_colours(out):
    shown = viz.highlight(out, TOKENIZER)
    assert shown._repr_html_() == shown.to_html()
    console = Console(record=True, force_terminal=True, color_system="standard", width=300)
    console.print(shown)
    assert "\x1b[30;42m" in console.export_text(styles=True)


def test_the_page_is_light_and_dark_and_loads_nothing(out, tmp_path):
    path = viz.highlight(out, TOKENIZER).save(tmp_path / "answer.html")
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "prefers-color-scheme: dark" in page and 'charset="utf-8"' in page
    assert not re.search(r"https?:|url\(|@import|<script|<link", page)
    for name in ("accepted", "own"):
        assert page.count(f".hf-specdec .{name} {{") == 2


def test_save_writes_what_the_name_ends_in(out, tmp_path):
    shown = viz.highlight(out, TOKENIZER)
    assert shown.save(str(tmp_path / "a.txt")).read_text(encoding="utf-8") == f"{shown}\n"
    assert "\x1b[30;42m" in shown.save(tmp_path / "a.ans").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"\.html"):
        shown.save(tmp_path / "a.pdf")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_encoding_of_standard_output_lacks_is_spelled_out(encoding, monkeypatch, tmp_path):
    shown = viz.highlight(trace(entry("a\n\t", "é…")), TOKENIZER)
    stream = TextIOWrapper(BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)
    print(shown)
    Console(file=stream, width=300).print(shown)
    print(shown.to_terminal())
    stream.flush()
    first, second, coloured = stream.buffer.getvalue().decode(encoding).split("drafted and accepted")[1:]
    e = "\\xe9" if encoding == "ascii" else "é"
    assert f"1 [a\\n\\t]{e}\\u2026\n" in first and f"1 [a\\n\\t]{e}\\u2026\n" in second
    assert f"1 a\\n\\t{e}\\u2026\n" in re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert "…" in shown.save(tmp_path / "a.ans").read_text(encoding="utf-8")
    assert "1 [a↵⇥]é…\n" in shown.save(tmp_path / "a.txt").read_text(encoding="utf-8")


# --- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [-1, 2, 1.0, True, "0"])
def test_a_row_out_of_range_is_named(out, row):
    with pytest.raises(ValueError, match=rf"row={row!r} is not in this trace, which has rows 0 to 1"):
        viz.highlight(out, TOKENIZER, row=row)


def test_a_row_of_an_empty_trace_is_refused():
    with pytest.raises(ValueError, match="has no row"):
        viz.highlight(SpeculationTrace({}), TOKENIZER)


@pytest.mark.parametrize("value", [torch.zeros(1, 3, dtype=torch.long), None, [1, 2], "text"])
def test_without_a_trace_the_error_says_how_to_get_one(value):
    with pytest.raises(ValueError, match="return_dict_in_generate=True"):
        viz.highlight(value, TOKENIZER)


def test_a_plain_output_has_no_trace():
    model = hf_specdec.enable(tiny_model(0))
    stock = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="no speculation trace"):
        viz.highlight(stock, TOKENIZER)


def test_a_trace_without_ids_is_refused():
    made = SpeculationTrace({}, rounds=[[Round(0, 2, 1, 2, "model")]], drafted=[[True, False]])
    with pytest.raises(ValueError, match="no token ids"):
        viz.highlight(made, TOKENIZER)


@pytest.mark.parametrize("tokenizer", [None, "gpt2"])
def test_a_tokenizer_that_cannot_decode_is_refused(out, tokenizer):
    with pytest.raises(ValueError, match="tokenizer="):
        viz.highlight(out, tokenizer)


def test_an_answer_without_a_token_is_an_empty_page():
    shown = viz.highlight(trace(), TOKENIZER)
    assert Reader(shown.to_html()).items == [] and "0 tokens in 0 rounds, nothing was drafted" in str(shown)
