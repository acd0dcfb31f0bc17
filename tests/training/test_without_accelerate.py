"""Without the package accelerate a trained draft is loaded and used; training says what to install before it writes anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec.hints import install
from hf_specdec.training import drafter

SEPARATOR = "--then--"
PROGRAM = f"""
import sys
sys.modules['accelerate'] = None
from hf_specdec import training
from hf_specdec.cli import app

at = sys.argv.index({SEPARATOR!r})
app(sys.argv[1:at], standalone_mode=False)
try:
    training.train(None, None, 'data', sys.argv[-1], training.RunConfig())
except ImportError as error:
    print('ImportError:', error)
app(sys.argv[at + 1:])
"""


def run(program: str, *arguments) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(Path(hf_specdec.__file__).parents[1]), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture(scope="module")
def folders(target, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    drafter.save(drafter.build(target, [1], None), folder / "draft", "tiny", "bf16", {})
    return folder


def test_a_drafter_is_loaded_and_drafts_and_training_names_the_extra_before_any_work(folders, tmp_path):
    """One process: a command that drafts, the function that trains, the command that trains."""
    drafts = ["generate", folders / "target", "--draft", folders / "draft", "--prompt", "ABCABC", "--max-new-tokens", 8, "--json"]
    done = run(PROGRAM, *drafts, SEPARATOR, "train", folders / "target", "--out", tmp_path / "out")
    assert '"speculation"' in done.stdout, done.stderr
    assert f"ImportError: training needs the package accelerate: {install('train')}" in done.stdout
    assert done.returncode == 2 and install("train") in done.stderr
    assert not (tmp_path / "out").exists()
