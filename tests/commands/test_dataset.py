"""`hf-specdec generate --dataset`: the answers, what is refused, sharding, resuming, and what a kill leaves behind."""

import csv
import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hf_specdec
from hf_specdec.bench.embedded import load_target
from hf_specdec.cli import app
from hf_specdec.commands import shards as shards_module
from hf_specdec.commands.rows import Row, read_rows
from hf_specdec.commands.shards import Place, finished
from hf_specdec.commands.writer import Writer, _device, draft_weights, row_seed
from hf_specdec.drafts import MedusaDraft, NGramDraft, RecyclingDraft
from hf_specdec.hints import install
from hf_specdec.training.heads import build as build_heads

from ..bench import conftest as saved
from ..helpers import FULL

target_folder, draft_folder = saved.target_folder, saved.draft_folder
PROMPTS = [f"row {i} " * (1 + i * 7 % 5) for i in range(10)]
needs_locks = pytest.mark.skipif(shards_module.fcntl is None, reason="no file locks on this system")
SAMPLED = ("--sample", "--temperature", 0.9, "--seed", 5)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def data(tmp_path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt, "other": 1} for prompt in PROMPTS])


def write_jsonl(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in ("generate", *arguments)])


def work(target, data, output, *settings):
    """A run that must succeed: its lines by index."""
    result = run(target, "--dataset", data, "--output", output, "--max-new-tokens", 10, "--batch", 4, *settings)
    assert result.exit_code == 0, result.stderr
    return lines(output)


def lines(output) -> list[dict]:
    records = [json.loads(line) for path in Path(output).glob("rows-*.jsonl") for line in path.read_text().splitlines()]
    return sorted(records, key=lambda record: record["index"])


def content(output) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(output).glob("rows-*.jsonl")}


def error_of(result) -> str:
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("hf-specdec: error:")]
    return line


def single(target, prompt, *settings) -> dict:
    result = run(target, "--prompt", prompt, "--max-new-tokens", 10, "--json", *settings)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# --- what is written ----------------------------------------------------------------------------------------------------------


