"""What several files of these tests begin with."""

from __future__ import annotations

import pytest

from hf_specdec.mx.kernels import cpu


@pytest.fixture(params=["kernels", "torch"])
def kernels(request, monkeypatch):
    """With the kernels, and as on a machine that has none."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "library", lambda: None)
    elif cpu.library() is None:
        pytest.skip("no compiled kernels here")
    return request.param
