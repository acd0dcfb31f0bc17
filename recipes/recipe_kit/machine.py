"""The machine that a recipe runs on: as the options ask for it, and as the JSON names it."""

from __future__ import annotations

import argparse
import platform
from typing import Any

import torch
import transformers

import hf_specdec
from hf_specdec.hints import first_line

from .recipe import RecipeError


def use_machine(options: argparse.Namespace) -> None:
    """Obey --threads, and make a torch.device of --device; `RecipeError` if there is none."""
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise RecipeError(f"--device {options.device}: {first_line(error)}") from error


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(), "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "hf_specdec": hf_specdec.__version__,
    }  # fmt: skip
