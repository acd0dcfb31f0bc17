"""The session: which versions it runs on, how much of every kind of test, and what needs a GPU."""

from __future__ import annotations

import os
import random
import signal
import warnings

import pytest
import torch
import transformers

from hf_specdec.budget import Budget
from hf_specdec.law import Law
from hf_specdec.lazy_law import LazyLaw
from hf_specdec.mx.kernels import cpu
from hf_specdec.round_cost import RoundCost
from hf_specdec.schedule import AutoSchedule

from . import durations
from .helpers import FULL

SEED = os.environ.get("HF_SPECDEC_SEED", "")  # of the share of tests that is run
PER_FUNCTION = 2.5  # seconds

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background has it ignored
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
cpu.has_amx = lambda: False  # where there is, many rows in bfloat16 are torch's, whose bits are its own; tests/mx/test_kernels.py has the product


def pytest_report_header(config) -> list[str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return [
        f"torch {torch.__version__}, transformers {transformers.__version__}, {device}, {torch.get_num_threads()} thread(s)",
        "counts: full" if FULL else f"counts: a seeded share of every kind (HF_SPECDEC_SEED={SEED}; HF_SPECDEC_FULL=1 runs all)",
    ]


def left_out(items) -> set[str]:
    """What a run leaves out of a seeded choice. `@pytest.mark.share(x)`: of the function's n cases 0.08 * x * n stay, one at least, none for x = 0.
    Of any function, as many as take PER_FUNCTION seconds by tests/durations.txt: where one case takes longer, it stays with that probability."""
    functions, seconds, out = {}, durations.read(), set()
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in functions.items():
        draw, kept, mark = random.Random(SEED + name), len(cases), cases[0].get_closest_marker("share")
        if mark:
            kept = max(1, round(0.08 * mark.args[0] * kept)) if mark.args[0] else 0
        if kept * seconds.get(name, 0) > PER_FUNCTION:
            kept = int(PER_FUNCTION / seconds[name] + draw.random())
        out |= {case.nodeid for case in draw.sample(cases, len(cases) - kept)}
    return out


def pytest_collection_modifyitems(config, items) -> None:
    if not FULL and not any("::" in argument for argument in config.args):  # who names a test gets all of its cases
        out = left_out(items)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
        items[:] = [item for item in items if item.nodeid not in out]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def generous(monkeypatch):
    """K "auto" drafts in the tests of laws, too: a text of three tokens has nothing to spend on it, a batch of thousands of rows would gain nothing, and
    the models that draft for these targets cost half as much or more."""
    begin = AutoSchedule.__init__
    monkeypatch.setattr(Budget, "SHARE", 1e4)
    monkeypatch.setattr(RoundCost, "PER_ROW", 0.0)
    monkeypatch.setattr(AutoSchedule, "__init__", lambda self, most, ratio, *more: begin(self, most, 0.0, *more))


@pytest.fixture(params=[Law, lambda scores: LazyLaw(scores, [])], ids=["tensors", "host"])
def both_ways(request, monkeypatch):
    """Verdicts as tensors on any device, and row by row on the host."""
    monkeypatch.setattr("tests.test_enumeration.law_of", request.param)


@pytest.fixture
def strict():
    """A model that falls back to eager passes would pass tests of compiled ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield
