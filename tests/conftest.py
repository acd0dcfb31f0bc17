"""The session: which versions it runs on, how much of every kind of test, and what needs a GPU."""

from __future__ import annotations

import os

import pytest
import torch
import transformers

from .helpers import FULL

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def pytest_report_header(config) -> list[str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return [
        f"torch {torch.__version__}, transformers {transformers.__version__}, {device}, {torch.get_num_threads()} thread(s)",
        "counts: full" if FULL else "counts: a seeded share of every kind (HF_SPECDEC_FULL=1 runs all)",
    ]


def pytest_collection_modifyitems(items) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