def test_every_row_has_the_answer_that_plain_generate_gives_to_its_prompt(target_folder, data, tmp_path):
    model, tokenizer = load_target(target_folder)
    records = work(target_folder, data, tmp_path / "out", "--tokens")
    assert [record["index"] for record in records] == list(range(len(PROMPTS)))
    for prompt, record in zip(PROMPTS, records):
        ids = tokenizer(prompt, return_tensors="pt")
        plain = model.generate(**ids, max_new_tokens=10, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
        assert record["tokens"] == plain and record["text"] == tokenizer.decode(plain, skip_special_tokens=True)
        assert record["new_tokens"] == len(plain) and record["truncated"] == (256 not in plain)
        assert record["prompt_sha256"] == hashlib.sha256(prompt.encode()).hexdigest()


@pytest.mark.parametrize("settings", [(), SAMPLED, (*SAMPLED, "--top-k", 20, "--repetition-penalty", 1.2)], ids=["greedy", "sampled", "top_k"])
def test_text_and_trace_of_a_row_are_those_of_the_command_for_one_prompt(target_folder, draft_folder, data, tmp_path, settings):
    settings = ("--draft", draft_folder, "--k", 3, *settings)
    for prompt, record in zip(PROMPTS, work(target_folder, data, tmp_path / "out", *settings, "--tokens")):
        # the line's own seed repeats the row, whatever was decoded with it
        alone = single(target_folder, prompt, *settings, "--seed", record["seed"])
        assert (record["text"], record["tokens"]) == (alone["text"], alone["tokens"])
        for name in ("acceptance_rate", "block_efficiency"):
            assert record[name] == alone["speculation"][name]


def test_token_ids_are_left_out_unless_asked_for(target_folder, data, tmp_path):
    assert all(set(record) == {"index", "prompt_sha256", "text", "new_tokens", "truncated", "acceptance_rate", "block_efficiency", "seed"}
               for record in work(target_folder, data, tmp_path / "out"))


def test_seeds_depend_on_seed_and_index_only_and_are_all_different():
    seeds = {row_seed(seed, index) for seed in range(20) for index in range(200)}
    assert len(seeds) == 4000 and all(0 <= seed < 2**63 for seed in seeds) and row_seed(1, 2) == row_seed(1, 2)


def test_with_k_fixed_no_row_depends_on_the_batch_or_on_the_other_rows(target_folder, draft_folder, data, tmp_path):
    settings = ("--draft", draft_folder, "--k", 4, *SAMPLED)
    together = work(target_folder, data, tmp_path / "a", *settings)
    assert work(target_folder, data, tmp_path / "b", *settings, "--batch", 1) == together
    assert work(target_folder, data, tmp_path / "c", *settings, "--limit", 3) == together[:3]
    assert work(target_folder, data, tmp_path / "d", *settings, "--seed", 6) != together


def test_the_weights_are_compressed_before_with_mx(target_folder, data, tmp_path):
    model, tokenizer = load_target(target_folder)
    hf_specdec.mx.compress(model, "mxfp4_e2m1")
    records = work(target_folder, data, tmp_path / "out", "--mx", "mxfp4_e2m1", "--tokens")
    for prompt, record in zip(PROMPTS, records):
        ids = tokenizer(prompt, return_tensors="pt")
        assert record["tokens"] == model.generate(**ids, max_new_tokens=10, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    assert single(target_folder, PROMPTS[0], "--mx", "mxfp4_e2m1")["tokens"] == records[0]["tokens"]
    assert records != work(target_folder, data, tmp_path / "dense", "--tokens")
    assert "mxfp5" in error_of(run(target_folder, "--dataset", data, "--output", tmp_path / "no", "--mx", "mxfp5"))


def test_progress_with_rate_and_eta_and_the_summary_go_to_standard_error(target_folder, data, tmp_path):
    result = run(target_folder, "--dataset", data, "--output", tmp_path / "out", "--max-new-tokens", 4, "--batch", 2)
    assert result.stdout == "" and "Rows 8 of 10, about" in result.stderr and " left (" in result.stderr and "rows/s" in result.stderr
    assert "10 rows" in result.stderr and "block efficiency" in result.stderr and "10 of 10 rows are done, complete." in result.stderr


# --- what is read -------------------------------------------------------------------------------------------------------------


def test_all_kinds_of_file_give_the_same_rows(target_folder, data, tmp_path):
    expected = work(target_folder, data, tmp_path / "jsonl")
    records = [{"prompt": prompt, "n": i} for i, prompt in enumerate(PROMPTS)]
    (tmp_path / "in.json").write_text(json.dumps(records))
    with (tmp_path / "in.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["prompt", "n"])
        writer.writeheader()
        writer.writerows(records)
    assert work(target_folder, tmp_path / "in.json", tmp_path / "json") == expected
    assert work(target_folder, tmp_path / "in.csv", tmp_path / "csv") == expected


def test_a_jsonl_file_needs_no_datasets(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    program = f"import sys\nsys.modules['datasets'] = sys.modules['pyarrow'] = None\nfrom hf_specdec.commands.rows import read_rows\nprint(read_rows({str(path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=100)
    assert done.returncode == 0 and "prompt='a'" in done.stdout, done.stderr
    (tmp_path / "in.parquet").write_bytes(b"")
    for source in (tmp_path / "in.parquet", "hub:some/thing"):
        done = subprocess.run([sys.executable, "-c", program.replace(repr(str(path)), repr(str(source)))], capture_output=True, text=True, env=environment(), timeout=100)
        assert "ImportError" in done.stderr and install("train") in done.stderr


def test_parquet_files_and_data_sets_of_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"prompt": PROMPTS, "messages": [[{"role": "user", "content": prompt}] for prompt in PROMPTS]})
    data.to_parquet(tmp_path / "in.parquet")
    rows, column = read_rows(str(tmp_path / "in.parquet"))
    assert column == "prompt" and [row.prompt for row in rows] == PROMPTS
    assert read_rows(str(tmp_path / "in.parquet"), "messages", 2)[0][1].prompt == [{"role": "user", "content": PROMPTS[1]}]

    (tmp_path / "hub").mkdir()  # a folder is loaded as a hub data set is
    write_jsonl(tmp_path / "hub" / "train.jsonl", [{"text": prompt} for prompt in PROMPTS])
    write_jsonl(tmp_path / "hub" / "test.jsonl", [{"text": "a"}, {"text": "b"}])
    (tmp_path / "one").mkdir()
    write_jsonl(tmp_path / "one" / "train.jsonl", [{"text": prompt} for prompt in PROMPTS])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert [row.prompt for row in read_rows(f"hub:{tmp_path}/hub:test")[0]] == ["a", "b"]
    assert [row.prompt for row in read_rows(f"hub:{tmp_path}/one")[0]] == PROMPTS
    with pytest.raises(ValueError, match=r"has the splits \['train', 'test'\]: name one, hub:.*/hub:SPLIT"):
        read_rows(f"hub:{tmp_path}/hub")
    with pytest.raises(ValueError, match="dev"):
        read_rows(f"hub:{tmp_path}/hub:dev")


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"text": "a"}, "a"),
        ({"turns": ["a", "b"], "text": "c"}, "a"),
        ({"prompt": "a", "turns": ["b"]}, "a"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, [{"role": "user", "content": "a"}]),
    ],
)
def test_the_prompt_is_found_in_its_usual_columns(tmp_path, record, prompt):
    rows, _ = read_rows(str(write_jsonl(tmp_path / "in.jsonl", [record])))
    assert rows[0].prompt == prompt and not rows[0].problem


