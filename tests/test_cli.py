import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from hf_specdec import SpeculativeConfig, __version__, compiled, passes
from hf_specdec.bench import arms, report
from hf_specdec.bench.embedded import load_target, near
from hf_specdec.cli import app
from hf_specdec.commands import bench, leaving
from hf_specdec.commands.common import check_overwrite, load_draft
from hf_specdec.caches import CACHE
from hf_specdec.config import ALONE
from hf_specdec.drafts import NGramDraft, RetrievalDraft
from hf_specdec.loading import loaded
from hf_specdec.training import build_drafter
from hf_specdec.training.drafter import save

from . import architectures, seeing
from .bench import conftest as saved
from .helpers import FULL, VOCAB, word_tokenizer

ROOT = Path(__file__).parent.parent
target_folder, draft_folder = saved.target_folder, saved.draft_folder


def run(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def test_generate_prints_text_or_json_with_the_trace(target_folder, draft_folder):
    plain = run("generate", target_folder, "--prompt", "abcabcabc", "--max-new-tokens", 12)
    assert plain.exit_code == 0 and "block efficiency" in plain.stderr
    result = run(
        "generate",
        target_folder,
        "--draft",
        draft_folder,
        "--k",
        3,
        "--prompt",
        "abcabcabc",
        "--max-new-tokens",
        12,
        "--json",
    )
    answer = json.loads(result.stdout)
    assert result.exit_code == 0 and plain.stdout == answer["text"] + "\n"
    assert answer["speculation"]["config"]["num_assistant_tokens"] == 3 and answer["speculation"]["lossless"]
    assert len(answer["tokens"]) == answer["speculation"]["new_tokens"][0] <= 12


def test_stop_strings_of_the_models_own_generation_config_end_its_answers(target_folder, tmp_path):
    whole = json.loads(run("generate", target_folder, "--prompt", "abc", "--max-new-tokens", 12, "--json").stdout)["text"]
    model, tokenizer = load_target(target_folder)
    model.generation_config.stop_strings = [next(character for character in whole[2:] if character.isascii())]
    model.save_pretrained(tmp_path / "model"), tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text('{"prompt": "abc"}\n')
    settings = ("generate", tmp_path / "model", "--max-new-tokens", 12)
    (stop,), answer = model.generation_config.stop_strings, run(*settings, "--prompt", "abc", "--json")
    assert answer.exit_code == 0 and json.loads(answer.stdout)["text"] == whole[: whole.index(stop) + 1], answer.stderr
    assert run(*settings, "--dataset", tmp_path / "in.jsonl", "--output", tmp_path / "out").exit_code == 0
    assert json.loads((tmp_path / "out" / "rows-00000.jsonl").read_text())["text"] == whole[: whole.index(stop) + 1]


def test_the_version_and_the_completion_of_a_shell():
    done = subprocess.run([sys.executable, "-m", "hf_specdec.cli", "--version"], capture_output=True, text=True)
    assert done.stdout == f"hf-specdec {__version__}\n"
    asked = {"_HF_SPECDEC_COMPLETE": "complete_bash", "COMP_WORDS": "hf-specdec gen", "COMP_CWORD": "1"}
    assert subprocess.run([sys.executable, "-m", "hf_specdec"], capture_output=True, text=True, env=os.environ | asked).stdout.strip() == "generate"
    result = run("--version")
    assert result.exit_code == 0 and result.stdout == f"hf-specdec {__version__}\n"


def test_where_nothing_was_drafted_there_is_no_acceptance_rate(target_folder):
    result = run("generate", target_folder, "--prompt", "abc", "--max-new-tokens", 1)
    assert result.exit_code == 0 and "nothing was drafted" in result.stderr and "nan" not in result.stderr


def test_an_answer_is_not_lost_on_a_stream_that_lacks_its_characters():
    program = "from hf_specdec.commands.leaving import guarded\nguarded(lambda: print('gr\\xfcn'))()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.stdout == "gr\\xfcn\n", done.stderr


def test_generate_reads_a_file_or_standard_input_alike(target_folder, tmp_path):
    (tmp_path / "prompt.txt").write_text("abc", encoding="utf-8-sig")
    settings = ("--max-new-tokens", 8, "--json", "--sample", "--seed", 3, "--temperature", 0.8, "--top-k", 20)
    answers = [
        run("generate", target_folder, "--file", tmp_path / "prompt.txt", *settings),
        run("generate", target_folder, *settings, stdin="abc"),
    ]
    first, second = (json.loads(answer.stdout)["tokens"] for answer in answers)
    assert first == second


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"gr\xfcn")
    result = run("generate", "no/such/model", "--file", tmp_path / "latin.txt")
    assert result.exit_code == 2 and f"--file {tmp_path / 'latin.txt'}: not text in UTF-8" in " ".join(result.stderr.split())
    result = run("generate", "no/such/model", "--file", tmp_path)
    assert result.exit_code == 2 and f"--file {tmp_path}: cannot be read" in " ".join(result.stderr.split())


