"""The scripts under benchmarks/ run, on toys and with small counts; their figures are measured elsewhere."""

import ast
import copy
import json
import re
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec import loop, mx
from hf_specdec.bench.arms import twin
from hf_specdec.bench.embedded import load_target
from hf_specdec.drafts import earning
from hf_specdec.training import build_drafter
from hf_specdec.training.drafter import save

from ..mx.models import tiny as mx_tiny
from ..helpers import generated, perturbed, plain, prompts, speculate, tiny_llama, torch_threads

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def script(name: str):
    spec = spec_from_file_location(f"benchmark_{name}", SCRIPTS / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def required(*extras: str) -> set[str]:
    """Names that the package requires, with these extras."""
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {re.match(r"[\w.-]+", line)[0].lower() for line in lines}


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_script_imports_at_its_top_is_required_by_the_package_for_development(path):
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {(alias.name if isinstance(node, ast.Import) else node.module).split(".")[0] for node in imports for alias in node.names}
    assert names - set(sys.stdlib_module_names) - {"hf_specdec"} <= required("dev", "demo")


@pytest.mark.parametrize("path", sorted(SCRIPTS.rglob("*.py")), ids=lambda path: path.stem)
def test_a_script_reads_and_writes_text_as_utf_8_whatever_the_locale(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    names = {call: getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls}
    binary = {call for call in calls if any(isinstance(each, ast.Constant) and "b" in str(each.value) for each in call.args)}
    texts = [call for call in calls if names[call] in ("read_text", "write_text") or names[call] == "open" and call not in binary]
    assert not [call.lineno for call in texts if "encoding" not in {keyword.arg for keyword in call.keywords}]


def test_a_compressed_copy_is_right_as_often_as_it_is_said_to_be_and_changes_no_text():
    module, model = script("compressed"), mx_tiny()
    tiles = hf_specdec.enable(mx.to_tiles(twin(model)))
    options = SimpleNamespace(shape="tiny", rates=[1.0, 0.0], format="mxfp6_e2m3", compile=False, k=[2], max_new_tokens=12, repetitions=1)
    texts = [(kind, [1 + i % 50 for i in range(module.PROMPT)]) for kind in ("right", "wrong")]
    seconds, right, tokens = module.measure(module.arms(model, tiles, texts, options), texts, options)
    assert all(found == [2, 2] for kinds in right.values() for found in kinds.values()) and set(seconds) == set(right) > set(tokens) - {"stock", "tiles"}
    assert tokens["compressed, K = 2"] == {"right": 12 / 5, "wrong": 1.0}


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-lowest.txt"])
def test_what_the_tests_need_is_pinned(file):
    pinned = {line.partition("==")[0].lower() for line in (SCRIPTS.parent / file).read_text().splitlines()}
    assert required("dev", "demo") - pinned <= {"ruff"}


def test_structured_output_names_what_fails_and_checks_the_others():
    pytest.importorskip("xgrammar")
    model, tokenizer = load_target(device="cpu")
    module = script("structured_output")
    module.ARMS = {arm: options for arm, options in module.ARMS.items() if arm in ("plain", "stock lookup", "mixture, jump-forward knows the tokenizer")}
    module.TEXTS, module.LISTS, module.ONE = ({kind: own[kind] for kind in ("orders", "flight") if kind in own} for own in (module.TEXTS, module.LISTS, module.ONE))
    table = module.measure(hf_specdec.enable(model), tokenizer, 16, 1)
    assert "Assertion" in table["stock lookup"]["failed"]
    assert all(row["same"] == 2 and row["speed-up, objects"] > 0 and row["valid"] in (0, 1, 2) for arm, row in table.items() if arm != "stock lookup")


def test_overhead_compares_every_engine_with_the_bare_forwards(tmp_path):
    script("overhead").main(tokens=8, repetitions=1, out=tmp_path / "overhead.json")
    result = json.loads((tmp_path / "overhead.json").read_text())
    assert {"bare forwards", "hf_specdec", "transformers"} <= set(result)
    assert result["bare forwards"]["ratio"] == 1 and all(entry["ms"] > 0 for entry in result.values())


def test_memory_watches_the_cache_of_every_target_pass(monkeypatch, capsys):
    memory = script("memory")
    monkeypatch.setattr(memory, "WARM_UP", 10)
    with pytest.raises(typer.Exit):
        memory.main(calls=10)
    assert "at most the longest row + N" in capsys.readouterr().out


def test_the_simulated_batch_never_falls_far_behind_plain_decoding(capsys):
    simulated = script("batch_schedule")
    simulated.main(tokens=16, runs=1)
    assert "least mean" in capsys.readouterr().out

    def speed(text: str, rows: int, c: float) -> float:
        return sum(simulated.speed(text, rows, c, 48, seed) for seed in range(8)) / 8

    for text, rows, c in [("chat", 1, 0.12), ("chat", 2, 0.12), ("half copies", 4, 0.06), ("half copies", 8, 0.03), ("mixed", 8, 0.12), ("copying", 8, 0.12),
                          ("chat", 16, 0.06), ("copying", 16, 0.06)]:
        assert speed(text, rows, c) >= 0.965, (text, rows, c)
    for rows, c, least in [(1, 0.03, 4), (2, 0.03, 3), (4, 0.03, 2), (8, 0.03, 1.5), (16, 0.01, 1.3)]:
        assert speed("copying", rows, c) > least, (rows, c)


def test_attention_is_compared_with_torch_and_close_to_it(monkeypatch, capsys):
    attention = script("attention")
    monkeypatch.setattr(attention, "PASSES", ((2, 3, 20),))
    with torch_threads(torch.get_num_threads()):
        attention.main(repetitions=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "float" in line]
    assert len(lines) == 4 and all(float(line.split("│")[-2]) < 0.05 for line in lines)


def test_peers_that_are_not_installed_are_skipped_by_name(target_folder, tmp_path, monkeypatch, capsys):
    peers = script("peers")
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    peers.main(target_folder, prompts="chat", limit=1, repetitions=1, max_new_tokens=4, out=tmp_path)
    output = capsys.readouterr().out
    assert "skipped: economize is not installed" in output and "skipped: flashspec is not installed" in output
    assert json.loads((tmp_path / "peers_batch1.json").read_text())["results"][0]["arm"] == "plain generate"


def test_images_compares_texts_and_leaves_the_random_tower_named(target_folder, tmp_path, monkeypatch, capsys):
    images = script("images")
    tokenizer, model = AutoTokenizer.from_pretrained(target_folder), AutoModelForCausalLM.from_pretrained(target_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [images.MARK]})
    tokenizer.chat_template = "{{ messages[0].content }}"
    model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    small = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8)
    for name, value in dict(embedded_folder=lambda: tmp_path, VISION=small, SIDE=32, PER_IMAGE=1).items():
        monkeypatch.setattr(images, name, value)
    monkeypatch.setattr(sys, "argv", ["images.py", "--prompts", "1", "--repetitions", "1", "--new-tokens", "6"])
    with pytest.raises(SystemExit) as ended:
        images.main()
    output = capsys.readouterr().out
    assert ended.value.code == 0 and output.count("1/1") == len(images.ARMS) and "RANDOM" in output


