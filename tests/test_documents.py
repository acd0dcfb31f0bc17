"""The Python of the README and the docs runs as it stands, on tiny models with random weights."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

import hf_specdec
from hf_specdec import mx, passes
from hf_specdec.mx.calibration import own_text, pieces

from .bench.conftest import byte_tokenizer, tiny_model
from .helpers import FULL, OLD_TORCH

ROOT = Path(__file__).parent.parent
NAME = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=8192, bos_token_id=256)


def blocks() -> dict[str, str]:
    """{"docs/MX.md:2": the second block of Python in it}."""
    found = {}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for number, text in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S), 1):
            found[f"{path.relative_to(ROOT).as_posix()}:{number}"] = text
    return found


BLOCKS = blocks()
ELSEWHERE = {
    "docs/drafts.md:1": "tests/generate/test_hooks.py",
    "docs/drafts.md:2": "needs models of the hub",
    "docs/models.md:1": "tests/test_lockstep.py",
    "docs/speculative_execution.md:1": "tests/acceptance/test_primitive.py",
    "docs/speculative_execution.md:2": "tests/acceptance/test_primitive.py",
    "docs/usage.md:7": "needs a model of the hub",
}
# what is put in the place of something, for models that are small and untrained
INSTEAD = {"README.md:2": (NAME, "name"), "README.md:3": ('load_drafter("smollm2_drafter", model)', "small_model"), "docs/performance.md:1": ("7", "1"),
           "docs/drafts.md:3": ('training.load_drafter("hub:z-lab/Qwen3.5-4B-DFlash", target)', "small_model")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    tiny_model(0, **SIZES).save_pretrained(path)
    return str(path)


def names(folder: str) -> dict:
    """What the blocks take as there."""
    tokenizer, chat = byte_tokenizer(), [{"role": "user", "content": "abc abc abc"}]
    tokenizer.chat_template = CHAT
    model = tiny_model(0, **SIZES)
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return {
        "hf_specdec": hf_specdec, "mx": mx, "AutoModelForCausalLM": AutoModelForCausalLM, "own_text": lambda model: own_text(model, tokens=64, length=32),
        "pieces": pieces, "name": folder, "tokenizer": tokenizer, "chat": chat, "inputs": inputs, "model": hf_specdec.enable(model), "target": hf_specdec.enable(model),
        "small_model": tiny_model(1), "draft": tiny_model(1), "text": "The quick brown fox. " * 4, "samples": ["abc abc abc", "one two one two"],
    }  # fmt: skip


def hearing() -> dict:
    """A Whisper, and a smaller one."""
    def whisper(seed: int, layers: int):
        torch.manual_seed(seed)
        config = WhisperConfig(vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=layers, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
                               decoder_ffn_dim=16, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None,
                               begin_suppress_tokens=None)
        return WhisperForConditionalGeneration(config).eval()

    tone = torch.sin(torch.arange(16_000) / 10).numpy()
    return {"whisper": whisper(0, 2), "distilled": whisper(1, 1), "processor": WhisperFeatureExtractor(), "one": tone, "another": tone / 2}


def as_tested(key: str) -> str:
    """The block; where it says in several ways how a model is compressed, each compresses one of its own."""
    text = BLOCKS[key].replace(*INSTEAD.get(key, ("", "")))
    return re.sub(r"mx\.compress\(model,", "mx.compress(AutoModelForCausalLM.from_pretrained(name),", text)


@pytest.mark.parametrize("key", [key for key in BLOCKS if key not in ELSEWHERE])
def test_the_python_of_the_documents_runs(key, folder, tmp_path, monkeypatch, capsys):
    text, given = as_tested(key), names(folder)
    if "import xgrammar" in text and find_spec("xgrammar") is None:
        pytest.skip("needs xgrammar")
    if "warmup" in text and (OLD_TORCH or not FULL):
        pytest.skip("compiles the passes, which older versions of torch do not, and which takes some seconds")
    if "row_invariant" in text:
        given["model"] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch._dynamo.reset()
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "eager"})
    monkeypatch.chdir(tmp_path)
    exec(compile(text, key, "exec"), given | (hearing() if "whisper" in text else {}))  # noqa: S102


def test_what_is_said_to_run_elsewhere_is_there():
    assert ELSEWHERE.keys() <= BLOCKS.keys() and INSTEAD.keys() <= BLOCKS.keys() and all(old in BLOCKS[key] for key, (old, _) in INSTEAD.items())