def test_a_folder_without_a_tokenizer_is_said_to_have_none(tmp_path):
    saved.tiny_model(1).save_pretrained(tmp_path)
    result = run("generate", tmp_path, "--prompt", "abc")
    assert result.exit_code == 2 and f"{tmp_path}: the folder has no tokenizer that can be loaded; save the model's own there" in result.stderr


def test_drafts_without_weights_go_by_name_and_a_folder_of_that_name_before_them(target_folder, monkeypatch, tmp_path):
    model, tokenizer = load_target(target_folder)
    assert {name: load_draft(name, "float32", model, tokenizer).name for name in ALONE if name != "prompt_lookup"} == {
        name: name for name in ("jump_forward", "lookahead", "mixture", "ngram_recycling", "recycling", "suffix_automaton", "uniform")}
    told = next(parameter.help for parameter in get_command(app).commands["bench"].params if parameter.name == "draft")
    assert all(name in told for name in ALONE) and load_draft("prompt_lookup", "float32", model, tokenizer) is None
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("mixture")
    assert type(load_draft("mixture", "float32", model, tokenizer)) is type(model)


def test_a_file_is_the_draft_that_wrote_it(tmp_path):
    tokenizer = word_tokenizer(range(VOCAB))
    for made, name in ((RetrievalDraft, "retrieval"), (NGramDraft, "ngram")):
        file = made.from_texts(["w1 w2 w3 w1 w2"], tokenizer).save(tmp_path / f"{name}.safetensors")
        assert load_draft(str(file), "float32", None, tokenizer).name == name
        assert loaded(SpeculativeConfig(draft=name, draft_source=str(file)), None).name == name
    with pytest.raises(ValueError, match="another tokenizer"):
        load_draft(str(file), "float32", None, word_tokenizer(range(1, VOCAB + 1)))


def test_lenience_is_reported_as_not_lossless(target_folder):
    result = run("generate", target_folder, "--prompt", "abc", "--max-new-tokens", 4, "--lenience", 0.5, "--json")
    assert json.loads(result.stdout)["speculation"]["lossless"] is False


def test_demo_streams_times_and_compares(target_folder):
    result = run("demo", target_folder, "--prompt", "abcabcabc", "--max-new-tokens", 16, "--repetitions", 1)
    assert result.exit_code == 0
    for words in (
        "drafted and accepted",
        "plain generate",
        "hf_specdec",
        "tokens/s",
        "block efficiency",
        "acceptance rate",
        "identical",
        "speed-up: median",
        "over the turns",
    ):
        assert words in result.stdout
    assert "copying much of it" not in result.stdout  # which is said of the shipped prompt alone


@pytest.mark.parametrize("arguments", [
    ("demo", "--prompt", "abcabc", "--max-new-tokens", 6, "--repetitions", 1), ("demo", "--prompt", "abcabc", "--max-new-tokens", 6, "--race"),
    ("verify", "--prompts", "chat", "--limit", 1, "--max-new-tokens", 6, "--samples", 200), ("tune", "--prompts", "chat", "--limit", 1, "--max-new-tokens", 6),
], ids=["demo", "race", "verify", "tune"])
def test_what_compares_ways_of_greedy_decoding_leaves_the_beams_and_dicts_that_a_model_asks_for(arguments, target_folder, tmp_path):
    model, tokenizer = load_target(target_folder)
    model.generation_config.num_beams, model.generation_config.return_dict_in_generate = 2, True
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    result = run(arguments[0], tmp_path, *arguments[1:])
    assert result.exit_code in (0, 1) and not result.stderr.count("error"), result.stderr  # 1: of so few samples no verdict is asked


