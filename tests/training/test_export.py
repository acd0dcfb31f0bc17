"""What is written for vLLM: the config's words, and weights that read back as what they were. vLLM itself is not run."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.training import build_drafter, load_drafter
from hf_specdec.training.drafter import save
from hf_specdec.training.export import CONFIG, export
from hf_specdec.training.heads import build as build_heads
from hf_specdec.training.heads import save as save_heads

from . import dflash_checkpoints
from .dflash_checkpoints import CONFIGS
from .test_published import eagle3, medusa, write, write_medusa
from ..conformance.builders import masked_places, of_heads
from ..helpers import build, tiny_llama


def heads_folder(target, folder, ids, format):
    heads = build_heads(target, 3, 2, ids)
    torch.manual_seed(0)
    for parameter in heads.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return save_heads(heads, target.get_input_embeddings().weight, folder, "tiny", format)


@pytest.mark.parametrize(("ids", "format"), [(None, "bf16"), (torch.arange(0, 61, 2), "mxint8")], ids=["whole", "pruned, MX"])
def test_heads_read_back_as_what_they_were(target, tmp_path, ids, format):
    folder = heads_folder(target, tmp_path / "heads", ids, format)
    config = export(str(folder), target, tmp_path / "out", 3)
    assert config == {"method": "medusa", "model": str(tmp_path / "out" / "draft"), "num_speculative_tokens": 3}
    assert json.loads((tmp_path / "out" / CONFIG).read_text()) == config
    about = json.loads((tmp_path / "out" / "draft" / "config.json").read_text())
    rows = 61 if ids is None else len(ids)
    expected = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 61, "truncated_vocab_size": rows,
                "medusa_fc_bias": True, "original_lm_head": True}
    assert expected.items() <= about.items()
    with safe_open(tmp_path / "out" / "draft" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        head = file.get_tensor("lm_heads.0.weight")
    blocks = {f"blocks.{i}.layers.{j}.{part}" for i in range(3) for j in range(2) for part in ("weight", "bias")}
    assert names == blocks | {"lm_heads.0.weight"} | ({"token_map"} if ids is not None else set())
    torch.testing.assert_close(head, target.lm_head.weight if ids is None else target.lm_head.weight[ids])
    states = torch.randn(4, 32)
    again, before = load_drafter(config["model"], target).heads, load_drafter(folder, target).heads
    torch.testing.assert_close(again(states), before(states), atol=1e-4, rtol=1e-3)


def test_heads_with_outputs_of_their_own_keep_them(target, tmp_path):
    tensors = medusa()
    folder = write_medusa(tmp_path / "heads", tensors)
    config = export(str(folder), target, tmp_path / "out", 2)
    states = torch.randn(4, 32)
    torch.testing.assert_close(load_drafter(config["model"], target).heads(states), load_drafter(folder, target).heads(states))


@pytest.mark.parametrize("format", ["bf16", "mxint8"])
def test_a_drafter_becomes_a_plain_checkpoint(target, tmp_path, format):
    save(build_drafter(target, [1], torch.arange(40)), tmp_path / "drafter", "tiny", format)
    config = export(str(tmp_path / "drafter"), target, tmp_path / "out", 4)
    assert config["method"] == "draft_model"
    found = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32)
    ids, own = torch.tensor([[5, 6, 7]]), load_drafter(tmp_path / "drafter", target)
    with torch.no_grad():
        expected = own.base_model(input_ids=ids).last_hidden_state @ target.get_output_embeddings().weight[:40].T  # the target's own rows, not packed
        torch.testing.assert_close(found(input_ids=ids).logits[..., :40], expected, atol=1e-3, rtol=1e-3)


def test_the_head_of_a_plain_checkpoint_has_the_targets_bias(tmp_path):
    target = build("phi", vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    torch.nn.init.normal_(target.lm_head.bias)
    save(build_drafter(target, [0]), tmp_path / "drafter", "tiny")
    found = AutoModelForCausalLM.from_pretrained(export(str(tmp_path / "drafter"), target, tmp_path / "out", 4)["model"])
    torch.testing.assert_close(found.lm_head.bias, target.lm_head.bias)


def test_published_layers_and_models_are_named_where_they_are(tmp_path):
    deep = tiny_llama(3, num_hidden_layers=8)
    folder = write(tmp_path / "eagle3", eagle3(deep))
    assert export(str(folder), deep, tmp_path / "a", 5) == {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 5}
    assert export("some/model", deep, tmp_path / "b", 5)["model"] == "some/model"


@pytest.mark.skipif("muse_glimmer_assistant" not in CONFIG_MAPPING, reason="this version of transformers has no assistant of the kind")
def test_block_drafters_are_named_where_they_are(tmp_path):
    deep = tiny_llama(3, num_hidden_layers=4)
    for name, method, places in (("z-lab", "dflash", 4), ("DFlash 2", "dflash", 4), ("speculators", "dflash", 4), ("DSpark, rnn", "dspark", 5), ("DSpark of SpecForge", "dspark", 5),
                                 ("DSpark of speculators, behind the root", "dspark", 4)):
        folder = dflash_checkpoints.write(tmp_path / name, CONFIGS[name], dflash_checkpoints.checkpoint(CONFIGS[name]))
        assert export(str(folder), deep, tmp_path / "out" / name) == {"method": method, "model": str(folder), "num_speculative_tokens": places}
        assert export(str(folder), deep, tmp_path / "less" / name, 3)["num_speculative_tokens"] == 3
        with pytest.raises(ValueError, match=f"k={places + 1}: a block has {places} places"):
            export(str(folder), deep, tmp_path / "more" / name, places + 1)
    anchored = dflash_checkpoints.write(tmp_path / "anchored", CONFIGS["at the root's place"], dflash_checkpoints.checkpoint(CONFIGS["at the root's place"]))
    with pytest.raises(ValueError, match="first token is drafted at the root's place"):
        export(str(anchored), deep, tmp_path / "not")
    xpress = dflash_checkpoints.write(tmp_path / "xpress", CONFIGS["XPress"], dflash_checkpoints.checkpoint(CONFIGS["XPress"]))
    with pytest.raises(ValueError, match="no method for .*xpress, an XPress drafter"):
        export(str(xpress), deep, tmp_path / "not")
    masked_places(deep).save_pretrained(tmp_path / "glimmer")
    assert export(str(tmp_path / "glimmer"), deep, tmp_path / "muse") == {"method": "dflash", "model": str(tmp_path / "glimmer"), "num_speculative_tokens": 4}


def in_vllm(name: str) -> str:
    """The parameter that vLLM's DFlashQwen3ForCausalLM (qwen3_dflash.py: load_weights, and its model's mapper) puts a checkpoint's tensor into."""
    if name == "t2d":
        return ""
    name = "draft_id_to_target_id" if name == "d2t" else name if "lm_head" in name else f"model.{name}"
    for old, new in (("encoder.output_norm_enc.", "hidden_norm."), ("encoder.fc.", "fc."), (".q_proj", ".qkv_proj"), (".k_proj", ".qkv_proj"), (".v_proj", ".qkv_proj"),
                     (".gate_proj", ".gate_up_proj"), (".up_proj", ".gate_up_proj")):  # fmt: skip
        name = name.replace(old, new)
    return name


