"""The command line with an encoder-decoder: one answer, a data set, a benchmark, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

from hf_specdec import mx
from hf_specdec.bench.embedded import load_target
from hf_specdec.cli import app

from ..bench.conftest import byte_tokenizer
from ..helpers import perturbed

PROMPTS = ["translate this", "and this text, which is longer", "a third", "x"]
SIZES = dict(vocab_size=257, d_model=32, decoder_start_token_id=256, eos_token_id=256, pad_token_id=256)


def saved(model, folder) -> str:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["T5", "BART"])
def pair(request, tmp_path_factory) -> tuple[str, str]:
    """Folders of a target and of a draft that is right now and then."""
    torch.manual_seed(0)
    if request.param == "T5":
        model = T5ForConditionalGeneration(T5Config(**SIZES, d_kv=8, d_ff=48, num_layers=1, num_heads=4, tie_word_embeddings=False))
    else:
        model = BartForConditionalGeneration(BartConfig(**SIZES, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
                                                        decoder_ffn_dim=48, max_position_embeddings=64, forced_eos_token_id=None, bos_token_id=None))
    target = saved(model, tmp_path_factory.mktemp("target"))
    draft = tmp_path_factory.mktemp("draft")
    perturbed(model, 0.02).save_pretrained(draft)
    byte_tokenizer().save_pretrained(draft)
    return target, str(draft)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def plain(folder: str, prompt: str, n: int = 12) -> list[int]:
    model, tokenizer = load_target(folder, encoder_decoders=True)
    out = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=n, do_sample=False)[0, 1:].tolist()
    return out[: out.index(256) + 1] if 256 in out else out


@pytest.mark.parametrize("options", [(), ("--k", 3)])
def test_one_answer_is_plain_generates(pair, options):
    for draft in ((), ("--draft", pair[1])):
        result = run("generate", pair[0], *draft, "--prompt", PROMPTS[1], "--max-new-tokens", 12, "--json", *options)
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        assert found["tokens"] == plain(pair[0], PROMPTS[1])


def test_a_data_set_is_answered_in_batches(pair, tmp_path):
    data = tmp_path / "in.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    result = run("generate", pair[0], "--draft", pair[1], "--dataset", data, "--output", tmp_path / "out", "--batch", 3, "--max-new-tokens", 12, "--tokens")
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for file in sorted((tmp_path / "out").glob("*.jsonl")) for line in file.read_text().splitlines()]
    assert {line["index"]: line["tokens"] for line in lines if "tokens" in line} == {i: plain(pair[0], prompt) for i, prompt in enumerate(PROMPTS)}


def test_a_data_set_is_answered_with_the_beams_that_the_model_asks_for(pair, tmp_path):
    model, tokenizer = load_target(pair[0], encoder_decoders=True)
    model.generation_config.num_beams = 3
    folder = str(tmp_path / "model")
    model.save_pretrained(folder), tokenizer.save_pretrained(folder)
    data = tmp_path / "in.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    result = run("generate", folder, "--dataset", data, "--output", tmp_path / "out", "--batch", 3, "--max-new-tokens", 12, "--tokens")
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for file in (tmp_path / "out").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert {line["index"]: line["tokens"] for line in lines} == {i: plain(folder, prompt) for i, prompt in enumerate(PROMPTS)}
    assert all(line["new_tokens"] == len(line["tokens"]) and line["block_efficiency"] is None for line in lines)


def test_the_benchmark_compares_its_texts(pair, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt, "category": "translation"}) + "\n" for prompt in PROMPTS[:2]))
    result = run("bench", pair[0], "--draft", pair[1], "--prompts", prompts, "--max-new-tokens", 12, "--repetitions", 1, "--k", 3, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    rows = {row["arm"]: row for row in json.loads((tmp_path / "out" / "bench.json").read_text())["results"]}
    assert {"plain generate", "ours lookup", "ours draft model"} <= set(rows)
    assert all(row["equal"] == row["outputs"] == 2 for name, row in rows.items() if name.startswith("ours"))


def test_it_is_compressed_and_the_folder_writes_text(pair, tmp_path):
    out = tmp_path / "mx"
    result = run("compress", pair[0], "--out", out, "--lm-head", "mxint8")
    assert result.exit_code == 0, result.stderr
    model, _ = load_target(str(out), encoder_decoders=True)
    assert isinstance(model.lm_head, mx.MXLinear)
    result = run("generate", out, "--prompt", PROMPTS[0], "--max-new-tokens", 8, "--json")
    assert result.exit_code == 0, result.stderr
    result = run("compress", pair[0], "--out", tmp_path / "more", "--report")
    assert result.exit_code == 2 and "--report" in result.stderr and "is an encoder-decoder" in " ".join(result.stderr.split()) and not (tmp_path / "more").exists()


@pytest.mark.parametrize("command", ["verify", "tune"])
def test_other_commands_say_which_ones_take_it(pair, command, tmp_path):
    result = run(command, pair[0], *(("--out", tmp_path) if command == "tune" else ()))
    assert result.exit_code == 2 and "is an encoder-decoder, which generate, bench and compress take" in " ".join(result.stderr.split())


def test_a_source_longer_than_the_encoders_context_is_refused(pair):
    limited = "max_position_embeddings" in json.loads((Path(pair[0]) / "config.json").read_text())  # T5's positions are relative
    result = run("generate", pair[0], "--prompt", "x" * 70, "--max-new-tokens", 12, "--json")
    assert (result.exit_code, "context holds 64" in result.stderr) == ((2, True) if limited else (0, False))
