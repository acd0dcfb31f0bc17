"""A model's folder that is damaged is refused by name wherever the package loads one, before transformers reads it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specdec import SpeculativeConfig, loading, mx
from hf_specdec.bench.embedded import load_model
from hf_specdec.cli import app
from hf_specdec.commands.common import load_draft
from hf_specdec.loading import loaded
from hf_specdec.training import build_drafter
from hf_specdec.training.drafter import save

from .mx.models import tiny

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A compressed checkpoint in several files."""
    model = mx.compress(tiny())
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    return tmp_path / "model"


def by_command(folder: Path, *arguments: str) -> None:
    done = CliRunner().invoke(app, [part.format(folder) for part in arguments])
    assert done.exit_code == 2, done
    raise ValueError(done.stderr)


WAYS = {
    "load_model": lambda folder: load_model(str(folder)),
    "mx.load": partial(mx.load, AutoModelForCausalLM),
    "draft_source": lambda folder: loaded(SpeculativeConfig(draft="model", draft_source=str(folder)), tiny()),
    "generate": lambda folder: by_command(folder, "generate", "{}", "--prompt", "a"),
}
every_way = pytest.mark.parametrize("load", WAYS.values(), ids=list(WAYS))


@every_way
@pytest.mark.share(3)
@pytest.mark.parametrize(("text", "words"), [('{"metadata": {"total', "cut short"), ("[]", "holds a list"), ("{}", "weight_map"), ('{"weight_map": {"a": 1}}', "weight_map"), ("\xff", "cut short")])
def test_a_damaged_index_of_weights_is_named(load, text, words, folder):
    (folder / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=rf"{INDEX} .*{words}.*copy the checkpoint again"):
        load(folder)


@every_way
def test_a_file_of_weights_that_the_index_names_and_the_folder_lacks_is_named(load, folder):
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=rf"{lost.name} is missing, which {INDEX} names: copy the checkpoint again"):
        load(folder)


def test_transformers_own_loader_of_a_compressed_checkpoint_names_a_file_that_is_missing(folder):
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"{lost.name} is missing"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_an_index_that_is_not_read_may_be_anything(folder):
    model = mx.load(AutoModelForCausalLM, folder)
    model.save_pretrained(folder)
    (folder / INDEX).write_text("none")
    mx.load(AutoModelForCausalLM, folder), load_model(str(folder))


def edit(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


COMMANDS = {
    "compress": lambda folder: by_command(folder, "compress", "{}", "--out", f"{folder}.out"),
    "export": lambda folder: by_command(folder, "export", "{}", "--target", "{}", "--out", f"{folder}.out"),
}
every_way_in = pytest.mark.parametrize("load", [*WAYS.values(), *COMMANDS.values()], ids=[*WAYS, *COMMANDS])


@every_way_in
@pytest.mark.share(3)
@pytest.mark.parametrize(("value", "words"), [("mx", "is a string, where an object"), (["mx"], "is a list"), (5, "is a number"), ({}, "has no quant_method")], ids=str)
def test_a_quantization_config_that_is_none_is_named(load, value, words, folder):
    edit(folder, quantization_config=value)
    with pytest.raises(ValueError, match=rf"config.json: its quantization_config {words}.*copy the checkpoint again, or take the entry out"):
        load(folder)


@every_way_in
def test_a_config_that_holds_no_object_is_named(load, folder):
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json holds a list.*copy the checkpoint again"):
        load(folder)


def test_weights_that_the_config_does_not_say_are_compressed_are_named_with_the_remedy(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantised and it does not say so: copy the checkpoint again"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["load_model", "draft_source"])
def test_weights_that_do_not_fit_or_are_cut_short_are_named(name, tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    begin = "draft_source='.*" if name == "draft_source" else ""
    edit(tmp_path, intermediate_size=2 * model.config.intermediate_size)
    with pytest.raises(ValueError, match=rf"{begin}the weights do not have the sizes that .*config.json says.*copy the checkpoint again"):
        WAYS[name](tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(ValueError, match="model.safetensors is damaged or cut short.*copy it again|a file of weights is damaged or cut short.*copy it again"):
        WAYS[name](tmp_path)


@pytest.mark.parametrize("name", ["load_model", "draft_source", "mx.load"])
def test_weights_that_are_missing_are_named_and_not_made_up(name, tmp_path):
    (mx.compress(tiny()) if name == "mx.load" else tiny()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    WAYS[name](tmp_path)
    weights = load_file(file)
    norm = next(key for key in weights if key.endswith("norm.weight"))
    del weights[norm]
    save_file(weights, file, metadata={"format": "pt"})
    file.touch()
    with pytest.raises(ValueError, match=rf"lacks 1 of the weights of .*{norm}.*random numbers: name a checkpoint of the whole model"):
        loading._model.cache_clear()
        WAYS[name](tmp_path)


@pytest.mark.parametrize(("name", "words"), [("notes.json", "is a file; name the folder"), ("empty", "is a folder that holds no model"), ("drafter", "holds a drafter.*pass the drafter as --draft")])
def test_what_holds_no_whole_model_is_named_with_what_does(name, words, tmp_path):
    (tmp_path / "empty").mkdir(), (tmp_path / "notes.json").write_text("{}")
    save(build_drafter(tiny(), [1], None), tmp_path / "drafter", "tiny")
    for arguments in (("generate", "{}", "--prompt", "a"), ("compress", "{}", "--out", str(tmp_path / "out"))):
        with pytest.raises(ValueError, match=words):
            by_command(tmp_path / name, *arguments)
    assert not (tmp_path / "out").exists()
    if name != "drafter":
        with pytest.raises(ValueError, match=words):
            load_draft(str(tmp_path / name), "float32", tiny(), None)
