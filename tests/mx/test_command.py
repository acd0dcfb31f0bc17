"""`hf-specdec compress`: what it prints and writes, what it refuses before any work, and that nothing is half-written."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_specdec import mx
from hf_specdec.bench import embedded
from hf_specdec.cli import app
from hf_specdec.commands import compress as command
from hf_specdec.mx.calibration import pieces
from hf_specdec.mx.choose import larger

from ..bench.conftest import byte_tokenizer, tiny_model
from .models import mx_layers

WIDE = {"COLUMNS": "200"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    tiny_model(hidden_size=64, tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["compress", *map(str, arguments)], env=WIDE)


def refused(words: str, *arguments) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert words in result.stderr and result.stderr.startswith("hf-specdec: error: "), result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_folder_is_written_that_loads_with_its_tokenizer(folder, tmp_path):
    out = tmp_path / "new" / "mx"
    result = run(folder, "--out", out, "--format", "mxint8", "--scale-rule", "mse")
    assert result.exit_code == 0, result.output
    expected = mx.compress(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), "mxint8", scale_rule="mse")
    written = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    states = written.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys() and all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert written.dtype == torch.bfloat16 and AutoTokenizer.from_pretrained(out)("abc")["input_ids"]
    assert [path.name for path in out.parent.iterdir()] == ["mx"]
    assert "Saved to" in result.stdout and "Loading" in result.stderr and "Loading" not in result.stdout


def test_the_table_groups_layers_and_lists_them_all_on_request(folder, tmp_path):
    grouped = run(folder, "--out", tmp_path / "a").stdout
    assert "model.layers.0-1.mlp.up_proj (2)" in grouped and "64 x 64" in grouped and "model.layers.1.mlp.up_proj" not in grouped
    assert "dense: the output head: pass --lm-head FORMAT" in grouped and "14 layers compressed, 1 left dense" in grouped
    assert "6.25 bits per compressed weight" in grouped and "Whole model:" in grouped
    listed = run(folder, "--out", tmp_path / "b", "--all").stdout
    assert all(f"model.layers.{i}.mlp.up_proj " in listed for i in (0, 1)) and "0-1" not in listed


@pytest.mark.parametrize("width", [40, 80])
def test_names_are_whole_where_the_table_is_wider_than_the_terminal(folder, tmp_path, width):
    done = CliRunner().invoke(app, ["compress", str(folder), "--out", str(tmp_path / "out"), "--lm-head", "mxint8"], env={"COLUMNS": str(width)})
    lines = done.stdout.splitlines()
    place = lines.index("model.layers.0-1.self_attn.q_proj (2)")
    assert lines[place + 1].split()[:3] == ["64", "x", "64"] and lines[place + 1].endswith(" mxfp6_e2m3")
    assert lines[0] == "layer" and lines[1].split() == ["shape", "MiB", "before", "after", "SQNR", "dB", "format"]
    assert lines[1].index("before") + len("before") == lines[place + 1].index("0.0") + len("0.016")
    assert any(line.endswith("mxint8 (untied from the embedding, which stays dense)") for line in lines)


def test_heads_skips_and_types(folder, tmp_path):
    out, file = tmp_path / "mx", tmp_path / "report.json"
    result = run(
        folder, "--out", out, "--lm-head", "mxfp8_e4m3", "--skip", "down_proj", "--skip", "*.0.*", "--dtype", "float32", "--json", file
    )
    assert result.exit_code == 0, result.output
    written = AutoModelForCausalLM.from_pretrained(out)
    assert "lm_head" in mx_layers(written) and len(mx_layers(written)) == 7 and written.dtype == torch.float32
    assert "dense: skipped on request" in result.stdout and "untied from the embedding" in result.stdout
    found = json.loads(file.read_text())
    assert found["config"] == written.config.quantization_config.to_dict() and found["quality"] is None and found["dtype"] == "float32"
    layers = {layer["name"]: layer for layer in found["compression"]["layers"]}
    assert layers["lm_head"]["format"] == "mxfp8_e4m3" and layers["model.layers.0.mlp.up_proj"]["note"] == "skipped on request"
    stored = sum(p.numel() * p.element_size() for p in written.parameters())
    assert found["model_bytes_after"] == stored


def test_the_report_measures_on_the_shipped_text_or_another(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Neighbouring weights tend to be of similar size. " * 20)
    for arguments in (("--report",), ("--report", "--text", text)):
        file = tmp_path / "report.json"
        result = run(folder, *arguments, "--json", file, "--dtype", "float32")
        assert result.exit_code == 0, result.output
        found = json.loads(file.read_text())
        original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        words = text.read_text() if "--text" in arguments else None
        expected = mx.compare(original, mx.compress(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)), byte_tokenizer(), words)
        assert found["quality"] == pytest.approx(expected.to_dict(), rel=1e-6)
        assert f"{expected.perplexity:.4f}" in result.stdout and "SQNR" in result.stdout and "Saved" not in result.stdout
    assert str(text) in result.stdout


def test_calibrated_on_a_text_or_on_its_own(folder, tmp_path):
    text, file = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text("Neighbouring weights tend to be of similar size. " * 20)
    losses = []
    for arguments, source in (((), None), (("--calibrate", text), str(text)), (("--calibrate", "generated"), "generated")):
        result = run(folder, "--format", "mxfp4_e2m1", "--report", "--text", text, "--json", file, "--dtype", "float32", *arguments)
        assert result.exit_code == 0, result.output
        found = json.loads(file.read_text())
        notes = {layer["note"] for layer in found["compression"]["layers"] if layer["format"]}
        assert found["calibration"] == source and notes == {"calibrated" if source else ""}
        assert ("mxfp4_e2m1 (calibrated)" in result.stdout) is ("Calibrated on " in result.stdout) is (source is not None)
        losses.append(found["quality"]["kl"])
    assert losses[1] < 0.8 * losses[0] and "Calibrated on text of its own: " in result.stdout
    expected = mx.compress(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), calibration=pieces(byte_tokenizer()(text.read_text())["input_ids"]))
    run(folder, "--calibrate", text, "--out", tmp_path / "mx")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "mx", dtype="auto").state_dict()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.state_dict().items())


def test_a_model_that_chats_writes_what_users_say():
    tokenizer, asked = byte_tokenizer(), []
    tokenizer.chat_template = "{% for m in messages %}<user>{{ m.content }}</user>{% endfor %}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_specdec.mx.calibration.own_text", lambda model, start: asked.append(start))
        command.calibration_text(None, tokenizer, None)
    assert asked == [tokenizer("<user>")["input_ids"]]


def test_formats_by_layer(folder, tmp_path):
    file = tmp_path / "report.json"
    patterns = ["--layer-format", "down_proj=mxint8", "--layer-format", "*.0.*=mxfp6_e2m3", "--layer-format", "up_proj=bf16"]
    result = run(folder, "--format", "mxfp4_e2m1", *patterns, "--out", tmp_path / "mx", "--json", file)
    assert result.exit_code == 0, result.output
    own = {"down_proj": "mxint8", "*.0.*": "mxfp6_e2m3", "up_proj": "bf16"}
    expected = mx.compress(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), "mxfp4_e2m1", layer_formats=own)
    written, found = AutoModelForCausalLM.from_pretrained(tmp_path / "mx", dtype="auto"), json.loads(file.read_text())
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in written.state_dict().items())
    assert found["config"] == written.config.quantization_config.to_dict() and found["config"]["layer_formats"] == [list(pair) for pair in own.items()]
    assert {layer["name"]: layer["format"] for layer in found["compression"]["layers"]} == {layer.name: layer.format for layer in expected.mx_report.layers}
    assert "model.layers.0-1.mlp.up_proj (2)" in result.stdout and "model.layers.1.mlp.down_proj " in result.stdout and found["bits"] is None


def test_formats_chosen_for_a_number_of_bits(folder, tmp_path):
    text, file = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text("Neighbouring weights tend to be of similar size. " * 20)
    result = run(folder, "--format", "mxfp4_e2m1", "--bits", "5", "--calibrate", text, "--out", tmp_path / "mx", "--json", file, "--skip", "q_proj")
    assert result.exit_code == 0, result.output
    dense, sequences = AutoModelForCausalLM.from_pretrained(folder, dtype="auto"), pieces(byte_tokenizer()(text.read_text())["input_ids"])
    chosen, found = mx.choose_formats(dense, 5.0, sequences, larger("mxfp4_e2m1"), skip=["q_proj"]), json.loads(file.read_text())
    assert dict(found["config"]["layer_formats"]) == chosen and len(chosen) == 12 and found["bits"] == 5.0
    layers = [layer for layer in found["compression"]["layers"] if layer["format"]]
    assert {layer["name"]: layer["format"] for layer in layers} == chosen and {layer["note"] for layer in layers} == {"calibrated"}
    assert "bits per compressed weight" in result.stdout and 4.25 < float(result.stdout.partition(" bits per compressed weight")[0].rpartition(" ")[2]) <= 5


@pytest.mark.parametrize("format, dtype, rounding", [("fp32", "float32", 1e-4), ("bf16", "bfloat16", 1e-3)])
def test_the_report_on_weights_that_stay_as_they_are_compares_with_the_original(format, dtype, rounding, folder, tmp_path):
    """The original shares its weights with what is compressed. In 16 bit, attention by the kernel rounds otherwise than torch's."""
    file = tmp_path / "report.json"
    result = run(folder, "--format", format, "--dtype", dtype, "--report", "--json", file)
    assert result.exit_code == 0, result.output
    quality = json.loads(file.read_text())["quality"]
    assert quality["kl"] < rounding and quality["overlap"] > 0.99