def test_bench_with_the_kernels(target_folder):
    result = run("bench", target_folder, "--draft", target_folder, "--limit", 1, "--repetitions", 1, "--max-new-tokens", 6, "--kernels")
    assert result.exit_code == 0 and "ours lookup, kernels" in result.stdout and "ours draft model, kernels" in result.stdout


def test_bench_with_the_kernels_refuses_a_compressed_target_before_anything_is_loaded(tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mx", "format": "mxfp6_e2m3"}}')
    result = run("bench", tmp_path, "--kernels")
    assert result.exit_code == 2 and "compressed already (mxfp6_e2m3): leave --kernels out" in " ".join(result.stderr.split()) and "Loading" not in result.stderr


def test_bench_writes_table_json_and_plot(target_folder, tmp_path):
    pytest.importorskip("matplotlib")
    result = run("bench", target_folder, "--limit", 1, "--repetitions", 1, "--max-new-tokens", 6, "--out", tmp_path / "out")
    assert result.exit_code == 0 and "stock lookup" in result.stdout
    rows = json.loads((tmp_path / "out" / "bench.json").read_text())["results"]
    assert {row["category"] for row in rows} == {"code_edit", "summary", "chat"} and all(row["equal"] == 1 for row in rows)
    assert (tmp_path / "out" / "bench.png").stat().st_size > 1000
    check_overwrite(tmp_path / "out", "bench.json", ("bench.png",), {"environment", "settings", "results"})  # a second run may


def test_what_bench_has_measured_is_written_although_its_reader_has_gone(target_folder, tmp_path, monkeypatch):
    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr(report, "print_report", gone)
    monkeypatch.setattr(leaving, "_write_nowhere", lambda: None)
    result = run("bench", target_folder, "--limit", 1, "--repetitions", 1, "--max-new-tokens", 6, "--out", tmp_path / "out")
    assert result.exit_code == leaving.GONE and json.loads((tmp_path / "out" / "bench.json").read_text())["results"]


def test_verify_passes_on_a_sound_pair_and_says_what_it_checked(target_folder, draft_folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # its lines stay whole
    result = run(
        "verify",
        target_folder,
        "--draft",
        draft_folder,
        "--prompts",
        "chat",
        "--limit",
        2,
        "--max-new-tokens",
        12,
        "--samples",
        1000,
    )
    assert result.exit_code == 0, result.stdout
    assert "2 of 2 outputs equal" in result.stdout and "negative control" in result.stdout
    assert "4 of 4 checks passed: speculation does not change the output." in result.stdout
    for check in ("Greedy equality 2 of 2", *(f"Sampling with {name} 1,000 of 1,000" for name in ("the draft under test", "a draft drawn from the support"))):
        assert re.search(f"^{check}, took [0-9]+ s$", result.stderr, re.M), result.stderr


def test_verify_fails_when_the_rule_is_wrong(target_folder, monkeypatch):
    from hf_specdec.acceptance.sampling import SpeculativeSampling

    monkeypatch.setattr(SpeculativeSampling, "residual", lambda self, p, *_: p)  # after a rejection: p instead of (p - q)+
    result = run("verify", target_folder, "--prompts", "chat", "--limit", 1, "--max-new-tokens", 12, "--samples", 2000)
    assert result.exit_code == 1, result.stdout
    assert "FAIL  sampling with a draft drawn from the support" in result.stdout and "CHANGE" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--k", "0"), "--k 0 must be an int in 1..64"),
        (("--k", "-1"), "--k -1"),
        (("--k", "65"), "--k 65"),
        (("--k", "2.5"), "--k 2.5"),
        (("--k", "x"), "--k x"),
        (("--lenience", "0"), "--lenience 0.0"),
        (("--lenience", "nan"), "--lenience nan"),
        (("--temperature", "0.5"), "--temperature has no meaning without --sample"),
        (("--file", "no_such_file.txt"), "--prompt and --file"),
        (("--draft", "no/such/folder"), "--draft no/such/folder: no such folder and no draft of that name; the names are jump_forward, lookahead, mixture"),
        (("--draft", "medusa"), "--draft medusa: a draft of that name is made of weights"),
        (("--batch", "3"), "--batch has no meaning without --dataset"),
        (("--max-new-tokens", "5000"), "the target's context holds 1024"),
    ],
)
def test_bad_arguments_of_generate_end_in_one_line_and_exit_code_2(target_folder, arguments, message):
    result = run("generate", target_folder, "--prompt", "abc", *arguments)
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("hf-specdec: error:")]
    assert message in line and result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "no/such/model", "--prompt", "x"), "no/such/model"),
        (("generate", "{target}", "--prompt", " "), "the prompt is empty"),
        (("verify", "{target}", "--samples", "10"), "--samples 10"),
        (("verify", "{target}", "--prompts", "nothing.jsonl"), "--prompts nothing.jsonl is neither a file"),
        (("bench", "{target}", "--clock", "sundial"), "--clock sundial"),
        (("verify", "{target}", "--prompts", "hub:"), "the data set's name is missing"),
        (("demo", "no/such/model", "--prompt", ""), "--prompt is empty"),
        *(((*command, "--dtype", "foo"), "'--dtype': dtype='foo' must be one of float32, bfloat16, float16, auto.")
          for command in (("generate", "no/such/model", "--prompt", "x"), ("demo",), ("verify", "x"), ("bench", "x"), ("tune", "x"), ("compress", "x"),
                          ("export", "x", "--out", "y"))),
    ],
)
def test_bad_arguments_of_every_command_are_named(target_folder, arguments, message):
    result = run(*(argument.format(target=target_folder) for argument in arguments))
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments", [("generate",), ("demo", "--no-such-option"), ("bench", "--batch", "0"), ("nonsense",)]
)
def test_unknown_commands_and_options_are_refused_by_the_parser(arguments):
    assert run(*arguments).exit_code == 2


