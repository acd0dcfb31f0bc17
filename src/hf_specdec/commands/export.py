"""`hf-specdec export`: a target and its draft for vLLM."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import typer

from .common import check_folder


def export(draft: str, target: str, out: Path, k: int, dtype: str) -> None:
    from ..bench.embedded import load_model
    from ..training.export import CONFIG, LOOKUP, check
    from ..training.export import export as write

    check_folder(out, "--out")
    check(draft, out, k)
    config = write(draft, None if draft == LOOKUP else load_model(target, dtype), out, k)
    typer.echo(json.dumps(config))
    typer.echo(f"Layout written from vLLM's documentation and source, not loaded here. To serve it:\n"
               f"vllm serve {shlex.quote(target)} --speculative-config \"$(cat {shlex.quote(str(out / CONFIG))})\"", err=True)