def test_bf16_forks_lists_forks_and_ends_well_if_all_are_near_ties(target_folder, tmp_path):
    settings = {"k": "3", "prompts": ["chat"], "limit": 3, "max_new_tokens": 12}
    with pytest.raises(typer.Exit) as ended:
        script("bf16_forks").main(target_folder, **settings, out=tmp_path / "forks.json")
    result = json.loads((tmp_path / "forks.json").read_text())
    assert result["prompts"] == 3
    assert ended.value.exit_code == (0 if all(fork["near_tie"] for fork in result["forks"]) else 1)


def test_drafts_counts_what_every_draft_commits_per_forward_and_goes_on_where_it_was(target_folder, tmp_path, capsys):
    lines = ['{"question_id": 1, "category": "one", "turns": ["a b a b a b"]}\n', '{"question_id": 2, "category": "two", "turns": ["c d"]}\n']
    drafts, some = script("drafts"), tmp_path / "some.jsonl"
    arguments = ["--target", str(target_folder), "--prompts", str(some), "--max-new-tokens", "12", "--k", "3", "--nodes", "8",
                 "--out", str(tmp_path / "drafts.json")]
    some.write_text(lines[0])
    drafts.main(arguments)
    first = json.loads((tmp_path / "drafts.json").read_text())["records"]["1"]
    some.write_text("".join(lines))
    drafts.main(arguments)
    records = json.loads((tmp_path / "drafts.json").read_text())["records"]
    assert records["1"] == first and records["2"]["category"] == "two"
    for record in records.values():
        for name in drafts.DRAFTS:
            own = record[name]
            assert own["accepted"] + own["forwards"] == own["committed"] and own["accepted"] <= own["proposed"] and own["same_text"]
            assert 0 < own["draft_seconds"] < own["seconds"]
    assert "2 prompts, chains of 3, trees of 8" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        drafts.main([*arguments, "--k", "4"])


def test_datastore_builds_loads_and_searches(tmp_path, capsys):
    script("datastore").main(["--tokens", "3000", "--searches", "20", "--folder", str(tmp_path)])
    assert re.search(r"searching: median \d+\.\d+ ms", capsys.readouterr().out) and not list(tmp_path.iterdir())


def test_the_profile_of_a_round_names_its_parts(target_folder, tmp_path, monkeypatch):
    profile = script("round_profile")
    with pytest.raises(typer.Exit):
        profile.main(str(target_folder), ["lookup", "layers"], limit=1, max_new_tokens=8, stream=True, out=tmp_path / "profile.json")
    result = json.loads((tmp_path / "profile.json").read_text())
    for name in ("lookup", "layers"):
        named = {part: spent for part, spent in result[name]["ms"].items() if part != profile.NO_NAME}
        assert sum(named.values()) > 0.8 * sum(result[name]["ms"].values()), name  # a toy's rounds are short
        assert {"target forward", "verdict", "streaming", "target positions and masks"} <= set(named)
    assert result["layers"]["ms"]["draft forward"] > 0