def test_a_draft_with_another_tokenizer_is_translated(target_folder, tmp_path):
    plain = json.loads(run("generate", target_folder, "--prompt", "abc", "--max-new-tokens", 8, "--json").stdout)
    other = saved.byte_tokenizer()
    other.add_tokens([f"<extra_{i}>" for i in range(100)])
    saved.tiny_model(0).save_pretrained(tmp_path)  # the target's own weights: its guesses are right once they are translated
    asked = ("generate", target_folder, "--prompt", "abc", "--draft", tmp_path, "--max-new-tokens", 8, "--json", "--k", 3)
    result = run(*asked)
    assert result.exit_code == 0 and "translated" not in result.stderr
    wider = saved.tiny_model(0)
    wider.resize_token_embeddings(len(other))
    wider.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    result = run(*asked)
    assert result.exit_code == 0 and "its tokenizer is not the target's" in result.stderr
    found = json.loads(result.stdout)
    assert found["tokens"] == plain["tokens"]
    assert {entry["source"] for entries in found["speculation"]["rounds"] for entry in entries if entry["proposed"]} == {"translated"}
    result = run("bench", target_folder, "--draft", tmp_path, "--prompts", "chat", "--limit", 1, "--repetitions", 1, "--max-new-tokens", 4)
    assert result.exit_code == 0 and "ours translated" in result.stdout and "stock draft model" not in result.stdout


def test_a_draft_whose_tokenizer_shares_nothing_is_refused(target_folder, tmp_path):
    saved.tiny_model(1).save_pretrained(tmp_path)
    word_tokenizer(range(200)).save_pretrained(tmp_path)
    result = run("generate", target_folder, "--prompt", "abc", "--draft", tmp_path)
    assert result.exit_code == 2 and "shares no token with tokenizer" in result.stderr


def test_bench_takes_drafts_that_stock_generation_does_not_know(target_folder):
    result = run("bench", target_folder, "--draft", "uniform", "--prompts", "chat", "--limit", 1, "--repetitions", 1, "--max-new-tokens", 4)
    assert result.exit_code == 0 and "ours uniform" in result.stdout and "stock draft model" not in result.stdout