@pytest.mark.skipif("muse_glimmer_assistant" not in CONFIG_MAPPING, reason="this version of transformers has no assistant of the kind")
@pytest.mark.parametrize("name", ["z-lab", "speculators", "Muse Glimmer"])
def test_every_tensor_of_a_block_drafter_has_its_place_in_vllm(name, tmp_path):
    """Those of the layouts that these tests write, by hand from vLLM's source."""
    deep = tiny_llama(3, num_hidden_layers=4)
    tensors = masked_places(deep).state_dict() if name == "Muse Glimmer" else dflash_checkpoints.checkpoint(CONFIGS[name])
    layer = ("self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight",
             "input_layernorm.weight", "post_attention_layernorm.weight")
    own = {"model.fc.weight", "model.hidden_norm.weight", "model.norm.weight", *(f"model.layers.{i}.{part}" for i in range(2) for part in layer)}
    found = {in_vllm(key) for key in tensors} - {""}
    assert own <= found <= own | {"model.embed_tokens.weight", "lm_head.weight", "draft_id_to_target_id"}


@pytest.mark.parametrize("vocab", [40, 60, 61])
def test_a_draft_model_with_another_vocabulary_is_refused(vocab, target, tmp_path):
    tiny_llama(1, vocab_size=vocab).save_pretrained(tmp_path / "draft")
    target.save_pretrained(tmp_path / "target")
    done = CliRunner().invoke(app, ["export", str(tmp_path / "draft"), "--target", str(tmp_path / "target"), "--out", str(tmp_path / "out")])
    if vocab == 61:
        assert done.exit_code == 0 and json.loads(done.stdout)["model"] == str(tmp_path / "draft")
    else:
        assert done.exit_code == 2 and not (tmp_path / "out").exists()
        assert f"{tmp_path / 'draft'} has a vocabulary of {vocab} tokens, the target one of 61" in done.stderr and "resize_token_embeddings(61)" in done.stderr


