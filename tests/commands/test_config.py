"""`generate --config`: what a speculative_config.json says, and what options say against it."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from hf_specdec import SpeculativeConfig
from hf_specdec.cli import app

from ..bench import conftest as saved

target_folder, draft_folder = saved.target_folder, saved.draft_folder
TREE = SpeculativeConfig(draft="recycling", draft_options={"branches": 2}, num_assistant_tokens=6, lenience=0.5, seed=3, predicted_speedup=1.5)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in ("generate", *arguments)])


def traced(target, config, *options) -> dict:
    result = run(target, "--prompt", "abcabcabcabc", "--max-new-tokens", 12, "--json", "--config", config, *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def sources(answer) -> set:
    return {entry["source"] for entries in answer["speculation"]["rounds"] for entry in entries if entry["proposed"]}


def error_of(*arguments) -> str:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and "Loading" not in result.stderr, result.output
    return " ".join(result.stderr.split())


def test_a_config_says_how_and_options_say_otherwise(target_folder, draft_folder, tmp_path):
    TREE.save_pretrained(tmp_path)
    answer = traced(target_folder, tmp_path)
    assert answer["speculation"]["config"] == {**TREE.to_dict(), "acceptance": "greedy"} and sources(answer) == {"recycling"}
    other = traced(target_folder, tmp_path / "speculative_config.json", "--k", 3, "--lenience", 1, "--seed", 4, "--draft", draft_folder)
    wanted = dataclasses.replace(TREE, draft="model", draft_options={}, num_assistant_tokens=3, lenience=1.0, seed=4, predicted_speedup=None)
    assert other["speculation"]["config"] == {**wanted.to_dict(), "acceptance": "greedy"} and sources(other) == {"model"} and other["speculation"]["lossless"]
    assert traced(target_folder, tmp_path, "--draft", "prompt_lookup")["speculation"]["config"]["draft"] == "prompt_lookup"


def test_a_config_with_a_draft_model_loads_it(target_folder, draft_folder, tmp_path):
    SpeculativeConfig(draft="model_tree", draft_source=draft_folder, draft_options={"tree": [2, 2]}, num_assistant_tokens=2).save_pretrained(tmp_path)
    assert sources(traced(target_folder, tmp_path)) == {"model_tree"}
    SpeculativeConfig(draft="model", draft_source="no/such/draft").save_pretrained(tmp_path)
    result = run(target_folder, "--prompt", "abc", "--config", tmp_path)
    assert result.exit_code == 2 and "draft_source='no/such/draft' is no drafter and no transformers checkpoint" in result.stderr


def test_a_data_set_is_answered_as_the_config_says_and_another_config_is_another_job(target_folder, draft_folder, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"row {i} abab"}) + "\n" for i in range(3)))
    config = dataclasses.replace(TREE, lenience=1.0)
    config.save_pretrained(tmp_path / "config")
    asked = (target_folder, "--dataset", tmp_path / "in.jsonl", "--output", tmp_path / "out", "--max-new-tokens", 8, "--sample", "--tokens")
    assert (result := run(*asked, "--config", tmp_path / "config")).exit_code == 0, result.stderr
    settings = json.loads((tmp_path / "out" / "job.json").read_text())["settings"]
    assert settings | {"draft": "recycling", "k": "6", "seed": 3, "config": {"draft_options": {"branches": 2}}, "draft_weights": None} == settings
    for line in map(json.loads, (tmp_path / "out" / "rows-00000.jsonl").read_text().splitlines()):
        alone = run(target_folder, "--prompt", f"row {line['index']} abab", "--max-new-tokens", 8, "--sample", "--json", "--config", tmp_path / "config",
                    "--seed", line["seed"])
        assert json.loads(alone.stdout)["tokens"] == line["tokens"]
    assert run(*asked, "--config", tmp_path / "config").exit_code == 0  # nothing is left to do
    dataclasses.replace(config, draft_options={}).save_pretrained(tmp_path / "config")
    assert "--config was {'draft_options': {'branches': 2}}, is None" in error_of(*asked, "--config", tmp_path / "config")
    assert "--k was '6', is '2'" in error_of(*asked, "--config", tmp_path / "config", "--k", 2)
    SpeculativeConfig(draft="model", draft_source=draft_folder).save_pretrained(tmp_path / "config")
    assert run(*asked[:4], tmp_path / "other", *asked[5:], "--config", tmp_path / "config").exit_code == 0
    assert json.loads((tmp_path / "other" / "job.json").read_text())["settings"]["draft_weights"]
    dataclasses.replace(config, seed=(1, 2)).save_pretrained(tmp_path / "config")
    assert "its seeds are of rows that were decoded together; give --seed" in error_of(*asked, "--config", tmp_path / "config")


def test_the_rows_of_a_data_set_are_drawn_by_the_seed_that_the_job_file_names(target_folder, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": f"row {i}"}) + "\n" for i in range(2)))
    SpeculativeConfig(seed=3).save_pretrained(tmp_path / "config")
    seeds = {}
    for name, options in {"none": (), "0": ("--seed", 0), "config": ("--config", tmp_path / "config"), "3": ("--seed", 3)}.items():
        asked = (target_folder, "--dataset", tmp_path / "in.jsonl", "--output", tmp_path / "out" / name, "--max-new-tokens", 2, "--sample", *options)
        assert (result := run(*asked)).exit_code == 0, result.stderr
        seeds[name] = [json.loads(line)["seed"] for line in (tmp_path / "out" / name / "rows-00000.jsonl").read_text().splitlines()]
    assert seeds["none"] == seeds["0"] != seeds["3"] == seeds["config"]


def test_a_config_that_is_none_is_refused_before_anything_is_loaded(tmp_path):
    asked = (tmp_path / "no model", "--prompt", "a", "--config", tmp_path)
    assert f"{tmp_path / 'speculative_config.json'}: there is no such file" in error_of(*asked)
    (tmp_path / "speculative_config.json").write_text('{"k": 3}')
    assert "unknown speculative option 'k'" in error_of(*asked)
    (tmp_path / "tune.json").write_text('{"choices": {}}')
    told = error_of(*asked[:-1], tmp_path / "tune.json")
    assert "'choices'" in told and told.endswith(f"the options lie beside it: name {tmp_path / 'speculative_config.json'}, or its folder.")


@pytest.mark.parametrize("command", [("generate", "x", "--prompt", "a"), ("verify", "x"), ("bench", "x"), ("tune", "x"), ("demo", "x")], ids=lambda command: command[0])
def test_a_config_passed_as_a_draft_is_said_to_be_one(command, target_folder, tmp_path):
    for name in (SpeculativeConfig().save_pretrained(tmp_path), tmp_path):
        result = CliRunner().invoke(app, [*command, "--draft", str(name)])
        assert result.exit_code == 2 and f"{name} holds a speculative_config.json, not a model: pass it as --config" in " ".join(result.stderr.split())
    saved.tiny_model(0).save_pretrained(tmp_path)  # a model with a config beside it is a draft
    assert run(target_folder, "--prompt", "a", "--draft", tmp_path, "--max-new-tokens", 2).exit_code == 0