@pytest.mark.share(0)
@pytest.mark.filterwarnings("error:.*runs without compile")
@pytest.mark.parametrize("clock", ["wall", "cpu"] if FULL else ["wall"])
def test_bench_measures_compiled_passes_without_hooks(target_folder, draft_folder, tmp_path, monkeypatch, clock):
    torch._dynamo.reset()
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "aot_eager"})
    models, made = [], compiled.CompiledPasses.__init__

    def watched(self, model, role, *way):
        models.append(model)
        made(self, model, role, *way)

    monkeypatch.setattr(compiled.CompiledPasses, "__init__", watched)
    result = run("bench", target_folder, "--draft", draft_folder, "--k", 3, "--compile", "--prompts", "chat", "--limit", 1, "--repetitions", 1, "--clock", clock,
                 "--max-new-tokens", 8, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "is not measured" in result.stdout if clock == "wall" else "the whole is measured alone" in result.stdout
    rows = {row["arm"]: row for row in json.loads((tmp_path / "bench.json").read_text())["results"]}
    assert {"plain generate", "plain generate, compiled", "stock lookup", "ours lookup, compiled", "ours draft model, compiled"} <= set(rows)
    for name, row in rows.items():
        assert row["equal"] == 1 and (row["outside_forwards"] is None) == ("compiled" in name)
        assert (row["decoding_speed_up"] is not None) == (clock == "wall" or "compiled" not in name) or "stock" in name or name == "plain generate, compiled"
    assert models and not any(compiled._refusals.get(model) for model in models) and all(compiled._functions[model].made for model in models)


@pytest.mark.share(0)
@pytest.mark.filterwarnings("error:.*runs without compile")
def test_bench_compiles_a_target_whose_states_are_read(target_folder, tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "aot_eager"})
    model, _ = load_target(target_folder)
    folder = save(build_drafter(model, [1], None, (0, 2)), tmp_path / "drafter", "the test's target")
    result = run("bench", target_folder, "--draft", folder, "--k", 3, "--compile", "--prompts", "chat", "--limit", 1, "--repetitions", 1, "--max-new-tokens", 8,
                 "--out", tmp_path)
    assert result.exit_code == 0, result.output
    rows = {row["arm"]: row for row in json.loads((tmp_path / "bench.json").read_text())["results"]}
    assert rows["ours feature, compiled"]["equal"] == 1 and rows["ours feature, compiled"]["block_efficiency"] >= 1


def test_verify_of_a_16_bit_target_makes_a_draft_that_reads_its_states_again_for_the_float32_copy(target_folder, tmp_path):
    model, _ = load_target(target_folder)
    folder = save(build_drafter(model, [1], None, (0, 2)), tmp_path / "drafter", "the test's target")
    settings = ("--prompts", "chat", "--limit", 1, "--max-new-tokens", 12, "--samples", 600, "--dtype", "bfloat16")
    result = run("verify", target_folder, "--draft", folder, *settings)
    assert result.exit_code == 0, result.stdout + result.stderr
    assert "sampling in float32 with the draft under test" in result.stdout


def test_verify_explains_forks_of_a_16_bit_target(target_folder, draft_folder):
    settings = ("--prompts", "chat", "--limit", 8, "--max-new-tokens", 40, "--samples", 600, "--dtype", "bfloat16")
    result = run("verify", target_folder, "--draft", draft_folder, *settings)
    assert result.exit_code == 0, result.stdout
    assert "sampling in float32 with the draft under test" in result.stdout
    if "8 of 8 outputs equal" not in result.stdout:
        assert "rule sound, arithmetic differs" in result.stdout and "the rule is sound" in result.stdout


WRITERS = [("bench",), ("tune",), ("train",), ("compress", "no model"), ("export", "no/draft"), ("generate", "no model", "--dataset", "no.jsonl")]


@pytest.mark.parametrize("arguments", WRITERS, ids=lambda arguments: arguments[0])
def test_an_output_folder_that_is_a_file_is_refused_before_anything_is_loaded(arguments, tmp_path):
    taken, option = tmp_path / "taken", "--output" if "generate" in arguments else "--out"
    taken.write_text("mine")
    for out in (taken / "below", *([] if arguments[0] in ("compress", "export") else [taken])):
        result = run(*arguments, option, out)
        assert result.exit_code == 2 and f"{option} {out}: {taken} is a file; name a folder." in " ".join(result.output.split())
    assert taken.read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder in which nobody can write")