def test_the_other_commands_read_the_folder(folder, tmp_path):
    run(folder, "--out", tmp_path / "mx")
    result = CliRunner().invoke(app, ["generate", str(tmp_path / "mx"), "--prompt", "abcabc", "--max-new-tokens", "5", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["tokens"]


def test_wrong_arguments_are_refused_before_anything_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "load_model", lambda *_: pytest.fail("a model was loaded"))
    out = tmp_path / "out"
    refused("give --out DIR", folder)
    refused("--format mxfp5 is not an MX format", folder, "--out", out, "--format", "mxfp5")
    refused("--scale-rule up", folder, "--out", out, "--scale-rule", "up")
    refused("--lm-head x is not an MX format", folder, "--out", out, "--lm-head", "x")
    refused("--text has no meaning without --report", folder, "--out", out, "--text", tmp_path)
    refused("there is no such file", folder, "--report", "--text", tmp_path / "none.txt")
    refused("--calibrate none.txt: there is no such file; name a file of text, or generated", folder, "--out", out, "--calibrate", "none.txt")
    refused("--calibrate has no meaning with --format bf16", folder, "--out", out, "--calibrate", "generated", "--format", "bf16")
    refused("--layer-format up_proj: give PATTERN=FORMAT, such as down_proj=mxint8", folder, "--out", out, "--layer-format", "up_proj")
    refused("layer_formats['up_proj']='mxfp5' is not an MX format", folder, "--out", out, "--layer-format", "up_proj=mxfp5")
    refused("--bits needs a text to choose by: give --calibrate FILE", folder, "--out", out, "--bits", "5", "--format", "mxfp4_e2m1")
    chosen = ["--out", out, "--calibrate", "generated", "--format", "mxfp4_e2m1", "--bits"]
    refused("--bits chooses the layers' formats: leave --layer-format out", folder, *chosen, "5", "--layer-format", "up_proj=mxint8")
    refused("must be a number from 4.25", folder, *chosen, "4")
    refused("--bits has no meaning with --format mxint8: there is no larger format to choose", folder, "--out", out, "--calibrate", "generated", "--bits", "9", "--format", "mxint8")
    refused("its folder does not exist", folder, "--report", "--json", tmp_path / "none" / "x.json")
    (tmp_path / "mine.json").write_text("{}")
    refused("is no report of this command", folder, "--report", "--json", tmp_path / "mine.json")
    assert (tmp_path / "mine.json").read_text() == "{}"
    for name, data, words in (("empty", b" \n", "there is no text in it"), ("latin", b"gr\xfcn", "not text in UTF-8")):
        (tmp_path / name).write_bytes(data)
        refused(f"--text {tmp_path / name}: {words}", folder, "--report", "--text", tmp_path / name, "--out", out)
        refused(f"--calibrate {tmp_path / name}: {words}", folder, "--calibrate", tmp_path / name, "--out", out)
    if Path("/proc/self").exists():
        refused("nothing can be written in /proc", folder, "--report", "--json", "/proc/x.json")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    refused("exists and is not an empty folder", folder, "--out", tmp_path / "full")
    refused("exists and is not an empty folder", folder, "--out", tmp_path / "full" / "mine.txt")
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine" and not out.exists()


def test_a_text_of_one_token_is_refused_before_anything_is_saved(folder, tmp_path):
    (tmp_path / "short.txt").write_text("a")
    result = run(folder, "--out", tmp_path / "mx", "--report", "--text", tmp_path / "short.txt")
    assert result.exit_code == 2 and "at least 2 tokens are needed" in result.stderr and not (tmp_path / "mx").exists()


def test_models_that_cannot_be_compressed(folder, tmp_path):
    out = tmp_path / "out"
    assert run(tmp_path / "nothing", "--out", out).exit_code == 2
    run(folder, "--out", tmp_path / "mx")
    refused(f"{tmp_path / 'mx'} is compressed already (mxfp6_e2m3): name the original checkpoint", tmp_path / "mx", "--out", out)
    tiny_model(hidden_size=64).save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "model.safetensors"
    data = file.read_bytes()
    result = run(tmp_path / "dense", "--report")
    assert result.exit_code == 2 and "--report needs a tokenizer" in result.stderr
    assert run(tmp_path / "dense", "--out", tmp_path / "untold").exit_code == 0  # without a tokenizer there is none to save
    file.write_bytes(data[: len(data) // 2])
    result = run(tmp_path / "dense", "--out", out)
    assert result.exit_code == 2 and "damaged or cut short" in result.stderr and not out.exists()


def test_a_compressed_target_is_not_compressed_again_by_generate(folder, tmp_path):
    run(folder, "--out", tmp_path / "mx", "--format", "mxint8")
    result = CliRunner().invoke(app, ["generate", str(tmp_path / "mx"), "--prompt", "abc", "--mx", "mxfp4_e2m1"])
    assert result.exit_code == 2 and f"{tmp_path / 'mx'} is compressed already (mxint8): leave --mx out, or name the original checkpoint." in result.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space left")])
def test_an_interrupted_write_leaves_nothing_behind(error, folder, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(type(byte_tokenizer()), "save_pretrained", fail)
    assert run(folder, "--out", tmp_path / "mx").exit_code != 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mx").mkdir()
    assert run(folder, "--out", tmp_path / "mx").exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["mx"] and not list((tmp_path / "mx").iterdir())


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limits of file sizes here")
def test_a_disk_that_is_full_is_an_error_of_one_line(folder, tmp_path):
    """By a limit of the files' size."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        result = run(folder, "--out", tmp_path / "mx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 2 and "hf-specdec: error: " in result.stderr.splitlines()[-1] and list(tmp_path.iterdir()) == [], result.stderr


def test_an_empty_folder_is_filled_and_one_that_filled_meanwhile_is_kept(folder, tmp_path, monkeypatch):
    (tmp_path / "mx").mkdir()
    assert run(folder, "--out", tmp_path / "mx").exit_code == 0 and (tmp_path / "mx" / "config.json").is_file()
    load = command._tokenizer

    def slow(*arguments, **options):
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "mine.txt").write_text("mine")
        return load(*arguments, **options)

    monkeypatch.setattr(command, "_tokenizer", slow)
    assert run(folder, "--out", tmp_path / "late").exit_code == 2
    assert [path.name for path in (tmp_path / "late").iterdir()] == ["mine.txt"] and len(list(tmp_path.iterdir())) == 2