def test_the_long_context_is_measured_outside_attention(tmp_path):
    script("long_context").main([32, 64], tokens=12, repetitions=1, out=tmp_path / "long.json")
    result = json.loads((tmp_path / "long.json").read_text())["ms"]
    assert all(0 < row["attention"] < row["round"] and row["outside"] > 0 for row in result.values()) and set(result) == {"32", "64"}


def test_the_batch_curve_compares_texts(target_folder, tmp_path):
    script("batch_curve").main(str(target_folder), [1, 2], max_new_tokens=6, repetitions=1, out=tmp_path / "curve.json")
    result = json.loads((tmp_path / "curve.json").read_text())["batches"]
    assert set(result) == {"1", "2"} and all(row["differ"] == 0 and row["ratios"][0] > 0 for row in result.values())


def test_mixture_compares_both_ways_of_mixing_with_each_draft_alone(target_folder, tmp_path, monkeypatch, capsys):
    for module in (loop, earning):
        monkeypatch.setattr(module, "perf_counter", module.perf_counter)  # the script puts its clock there
    target, mixture = load_target(target_folder)[0], script("mixture")
    drafter = save(build_drafter(target, [1]), tmp_path / "drafter", "the test's target")
    mixture.main(["--target", target_folder, "--drafter", str(drafter), "--weights", "float32", "--prompts", "chat", "--limit", "2", "--rate", "0.7",
                  "--max-new-tokens", "10", "--repetitions", "2", "--out", str(tmp_path / "mixture.json")])
    written = json.loads((tmp_path / "mixture.json").read_text())
    assert written["settings"]["rate"] == "0.7" and len(written["records"]) == 2
    for record in written["records"].values():
        assert set(record["tokens_per_ms"]) == {mixture.PLAIN, *mixture.ARMS} and min(record["tokens_per_ms"].values()) > 0
        assert record["category"] == "chat" and all(record["same_text"].values())
    shown = capsys.readouterr().out
    assert "SIMULATED at 0.7" in shown and "chat, mean" in shown and "5 of 5" in shown


@pytest.mark.parametrize(("rate", "accepted"), [(1.0, 1.0), (0.0, 0.0)])
def test_mixture_simulates_the_acceptance_that_it_is_asked_for(rate, accepted):
    target, row, mixture = tiny_llama(3), prompts(9)[0], script("mixture")
    answer = plain(target, [row], max_new_tokens=21)[0]
    words = mixture.said(row, answer, rate, 3, target.config.vocab_size)
    out = speculate(target, [row], mixture.SimulatedDraft(perturbed(target), words), 4, max_new_tokens=21)
    assert generated(out, [row]) == [answer] and out.speculation.acceptance_rate == accepted and out.speculation.draft_calls > 4
    some = mixture.said(row, list(range(1000)), 0.7, 0, 61)
    assert 0.65 < sum(some[len(row) + i] == i for i in range(1000)) / 1000 < 0.75
    record = {"tokens_per_ms": {"lookup": 2.0, "model": 4.0, "choose": 5.0, "merge": 1.0}}
    assert (mixture.against_best(record, "choose"), mixture.against_best(record, "merge")) == (1.25, 0.25)


def test_formats_by_layer_keep_their_bits_and_are_those_of_compress(tmp_path, monkeypatch, capsys):
    from hf_specdec import mx
    from hf_specdec.mx.calibration import pieces

    from .conftest import byte_tokenizer, tiny_model

    model, tokenizer, text, file = tiny_model(hidden_size=64), byte_tokenizer(), tmp_path / "text.txt", tmp_path / "bits.json"
    text.write_text("Neighbouring weights tend to be of similar size. " * 20)
    bits = script("mx_bits")
    monkeypatch.setattr(bits, "load_target", lambda dtype: (model, tokenizer))
    monkeypatch.setattr(sys, "argv", ["mx_bits", "--bits", "5", "--random", "1", "--calibrate", str(text), "--text", str(text), "--json", str(file)])
    bits.main()
    rows = {row["chosen_by"]: row for row in json.loads(file.read_text())["rows"]}
    assert len(rows) == 9 and all(row["bits"] <= 5 for name, row in rows.items() if name != "mxfp6_e2m3") and "same top token" in capsys.readouterr().out
    sequences = pieces(tokenizer(text.read_text())["input_ids"])
    chosen = mx.choose_formats(model, 5, sequences)
    small = mx.compress(copy.deepcopy(model), "mxfp4_e2m1", layer_formats=chosen, calibration=sequences)
    assert mx.compare(model, small, tokenizer, text.read_text()).kl == pytest.approx(rows["costs, 3 formats"]["kl"], rel=1e-3)
