"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import draft_name, dtype_name

Target = Annotated[str, typer.Argument(help="The model: smollm2 (the embedded one), a folder, or a hub id.")]
Draft = Annotated[
    str | None,
    typer.Option("--draft", callback=draft_name, help="What proposes tokens: prompt_lookup (default), mixture, ngram_recycling, recycling, suffix_automaton, "
                 "lookahead, jump_forward, uniform, compressed; a shipped drafter; a saved table or store; folder or hub id; A+B."),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads of torch; as many as it chooses without it.")]
K = Annotated[str, typer.Option("--k", help="Tokens drafted per round: 1..64, or auto (chosen as it runs).")]
KOfConfig = Annotated[str | None, typer.Option("--k", help="Tokens drafted per round: 1..64, or auto (chosen as it runs); without it what --config says, else auto.")]
MX = Annotated[str | None, typer.Option("--mx", help="Compress the target's weights first, to this format of compress --format; not without it.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Length of each answer in tokens, at most.")]
DType = Annotated[str, typer.Option("--dtype", callback=dtype_name, help="Numbers that the models compute with: float32, bfloat16, float16, or auto (the checkpoint's own).")]
Prompts = Annotated[
    str,
    typer.Option(
        "--prompts", help="shipped (three sets), one of them (code_edit, summary, chat), a .jsonl file, or hub:NAME[:SPLIT]."
    ),
]
MaxBatch = Annotated[int, typer.Option("--max-batch", min=1, help="Answers that are written at a time; more wait.")]
MaxQueue = Annotated[int, typer.Option("--max-queue", min=0, help="Requests that may wait; more are told to come again (429).")]
Key = Annotated[str | None, typer.Option("--api-key", envvar="HF_SPECDEC_API_KEY", help="Answer those alone that send it, as clients' api_key; everybody without it.")]
Cors = Annotated[list[str] | None, typer.Option("--cors", help="An origin whose pages may ask, * for all (repeatable); none without it.")]