def test_messages_go_through_the_chat_template(tmp_path):
    tokenizer = saved.byte_tokenizer()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows, _ = read_rows(str(write_jsonl(tmp_path / "in.jsonl", [{"messages": turns}, {"messages": turns[:1]}])))
    with pytest.raises(ValueError, match="the tokenizer has none"):
        rows[0].ids(tokenizer, raw=False)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[answer]"
    assert tokenizer.decode(rows[0].ids(tokenizer, raw=False)) == "[user] a [assistant] b [user] c [answer]"
    with pytest.raises(ValueError, match="without --raw"):
        rows[0].ids(tokenizer, raw=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    (row,), _ = read_rows(str(write_jsonl(tmp_path / "n.jsonl", [{"messages": [{"role": "user", "content": 3}]}])))
    with pytest.raises(ValueError, match="^the chat template does not take its messages .can only concatenate"):
        row.ids(tokenizer, raw=False)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[answer]"
    assert rows[1].ids(tokenizer, False) == read_rows(str(write_jsonl(tmp_path / "b.jsonl", [{"text": "a"}])))[0][0].ids(tokenizer, False)


def test_lines_end_at_newlines_only_and_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "in.jsonl").write_bytes("\ufeff".encode() + '{"prompt": "a\u2028b"}\r\n\n{"prompt": "c"}'.encode())
    assert [(row.index, row.prompt) for row in read_rows(str(tmp_path / "in.jsonl"))[0]] == [(0, "a\u2028b"), (1, "c")]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in.jsonl", b'{"prompt": "a"}\n{"prompt": ', "in.jsonl:2: not JSON"),
        ("in.jsonl", b'{"prompt": "a"}\n["b"]\n', "row 1 is no JSON object, but list"),
        ("in.jsonl", b'{"prompt": "\xff"}\n', "in.jsonl:1: not JSON"),
        ("in.jsonl", b"", "the data set is empty"),
        ("in.jsonl", b"\n\n", "the data set is empty"),
        ("in.json", b"[]", "the data set is empty"),
        ("in.csv", b"prompt,n\n", "the data set is empty"),
        ("in.json", b'{"prompt": "a"}', "one array of objects; this one holds dict"),
        ("in.json", b"[{]", "in.json: not JSON"),
        ("in.csv", b'prompt\n"a\n', "in.csv: not CSV"),
        ("in.csv", b"prompt\n\xff\n", "in.csv: not CSV"),
        ("in.txt", b"a", "in.txt: give a file that ends in one of .jsonl, .json, .csv, .parquet, or hub:"),
        ("in.jsonl", b'{"question": "a", "answer": "b"}\n', "no column of prompt, turns, messages, text; its columns are ['question', 'answer']"),
        ("in.jsonl", b'{"prompt": "a"}\n{"question": "a"}\n', "row 1 has no column 'prompt'; its columns are ['question']"),
    ],
)
def test_an_unreadable_or_empty_data_set_is_refused_before_any_work(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    result = run("no/such/model", "--dataset", tmp_path / name, "--output", tmp_path / "out")  # read before the model is
    assert message in error_of(result) and not (tmp_path / "out").exists()


def test_a_damaged_parquet_file_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "in.parquet").write_bytes(b"PAR1 and then nothing")
    assert "not a whole Parquet file" in error_of(run("x", "--dataset", tmp_path / "in.parquet", "--output", tmp_path / "out"))