@pytest.mark.parametrize("arguments", WRITERS, ids=lambda arguments: arguments[0])
def test_an_output_folder_that_cannot_be_made_is_refused_before_anything_is_loaded(arguments):
    result = run(*arguments, "--output" if "generate" in arguments else "--out", "/proc/new")
    assert result.exit_code == 2 and "/proc/new: nothing can be written in /proc" in result.output and "Loading" not in result.output


@pytest.mark.parametrize(("command", "report", "other"), [("bench", "bench.json", "bench.png"), ("tune", "tune.json", "speculative_config.json")])
def test_bench_and_tune_overwrite_nothing_but_their_own_former_output(command, report, other, tmp_path):
    for name, text in ((other, "mine"), (report, "mine"), (report, '{"results": []}'), (report, "[]")):
        (tmp_path / name).write_text(text)
        result = run(command, tmp_path / "no model", "--out", tmp_path)
        assert result.exit_code == 2 and f"--out {tmp_path} holds {name}, which would be overwritten, and no {report} of this command" in result.stderr
        assert (tmp_path / name).read_text() == text and "Loading" not in result.stderr
        (tmp_path / name).unlink()
    (tmp_path / "others.txt").write_text("mine")  # which is not touched
    assert "would be overwritten" not in run(command, tmp_path / "no model", "--out", tmp_path).stderr


def test_a_json_file_that_is_a_folder_is_refused_before_anything_is_loaded(tmp_path):
    result = run("compress", tmp_path / "no model", "--report", "--json", tmp_path)
    assert result.exit_code == 2 and "is a folder; name a file" in " ".join(result.output.split())


@pytest.mark.parametrize("arguments, words", [
    (("generate", "--prompt", "a", "--mx", "mxfp5"), "--mx mxfp5 is not an MX format"),
    (("compress", "--report", "--format", "mxfp5"), "--format mxfp5 is not an MX format"),
    (("compress", "--report", "--lm-head", "mxfp5"), "--lm-head mxfp5 is not an MX format"),
    (("compress", "--report", "--scale-rule", "up"), "--scale-rule up is not a scale rule"),
    (("generate", "--prompt", "a", "--seed", "-1"), "--seed -1 must be an int"),
    *[((command, "--k", "99"), "--k 99 must be an int in 1..64") for command in ("verify", "bench", "demo")],
], ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_a_wrong_value_is_refused_before_anything_is_loaded(arguments, words, tmp_path):
    result = run(arguments[0], tmp_path / "no model", *arguments[1:])
    assert result.exit_code == 2 and words in " ".join(result.output.split()) and "Loading" not in result.output


@pytest.mark.parametrize(("option", "value", "words"), [
    ("--temperature", "-1", "--temperature -1.0: must be a finite number above 0."),
    ("--temperature", "0", "--temperature 0.0: must be a finite number above 0."),
    ("--temperature", "nan", "--temperature nan: must be a finite number above 0."),
    ("--temperature", "inf", "--temperature inf: must be a finite number above 0."),
    ("--top-p", "2", "--top-p 2.0: must be in 0..1."),
    ("--min-p", "-0.1", "--min-p -0.1: must be in 0..1."),
    ("--top-k", "-1", "--top-k -1: must be at least 0."),
    ("--repetition-penalty", "0", "--repetition-penalty 0.0: must be a finite number above 0."),
])
def test_numbers_that_mean_nothing_are_refused_before_anything_is_loaded(option, value, words, tmp_path):
    for more in (("--prompt", "a"), ("--dataset", tmp_path / "none.jsonl", "--output", tmp_path / "out")):
        result = run("generate", tmp_path / "no model", *more, "--sample", option, value)
        assert result.exit_code == 2 and words in result.stderr and "Loading" not in result.stderr


def test_the_ends_of_the_ranges_are_taken(target_folder):
    result = run("generate", target_folder, "--prompt", "abc", "--max-new-tokens", 2, "--sample", "--top-k", 0, "--top-p", 1, "--min-p", 0)
    assert result.exit_code == 0, result.stderr


def test_the_list_of_commands_has_whole_sentences():
    shown = run("--help").stdout
    for name, command in get_command(app).commands.items():
        assert re.search(rf"^  {name} +[A-Z][^\n]*[^.]\.$", shown, re.M), shown


OPTIONS = [(name, parameter) for name, command in get_command(app).commands.items() for parameter in command.params if parameter.name != "help"]


@pytest.mark.parametrize(("command", "parameter"), OPTIONS, ids=lambda value: getattr(value, "name", value))
def test_every_option_says_in_short_what_it_is_and_what_is_without_it(command, parameter):
    told = parameter.help
    assert told and told.endswith(".") and told[0].isalnum() and len(told) <= 220, (command, parameter.name)
    shown = parameter.default is not None or parameter.required or parameter.multiple or getattr(parameter, "is_flag", False)
    assert shown or re.search(r"without it|default|With --|As --|needed", told) or command == "train" or parameter.name in ("file", "dataset", "json_file", "save_race", "config")


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_in_the_documents_has_the_options_it_is_shown_with(path):
    commands = get_command(app).commands
    for name, rest in re.findall(r"hf-specdec (\w+)((?: (?:-{1,2})?[\w./:\"-]+)*)", path.read_text(encoding="utf-8").split("## Sources")[0]):
        if name not in commands:
            continue
        known = {option for parameter in commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)) <= known, (name, rest)