def test_the_command_writes_prompt_lookup_without_a_target(tmp_path):
    result = CliRunner().invoke(app, ["export", "prompt_lookup", "--out", str(tmp_path / "out"), "--k", "5"])
    assert result.exit_code == 0 and "not loaded here" in result.stderr
    expected = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    assert json.loads((tmp_path / "out" / CONFIG).read_text()) == expected == json.loads(result.stdout)


def test_the_command_has_no_bars_where_there_is_no_terminal(target, tmp_path):
    target.save_pretrained(tmp_path / "target")
    save(build_drafter(target, [1], None), tmp_path / "draft", "tiny")
    done = CliRunner().invoke(app, ["export", str(tmp_path / "draft"), "--target", str(tmp_path / "target"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and "Writing to" in done.stderr and not set("\r|%") & set(done.stderr), done.output


def test_without_k_there_are_as_many_tokens_as_heads(target, tmp_path):
    folder = heads_folder(target, tmp_path / "heads", None, "bf16")
    assert export(str(folder), target, tmp_path / "out")["num_speculative_tokens"] == 3
    assert export("prompt_lookup", target, tmp_path / "lookup")["num_speculative_tokens"] == 4


def test_what_vllm_has_no_method_for_is_refused(target, tmp_path):
    save(build_drafter(target, [1], None, (0, 1, 2)), tmp_path / "features", "tiny")
    with pytest.raises(ValueError, match="EAGLE layers do not have"):
        export(str(tmp_path / "features"), target, tmp_path / "out", 4)
    with pytest.raises(ValueError, match="no method for uniform"):
        export("uniform", target, tmp_path / "out", 4)
    for name in ("mixture", "cascade", "nope", "./nope", "no/such/folder"):
        bad = CliRunner().invoke(app, ["export", name, "--target", "no/such/target", "--out", str(tmp_path / "out")])
        words = f"draft: {name} is no folder" if "no" in name else f"draft: vLLM has no method for {name};"
        assert bad.exit_code == 2 and words in bad.stderr and "Loading" not in bad.stderr
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty is a folder that holds neither a drafter nor a model"):
        export(str(tmp_path / "empty"), target, tmp_path / "out", 4)
    of_heads(target).save_pretrained(tmp_path / "assistant")
    with pytest.raises(ValueError, match=r"assistant is an assistant \(gemma4_assistant\) that lives on the target's own states"):
        export(str(tmp_path / "assistant"), target, tmp_path / "out", 4)
    heads_folder(target, tmp_path / "heads", None, "bf16")
    with pytest.raises(ValueError, match="3 heads"):
        export(str(tmp_path / "heads"), target, tmp_path / "out", 4)
    with pytest.raises(ValueError, match="1..64"):
        export("prompt_lookup", target, tmp_path / "out", 65)
    with pytest.raises(ValueError, match="not an empty folder"):
        export("prompt_lookup", target, tmp_path / "heads", 4)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_mx_weights_is_refused(tmp_path):
    (tmp_path / "mx").mkdir()
    (tmp_path / "mx" / "config.json").write_text('{"quantization_config": {"quant_method": "mx", "format": "mxfp6_e2m3"}}')
    done = CliRunner().invoke(app, ["export", str(tmp_path / "mx"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and "dequantize=True" in " ".join(done.output.split()) and not (tmp_path / "out").exists()


def test_the_line_to_serve_knows_where_the_embedded_target_is(tmp_path):
    done = CliRunner().invoke(app, ["export", "prompt_lookup", "--out", str(tmp_path / "out")])
    assert "vllm serve smollm2" not in done.output and "embedded_folder()" in done.output


def test_an_export_that_is_interrupted_leaves_nothing_and_can_be_had_again(target, tmp_path, monkeypatch):
    save(build_drafter(target, [1], None), tmp_path / "drafter", "tiny")

    def interrupted(model, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("transformers.PreTrainedModel.save_pretrained", interrupted)
        export(str(tmp_path / "drafter"), target, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
    assert export(str(tmp_path / "drafter"), target, tmp_path / "out")["model"] == str((tmp_path / "out" / "draft").resolve())