def test_a_missing_file_a_folder_and_a_missing_column_are_named(tmp_path, data):
    assert "there is no such file" in error_of(run("x", "--dataset", tmp_path / "no.jsonl", "--output", tmp_path / "out"))
    (tmp_path / "folder.jsonl").mkdir()
    assert "there is no such file" in error_of(run("x", "--dataset", tmp_path / "folder.jsonl", "--output", tmp_path / "out"))
    message = error_of(run("x", "--dataset", data, "--output", tmp_path / "out", "--column", "question"))
    assert "no column 'question'; its columns are ['prompt', 'other']. Name another with --column NAME." in message
    assert "the data set's name is missing" in error_of(run("x", "--dataset", "hub:", "--output", tmp_path / "out"))


BAD = {
    "the prompt is empty": " \n",
    "but null": None,
    "but int": 3,
    "nor messages, but list": [["a", "b"]],
    "not valid Unicode": "a\ud800",
    "the target's context holds 1024": "a" * 1020,
    "its messages are all answers": [{"role": "assistant", "content": "a"}],
    "the tokenizer has none": [{"role": "user", "content": "a"}],
}


@pytest.mark.parametrize("problem", BAD)
def test_a_row_without_an_answer_is_named_before_any_work_or_recorded_as_skipped(target_folder, tmp_path, problem):
    data = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in ("a", "b", BAD[problem], "c", BAD[problem])])
    message = error_of(run(target_folder, "--dataset", data, "--output", tmp_path / "out", "--max-new-tokens", 10))
    assert "row 2" in message and problem in message and "2 such rows" in message and "--skip-invalid" in message
    assert not (tmp_path / "out").exists()
    records = work(target_folder, data, tmp_path / "out", "--skip-invalid")
    assert [problem in record.get("skipped", "") for record in records] == [False, False, True, False, True]
    assert set(records[2]) == {"index", "prompt_sha256", "skipped"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--output", "{out}"), "--output has no meaning without --dataset"),
        (("--limit", 3), "--limit has no meaning without --dataset"),
        (("--dataset", "{data}"), "--dataset needs --output"),
        (("--dataset", "{data}", "--output", "{out}", "--prompt", "a"), "--prompt and --dataset"),
        (("--dataset", "{data}", "--output", "{out}", "--json"), "--json and --dataset"),
        (("--dataset", "{data}", "--output", "{out}", "--k", 65), "--k 65"),
        (("--dataset", "{data}", "--output", "{out}", "--seed", -1), "--seed -1"),
        (("--dataset", "{data}", "--output", "{data}"), "is a file; name a folder"),
    ],
)
def test_options_that_do_not_go_together_are_refused(data, tmp_path, settings, message):
    settings = [str(value).format(data=data, out=tmp_path / "out") for value in settings]
    assert message in error_of(run("no/such/model", *settings)) and not (tmp_path / "out").exists()


