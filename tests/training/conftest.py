"""A tiny target with a tokenizer that has a chat template, and training text that it wrote."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.training.data import make_data

from ..helpers import tiny_llama

LETTERS = [chr(code) for code in range(ord("A"), ord("A") + 58)]  # 58 of the target's 61 tokens


def chat_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {letter: i for i, letter in enumerate([*LETTERS, "<u>", "<a>", "<e>"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="A"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>", unk_token="A",
                                        additional_special_tokens=["<u>", "<a>"])
    tokenizer.chat_template = "{% for m in messages %}<u>{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="session")
def target():
    torch.set_num_threads(1)
    return tiny_llama(3)


@pytest.fixture(scope="session")
def data(target, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_data(folder, target, tokenizer, tokens=3000, rows=8, new_tokens=24, seed=5)
    return folder


@pytest.fixture
def saved(target, tokenizer, tmp_path):
    """The folder of the target and its tokenizer."""
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def trained(saved, tmp_path):
    """trained(*options): what the command makes with them in a few steps, and another takes; the card."""

    def run(*options: str) -> str:
        few = ("--tokens", "400", "--steps", "4", "--batch-tokens", "128", "--new-tokens", "12")
        for arguments in (["train", str(saved), "--out", str(tmp_path / "out"), *few, *options],
                          ["generate", str(saved), "--draft", str(tmp_path / "out"), "--prompt", "HELLO", "--max-new-tokens", "8"]):
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, done.output
        return (tmp_path / "out" / "README.md").read_text()

    return run


@pytest.fixture
def anyones_data(data, monkeypatch):
    """`data`, for targets that did not write it."""
    monkeypatch.setattr("hf_specdec.training.trainer.check_target", lambda folder, target: None)
    return data