def test_bench_leaves_out_what_stock_generate_cannot_compile(capsys):
    def fails(rows, max_new_tokens):
        raise RuntimeError("no static cache\nfor this model")

    plain, compiled_one = arms.Arm(arms.PLAIN, lambda rows, n: None), arms.Arm(arms.PLAIN_COMPILED, fails)
    assert bench.that_compile([plain, compiled_one], [[1, 2]], 4) == [plain]
    assert "plain generate, compiled is left out: RuntimeError: no static cache\n" in capsys.readouterr().err


def test_a_dash_for_an_underscore_is_recognised_before_any_hub_is_asked(target_folder):
    done = run("generate", str(target_folder), "--prompt", "x", "--draft", "Prompt-Lookup")
    assert done.exit_code == 2 and "did you mean prompt_lookup?" in done.output


def test_a_message_names_options_and_leaves_alone_what_is_none():
    options = {"num_assistant_tokens": "--k", "lm_head": "--lm-head", "prompts": "--prompts"}
    assert leaving.as_typed("num_assistant_tokens=0 must be an int.", options) == "--k 0 must be an int."
    assert leaving.as_typed("prompts: a b is no file: pass lm_head='mxint8', or lm_head=FORMAT.", options) == "--prompts: a b is no file: pass --lm-head mxint8, or --lm-head FORMAT."
    for text in ('{"lm_head=1"}', "own_lm_head=1", "the prompts: none", "a/lm_head=1", "format=2", ""):
        assert leaving.as_typed(text, options) == text and leaving.as_typed(text, {}) == text


def test_what_a_config_says_wrongly_is_not_said_of_an_option(tmp_path):
    (tmp_path / "speculative_config.json").write_text('{"num_assistant_tokens": 99}')
    for more, words in (((), "num_assistant_tokens=99"), (("--k", 0), "num_assistant_tokens=99")):
        done = run("generate", tmp_path / "no model", "--prompt", "a", "--config", tmp_path, *more)
        assert done.exit_code == 2 and words in done.stderr


PIPED = """
import sys, typer
from hf_specdec.commands.leaving import guarded
app = typer.Typer()

@app.command()
@guarded
def many():
    print("first")
    for n in range({lines}):
        print(n)
app()
"""


@pytest.mark.parametrize("lines", [3, 200_000])
def test_a_reader_that_has_gone_is_left_in_silence(lines):
    with subprocess.Popen([sys.executable, "-c", PIPED.format(lines=lines)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == 141


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm"])
def test_a_target_that_is_nearly_the_embedded_one_is_recognised_before_any_hub_is_asked(name):
    done = run("generate", name, "--prompt", "x")
    assert done.exit_code == 2 and f"{name}: no such folder; did you mean 'smollm2'?" in done.stderr and "Loading" not in done.stderr


@pytest.mark.parametrize(("name", "meant"), [("mixtrue", "mixture"), ("smollm2-drafter", "smollm2_drafter"), ("smolm2", "smollm2"), ("Medusa", "medusa")])
def test_a_draft_that_is_nearly_a_known_one_is_recognised_before_any_hub_is_asked(target_folder, name, meant):
    done = run("generate", target_folder, "--prompt", "x", "--draft", name)
    assert done.exit_code == 2 and f"--draft {name}: did you mean {meant}?" in done.stderr


@pytest.mark.parametrize(("name", "words"), [("mixtrue", "did you mean mixture?"), ("./no_such_draft", "no such folder and no draft of that name"), ("a.safetensors", "no such file"),
                                            ("recycling+mixtrue", "--draft mixtrue: did you mean mixture?"), ("recycling+recycling", "each once"), ("medusa", "is made of weights")])
@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["bench"], ["demo"], ["verify"], ["tune"], ["serve"]], ids=lambda words: words[0])
def test_a_draft_that_is_not_there_is_told_before_a_target_is_loaded(command, name, words):
    done = run(command[0], "no/such_target", *command[1:], "--draft", name)
    assert done.exit_code == 2 and words in done.stderr and "no/such_target" not in done.stderr