# --- resuming -----------------------------------------------------------------------------------------------------------------


def test_wherever_the_file_is_cut_the_same_command_makes_it_whole(target_folder, draft_folder, data, tmp_path):
    settings = ("--draft", draft_folder, *SAMPLED, "--tokens")
    work(target_folder, data, tmp_path / "out", *settings)
    whole = content(tmp_path / "out")
    path = tmp_path / "out" / "rows-00000.jsonl"
    size = len(whole[path.name])
    for cut in range(0, size, 97 if FULL else size // 10):
        path.write_bytes(whole[path.name][:cut])
        work(target_folder, data, tmp_path / "out", *settings)
        assert content(tmp_path / "out") == whole


@pytest.mark.parametrize("tail", [b"\0" * 500, b'{"index": 9', b"\0\n\0\n", b'{"other": 1}\n'])
def test_rubbish_at_the_end_is_cut_off(target_folder, data, tmp_path, tail):
    work(target_folder, data, tmp_path / "out")
    whole, path = content(tmp_path / "out"), tmp_path / "out" / "rows-00000.jsonl"
    kept = b"".join(whole[path.name].splitlines(keepends=True)[:5])
    path.write_bytes(kept + tail)
    work(target_folder, data, tmp_path / "out")
    assert content(tmp_path / "out") == whole


def test_a_full_disk_is_reported_and_leaves_a_resumable_state(target_folder, data, tmp_path, monkeypatch):
    whole = work(target_folder, data, tmp_path / "whole")
    write, room = os.write, [2500]

    def until_full(file, data):
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(file, bytes(data)[: room[0]])  # a short write first, as a full disk gives it
        room[0] -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", until_full)
        result = run(target_folder, "--dataset", data, "--output", tmp_path / "out", "--max-new-tokens", 10, "--batch", 4)
    assert "No space left" in error_of(result) and (tmp_path / "out" / "rows-00000.jsonl").stat().st_size == 2500
    assert work(target_folder, data, tmp_path / "out") == whole


def test_what_is_done_is_reported_and_not_done_again(target_folder, data, tmp_path):
    work(target_folder, data, tmp_path / "out")
    path = tmp_path / "out" / "rows-00000.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:6]))
    again = ("--dataset", data, "--output", tmp_path / "out", "--max-new-tokens", 10, "--batch", 4)
    result = run(target_folder, *again)
    assert "Resuming: 6 of 10 rows are done." in result.stderr and "4 rows," in result.stderr
    changed = path.stat().st_mtime_ns
    result = run(target_folder, *again)
    assert "Resuming: 10 of 10 rows are done." in result.stderr and "complete." in result.stderr and path.stat().st_mtime_ns == changed


def test_lines_that_do_not_belong_there_are_refused(target_folder, data, tmp_path):
    work(target_folder, data, tmp_path / "out")
    path = tmp_path / "out" / "rows-00000.jsonl"
    whole, again = path.read_bytes(), ("--dataset", data, "--output", tmp_path / "out", "--max-new-tokens", 10)
    first, second, *others = whole.splitlines(keepends=True)
    for damage, message in {
        whole + first: "row 0 is there twice",
        first[:20] + b"\n" + second: "rows-00000.jsonl:1 is damaged",
        whole + b'{"index": 10}\n': "row 10 is none of the 10 rows",
    }.items():
        path.write_bytes(damage)
        assert message in error_of(run(target_folder, *again)) and path.read_bytes() == damage


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--max-new-tokens", 11), "--max-new-tokens was 10, is 11"),
        (("--k", 3), "--k was 'auto', is '3'"),
        (("--sample",), "--sample was False, is True"),
        (("--repetition-penalty", 1.5), "--repetition-penalty was None, is 1.5"),
        (("--seed", 1), "--seed was 0, is 1"),
        (("--draft", "uniform"), "--draft was 'prompt_lookup', is 'uniform'"),
        (("--mx", "mxfp4_e2m1"), "--mx was None, is 'mxfp4_e2m1'"),
        (("--dtype", "bfloat16"), "--dtype was 'float32', is 'bfloat16'"),
        (("--lenience", 0.5, "--raw", "--tokens"), "--raw was False, is True; --lenience was 1.0, is 0.5; --tokens was False, is True"),
        (("--limit", 4), "the data set's rows was 10, is 4"),
        (("--column", "second"), "the data set's column was 'prompt', is 'second'"),
    ],
)
def test_another_job_is_refused_and_what_differs_is_named(target_folder, tmp_path, settings, message):
    data = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt, "second": prompt} for prompt in PROMPTS])
    work(target_folder, data, tmp_path / "out")
    before = content(tmp_path / "out"), (tmp_path / "out" / "job.json").read_bytes()
    line = error_of(run(target_folder, "--dataset", data, "--output", tmp_path / "out", "--max-new-tokens", 10, "--batch", 4, *settings))
    assert "is the output of another job: " in line and message in line
    assert before == (content(tmp_path / "out"), (tmp_path / "out" / "job.json").read_bytes())


