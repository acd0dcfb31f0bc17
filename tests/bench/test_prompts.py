import json

import pytest

from hf_specdec.bench.prompts import SHIPPED, by_category, load_prompts

from hf_specdec.training.prompts import find_prompts

from .conftest import byte_tokenizer


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_the_shipped_sets_hold_six_to_eight_prompts_each():
    groups = by_category(load_prompts())
    assert tuple(groups) == SHIPPED
    assert all(6 <= len(group) <= 8 for group in groups.values())
    assert [prompt.category for prompt in load_prompts("chat")] == ["chat"] * len(groups["chat"])


def test_the_limit_counts_per_category():
    assert {name: len(group) for name, group in by_category(load_prompts("shipped", limit=2)).items()} == dict.fromkeys(
        SHIPPED, 2
    )


def test_spec_bench_records_give_their_first_turn_as_a_chat_prompt(tmp_path):
    path = write(tmp_path / "spec.jsonl", {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]})
    (prompt,) = load_prompts(path)
    assert (prompt.id, prompt.category, prompt.text, prompt.chat) == ("81", "writing", "First.", True)


def test_humaneval_records_give_raw_text_under_the_name_of_the_file(tmp_path):
    path = write(tmp_path / "humaneval.jsonl", {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "assert True"})
    (prompt,) = load_prompts(path)
    assert (prompt.id, prompt.category, prompt.text, prompt.chat) == ("HumanEval/0", "humaneval", "def f():\n", False)


def test_raw_text_and_targets_without_a_template_are_tokenized_as_they_are(tmp_path):
    (prompt,) = load_prompts(write(tmp_path / "a.jsonl", {"prompt": "ab"}))
    tokenizer = byte_tokenizer()
    assert prompt.ids(tokenizer) == tokenizer("ab")["input_ids"]
    (turn,) = load_prompts(write(tmp_path / "b.jsonl", {"turns": ["ab"]}))
    assert turn.ids(tokenizer) == prompt.ids(tokenizer)
    tokenizer.chat_template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    assert tokenizer.decode(turn.ids(tokenizer)) == "[ab]"
    assert tokenizer.decode(prompt.ids(tokenizer)) == "ab"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{not json}\n", "broken.jsonl:1: not JSON"),
        ('{"turns": ["x"]}\n' + "[" * 10**5, "broken.jsonl:2: not JSON"),
        ('{"turns": ["x"]}\n[1, 2]\n', "broken.jsonl:2: expected a JSON object"),
        ('{"question": "x"}\n', "broken.jsonl:1: no prompt found"),
        ('{"turns": [" "]}\n', "broken.jsonl:1: no prompt found"),
        ("\n", "holds no prompt"),
    ],
)
def test_a_broken_prompt_file_is_refused_with_the_line(tmp_path, content, message):
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


def test_an_unknown_source_lists_the_known_ones():
    with pytest.raises(ValueError, match="shipped.*code_edit.*hub:NAME"):
        load_prompts("no_such_file.jsonl")


def test_lines_end_at_line_feeds_alone_and_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = ["one\u2028two", "three\u0085four"]
    path.write_text("\ufeff" + "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in texts), encoding="utf-8", newline="")
    assert [prompt.text for prompt in load_prompts(str(path))] == texts
    assert list(find_prompts(str(path)).values()) == texts
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\u2028two\nthree\n", encoding="utf-8")
    assert list(find_prompts(str(lines)).values()) == ["one\u2028two", "three"]
