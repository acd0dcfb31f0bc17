"""Without the package accelerate a trained draft is loaded and used; training says what to install before it writes anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec.training import drafter

BLOCKED = "import sys; sys.modules['accelerate'] = None\n"
RUN = BLOCKED + "from hf_specdec.cli import app; app(sys.argv[1:])"
FUNCTION = BLOCKED + """
from hf_specdec import training
try:
    training.train(None, None, 'data', sys.argv[-1], training.RunConfig())
except ImportError as error:
    print('ImportError:', error)
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


def test_a_drafter_is_loaded_and_drafts(folders):
    done = run(RUN, "generate", folders / "target", "--draft", folders / "draft", "--prompt", "ABCABC", "--max-new-tokens", 8, "--json")
    assert done.returncode == 0, done.stderr
    assert '"speculation"' in done.stdout


def test_training_names_the_extra_before_any_work(folders, tmp_path):
    """The function, then the command."""
    done = run(FUNCTION + RUN, "train", folders / "target", "--out", tmp_path / "out")
    assert "ImportError: training needs the package accelerate: pip install 'hf-specdec[train]'" in done.stdout
    assert done.returncode == 2 and "pip install 'hf-specdec[train]'" in done.stderr
    assert not (tmp_path / "out").exists()