def test_names_of_hubs_and_folders_are_like_no_other():
    assert not [name for name in ("gpt2", "own/smolm2", "./smolm2", "distilgpt2", "model") if near(name, ["smollm2", "mixture"])]


def test_a_target_that_is_not_there_is_said_to_be_neither_folder_nor_model(monkeypatch):
    from transformers import AutoConfig

    def offline(*args, **kwargs):
        raise OSError("We couldn't connect") from ConnectionError("no route\nto host")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    (line,) = [line for line in run("generate", "no/such", "--prompt", "x").stderr.splitlines() if "error" in line]
    assert "no/such: no such folder, and no model of that name could be read from the hub. Name a folder" in line and "(no route)" in line


class Dropping:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("place", ["__del__", "import", "a command in an import"])
def test_ctrl_c_where_it_would_be_dropped_ends_the_command_afterwards(place, tmp_path, monkeypatch, capfd):
    (tmp_path / "swallowing.py").write_text("import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    raise ImportError\n")
    (tmp_path / "commanding.py").write_text("from tests.test_cli import run\nresult = run('verify', 'x')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def slow(*arguments):
        Dropping() if place == "__del__" else __import__("swallowing") if place == "import" else signal.raise_signal(signal.SIGINT)
        for _ in range(500):
            time.sleep(0.02)
        raise AssertionError("it ran on")

    monkeypatch.setattr("hf_specdec.commands.verify.verify", slow)
    before = sys.unraisablehook, signal.getsignal(signal.SIGINT)
    result = importlib.import_module("commanding").result if place.startswith("a command") else run("verify", "x")
    assert result.exit_code == 130 and "Traceback" not in result.output + capfd.readouterr().err
    assert (sys.unraisablehook, signal.getsignal(signal.SIGINT)) == before and ("swallowing" in sys.modules) == (place == "import")
    for name in ("swallowing", "commanding"):
        sys.modules.pop(name, None)


def test_models_that_read_images_too_are_loaded_for_their_text(tmp_path):
    family = next(family for family in seeing.FAMILIES if family.kind == "llava")
    model, tokenizer = family.model(), word_tokenizer(range(VOCAB))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    done = run("generate", str(tmp_path), "--prompt", "w1 w2 w3 w1 w2", "--max-new-tokens", "6", "--raw")
    assert done.exit_code == 0, done.output
    ids = tokenizer("w1 w2 w3 w1 w2", return_tensors="pt").input_ids
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(wanted[0, ids.shape[1] :]).split() == done.stdout.split()


@pytest.mark.skipif(CACHE != "cache", reason="before transformers 5.24 they are refused")
def test_models_of_one_row_that_stock_assisted_generation_refuses_are_measured_and_verified(tmp_path):
    family = next(family for family in architectures.OWN_CACHES if family.kind == "rwkv")
    family.model("eager").save_pretrained(tmp_path / "rwkv")
    word_tokenizer(range(VOCAB)).save_pretrained(tmp_path / "rwkv")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "w1 w2 w3 w1 w2", "category": "words"}))
    done = run("bench", tmp_path / "rwkv", "--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 6, "--repetitions", 1)
    assert done.exit_code == 0 and "stock lookup is left out: ValueError: assisted generation is not supported" in done.stderr, done.output
    assert "ours lookup" in done.stdout and "1/1" in done.stdout
    done = run("verify", tmp_path / "rwkv", "--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 6, "--samples", 200)
    assert done.exit_code == 0 and "checks passed" in done.stdout, done.output