def test_other_prompts_and_other_weights_under_the_same_name_are_another_job(target_folder, data, tmp_path):
    saved.tiny_model(0).save_pretrained(tmp_path / "model")
    saved.byte_tokenizer().save_pretrained(tmp_path / "model")
    work(tmp_path / "model", data, tmp_path / "out")
    again = ("--dataset", data, "--output", tmp_path / "out", "--max-new-tokens", 10)
    write_jsonl(data, [{"prompt": prompt} for prompt in [*PROMPTS[:-1], "changed"]])
    assert "the data set's sha256 was" in error_of(run(tmp_path / "model", *again))
    write_jsonl(data, [{"prompt": prompt, "more": "columns"} for prompt in PROMPTS])  # the same prompts
    work(tmp_path / "model", data, tmp_path / "out")
    saved.tiny_model(1).save_pretrained(tmp_path / "model")
    assert "target weights was" in error_of(run(tmp_path / "model", *again))


def test_the_batch_size_may_change_where_no_text_depends_on_it(target_folder, data, tmp_path):
    work(target_folder, data, tmp_path / "greedy")
    work(target_folder, data, tmp_path / "greedy", "--batch", 2)
    work(target_folder, data, tmp_path / "fixed", *SAMPLED, "--k", 3)
    work(target_folder, data, tmp_path / "fixed", *SAMPLED, "--k", 3, "--batch", 2)
    for settings in ((), ("--k", 3, "--draft", "ngram_recycling")):  # rows share a K, or a table and a tree
        again = ("--dataset", data, "--output", tmp_path / f"{len(settings)}", "--max-new-tokens", 10, *SAMPLED, *settings)
        assert run(target_folder, *again, "--batch", 4).exit_code == 0
        assert "--batch was 4, is 2" in error_of(run(target_folder, *again, "--batch", 2))


def test_a_job_without_a_finished_row_gives_way(target_folder, data, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("no rows")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "answer", fail)
        result = run(target_folder, "--dataset", data, "--output", tmp_path / "out", "--max-new-tokens", 10, "--sample")
    assert "no rows" in error_of(result) and (tmp_path / "out" / "job.json").exists() and lines(tmp_path / "out") == []
    assert len(work(target_folder, data, tmp_path / "out")) == len(PROMPTS)


