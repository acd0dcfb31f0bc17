"""`hf-specdec export`: a target and its draft for vLLM."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import typer

from .common import check_folder, refuse_compressed, stored_config

EMBEDDED_FOLDER = '"$(python -c "from hf_specdec.bench.embedded import embedded_folder; print(embedded_folder())")"'


def export(draft: str, target: str, out: Path, k: int | None, dtype: str) -> None:
    from ..bench.embedded import EMBEDDED, load_model
    from ..bench.terminal import working
    from ..training.export import CONFIG, LOOKUP, check
    from ..training.export import export as write

    check_folder(out, "--out")
    check(draft, out, k)
    for name in (draft, target):
        refuse_compressed(name, stored_config(name), "vLLM does not read that; save what from_pretrained(..., quantization_config=MXConfig(dequantize=True)) gives")
    model = None if draft == LOOKUP else load_model(target, dtype)
    with working(f"Writing to {out} ..."):
        config = write(draft, model, out, k)
    typer.echo(json.dumps(config))
    typer.echo(f"Layout written from vLLM's documentation and source, not loaded here. To serve it:\n"
               f"vllm serve {EMBEDDED_FOLDER if target == EMBEDDED else shlex.quote(target)} --speculative-config \"$(cat {shlex.quote(str(out / CONFIG))})\"", err=True)
