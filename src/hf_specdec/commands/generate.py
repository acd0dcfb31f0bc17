"""`hf-specdec generate`: one answer, as text or as JSON with the trace."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rich.console import Console

from ..hints import many
from ..viz.highlights import Highlighter
from ..viz.text import visible
from .common import apply_mx, check_length, read_prompt
from .speculation import Work
from .verdict import hint


def generate(work: Work, prompt: str | None, file: Path | None, as_json: bool) -> None:
    from .. import enable
    from ..bench.arms import columns_before, padded
    from ..bench.embedded import EMBEDDED, load_target
    from ..bench.prompts import Prompt
    from ..registry import shipped

    work.check()
    text = read_prompt(prompt, file)
    model, tokenizer = load_target(work.target, work.dtype, encoder_decoders=True)
    apply_mx(model, work.mx, work.target)
    enable(model)
    assistant, _ = work.load_draft(model, tokenizer)
    ids = Prompt("prompt", "prompt", text, chat=not work.raw).ids(tokenizer)
    check_length(model, ids, work.max_new_tokens)
    inputs = padded(model, [ids])
    beams = (model.generation_config.num_beams or 1) > 1  # what they will be is known at the end
    streamer = None if as_json or beams or not sys.stdout.isatty() else Highlighter(tokenizer, Console(highlight=False))

    begin = time.perf_counter()
    out = model.generate(
        **inputs,
        max_new_tokens=work.max_new_tokens,
        assistant_model=assistant,
        speculative=work.speculation,
        streamer=streamer, tokenizer=tokenizer,  # the latter for stop strings of the model's own generation config
        return_dict_in_generate=True,
        **work.sampling,
    )
    seconds, trace = time.perf_counter() - begin, out.speculation
    tokens = out.sequences[0, columns_before(model, inputs) :].tolist()
    answer = tokenizer.decode(tokens, skip_special_tokens=True)
    if as_json:
        print(json.dumps({"text": answer, "tokens": tokens, "seconds": seconds, "speculation": json.loads(trace.to_json())}))
        return
    if streamer is None:
        print(visible(answer) if sys.stdout.isatty() else answer)
    rate = f"acceptance rate {trace.acceptance_rate:.0%}" if trace.proposed else "nothing was drafted"
    print(f"{many(len(tokens), 'token')}, {len(tokens) / seconds:.1f} tokens/s, {many(trace.target_calls, 'target forward')}, "
          f"block efficiency {trace.block_efficiency:.2f}, {rate}, lossless: {trace.lossless}", file=sys.stderr)
    if said := hint(trace, ids, tokens, shipped() if work.target == EMBEDDED else []):
        print(said, file=sys.stderr)