def test_folders_with_something_else_in_them_are_refused(target_folder, data, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    assert "holds files, but no job.json" in error_of(run(target_folder, "--dataset", data, "--output", tmp_path / "other"))
    work(target_folder, data, tmp_path / "out")
    (tmp_path / "out" / "job.json").write_text("[]")
    assert "is not a job file" in error_of(run(target_folder, "--dataset", data, "--output", tmp_path / "out"))


# --- several processes --------------------------------------------------------------------------------------------------------


def in_process(monkeypatch, rank, world, *arguments):
    with monkeypatch.context() as patch:
        for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}.items():
            patch.setenv(name, str(value))
        return work(*arguments)


def test_processes_share_the_rows_without_overlap_and_write_what_one_alone_writes(target_folder, data, tmp_path, monkeypatch):
    alone = work(target_folder, data, tmp_path / "alone", *SAMPLED)
    for rank in (1, 0):
        in_process(monkeypatch, rank, 2, target_folder, data, tmp_path / "two", *SAMPLED)
    assert set(content(tmp_path / "two")) == {"rows-00000.jsonl", "rows-00001.jsonl"} and lines(tmp_path / "two") == alone
    shares = [[json.loads(line)["index"] for line in data.splitlines()] for data in content(tmp_path / "two").values()]
    assert sorted(map(len, shares)) == [4, 6] and sorted(sum(shares, [])) == list(range(10))


def test_more_processes_than_batches_and_another_number_of_them_on_resuming(target_folder, data, tmp_path, monkeypatch):
    alone = work(target_folder, data, tmp_path / "alone", *SAMPLED)
    in_process(monkeypatch, 4, 5, target_folder, data, tmp_path / "out", *SAMPLED)
    assert lines(tmp_path / "out") == []
    in_process(monkeypatch, 2, 5, target_folder, data, tmp_path / "out", *SAMPLED)
    assert lines(tmp_path / "out") == alone[8:]
    path = tmp_path / "out" / "rows-00002.jsonl"
    path.write_bytes(path.read_bytes()[:-10])  # torn, in a shard that the next launch has no process for
    in_process(monkeypatch, 0, 2, target_folder, data, tmp_path / "out", *SAMPLED)
    assert [json.loads(line)["index"] for line in path.read_bytes().splitlines()] == [8]
    in_process(monkeypatch, 1, 2, target_folder, data, tmp_path / "out", *SAMPLED)
    assert lines(tmp_path / "out") == alone


