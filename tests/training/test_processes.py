"""Two processes train one draft: the first writes all files, both end well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hf_specdec
from hf_specdec.training import load_drafter, processes

PROGRAM = "import sys; from hf_specdec.cli import app; app(sys.argv[1:])"


def test_a_process_alone_joins_nobody(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert processes.join("cpu") is None and processes.is_main("cpu")
    with processes.main_first("cpu"):
        pass


def test_two_processes_make_one_drafter(saved, target, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = ["--tokens", "600", "--steps", "4", "--head", "40", "--batch-tokens", "128", "--new-tokens", "12", "--format", "bf16",
                "--layers", "1", "--on-policy", "60"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "program.py")]
    environment = os.environ | {"PYTHONPATH": str(Path(hf_specdec.__file__).parents[1]), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                                "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    done = subprocess.run([*launch, "train", str(saved), "--out", str(tmp_path / "out"), *settings], capture_output=True,
                          text=True, env=environment, timeout=170, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_drafter(tmp_path / "out", target) is not None
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md", "checkpoint.safetensors", "config.json", "data", "drafter.json", "model.safetensors", "on_policy", "results.json"}
    assert done.stderr.count("Tokens of training text 600 of 600, took") == 1 and done.stderr.count("Held out") == 1 and "How to use it: " in done.stderr