def test_every_process_of_a_machine_takes_a_gpu_of_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    assert [_device(Place(rank, 5, rank % 3)) for rank in range(5)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:0", "cuda:1"]
    assert _device(Place()) is None  # the loader's choice
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert _device(Place(1, 2, 1)) == "cpu"


@pytest.mark.parametrize("environment", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x"}, {"RANK": "-1", "WORLD_SIZE": "2"}])
def test_an_impossible_rank_is_refused(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="RANK"):
        Place.from_environment()


@needs_locks
def test_two_runs_at_once_never_write_to_the_same_folder(target_folder, data, tmp_path):
    work(target_folder, data, tmp_path / "out", "--limit", 9)
    again = ("--dataset", data, "--output", tmp_path / "out", "--max-new-tokens", 10, "--batch", 4, "--limit", 9)
    fcntl = shards_module.fcntl
    with (tmp_path / "out" / ".lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        lock.truncate(0)
        os.pwrite(lock.fileno(), b"2 process(es), --batch 4", 0)
        assert "another run is at work there (2 process(es), --batch 4)" in error_of(run(target_folder, *again))
    with (tmp_path / "out" / "rows-00000.jsonl").open("r+") as shard:
        fcntl.flock(shard, fcntl.LOCK_EX)
        assert "another process is writing rows-00000.jsonl" in error_of(run(target_folder, *again))
    assert len(work(target_folder, data, tmp_path / "out", "--limit", 9)) == 9  # both have let go


@needs_locks
def test_a_file_system_without_locks_is_no_obstacle(target_folder, data, tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(shards_module.fcntl, "flock", none)
    assert len(work(target_folder, data, tmp_path / "a")) == len(PROMPTS)
    monkeypatch.setattr(shards_module, "fcntl", None)
    assert len(work(target_folder, data, tmp_path / "b")) == len(PROMPTS)


def test_a_line_that_is_being_written_is_not_counted(tmp_path):
    (tmp_path / "rows-00000.jsonl").write_bytes(b'{"index": 0}\n{"index": 1}')
    assert finished(tmp_path / "rows-00000.jsonl") == ([0], 13)


# --- the end of a process -----------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    source = Path(hf_specdec.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(source.parent)]), "OMP_NUM_THREADS": "1"}


def driver(tmp_path, scenario, count, seed) -> dict:
    for name, model in {"target": saved.tiny_model(0), "draft": saved.perturbed(saved.tiny_model(0))}.items():
        model.save_pretrained(tmp_path / name)
        saved.byte_tokenizer().save_pretrained(tmp_path / name)
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"row {i} " * (1 + i * 7 % 5)} for i in range(40)])
    command = [sys.executable, "-m", "tests.commands.dataset_kills", scenario, str(tmp_path), str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=Path(__file__).parents[2], timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("seed", range(5) if FULL else [0])
def test_kill_9_at_any_moment_loses_nothing_and_doubles_nothing(tmp_path, seed):
    count = 60 if FULL else 20
    found = driver(tmp_path, "kills", count, seed)
    assert found["rows"] == 40 and found["killed"] >= count and found["outputs"] >= 1
    assert all(found["equal"]), found
    assert found["torn"] > 0  # the moments were not all harmless


def test_after_ctrl_c_the_same_command_goes_on(tmp_path):
    found = driver(tmp_path, "interrupts", 3, 0)
    assert found["codes"] == [130] * 3 and 9 <= found["between"] < 40, found
    assert found["last"] == 0 and found["equal"]
    assert found["log"].count("Interrupted. The same command goes on") == 3 and "Resuming: " in found["log"]


def test_another_table_or_drafter_under_the_same_name_is_another_job(target_folder, data, tmp_path):
    model, tokenizer = load_target(target_folder)
    table, out = tmp_path / "table.safetensors", tmp_path / "out"
    NGramDraft.from_texts(["row 1 row 2 row 3"], tokenizer, order=2).save(table)
    work(target_folder, data, out, "--draft", table, "--limit", 4, *SAMPLED)
    work(target_folder, data, out, "--draft", table, "--limit", 4, *SAMPLED)
    NGramDraft.from_texts(["something else, other rows"], tokenizer, order=2).save(table)
    message = error_of(run(target_folder, "--dataset", data, "--output", out, "--max-new-tokens", 10, "--batch", 4, "--draft", table, "--limit", 4, *SAMPLED))
    assert "draft weights was" in message
    drafts = [MedusaDraft(build_heads(model, 2), model) for _ in range(2)]
    drafts[1].heads.blocks[0][0].bias.data += 1
    assert len({draft_weights("folder", draft) for draft in drafts}) == 2 and draft_weights("recycling", RecyclingDraft()) is None


@pytest.mark.parametrize("template", ["", "{{ messages[0].content }}"], ids=["text", "chat"])
@pytest.mark.parametrize("prompt", ["abcdefgh", [{"role": "user", "content": "abcdefgh"}]], ids=["prompt", "messages"])
def test_a_long_prompt_brings_no_warning_of_the_tokenizer_as_it_is_refused_by_name(prompt, template):
    tokenizer = saved.byte_tokenizer()
    tokenizer.model_max_length, tokenizer.chat_template = 4, template or (None if isinstance(prompt, str) else "{{ messages[0].content }}")
    assert len(Row(0, prompt, "").ids(tokenizer, raw=False)) == 8
    assert not tokenizer.deprecation_warnings
