"""Row invariance: forks of speculative greedy decoding from plain greedy decoding in bfloat16 with row-invariant kernels.

    python benchmarks/row_invariance.py --prompts spec_bench.jsonl --prompts humaneval.jsonl --out forks.json
    python benchmarks/row_invariance.py --cost

Wanted: 0 forks. The file of the results is read first, and prompts that are in it are not run again. `--cost` times plain decoding
with torch's attention and with the row-invariant one, alternating.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console

from hf_specdec import enable, mx
from hf_specdec.bench.arms import generate_arm
from hf_specdec.bench.embedded import load_target
from hf_specdec.bench.forks import first_difference
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.report import save_json
from hf_specdec.bench.runner import environment
from hf_specdec.bench.terminal import counting
from hf_specdec.commands.common import load_draft, parse_k
from hf_specdec.compat import CACHE

console = Console(highlight=False)


def main(
    target: str = "smollm2",
    draft: str | None = None,
    k: str = "7",
    format: Annotated[str, typer.Option(help="Of the Linear layers: bf16 (as they are) or an MX format.")] = "bf16",
    max_new_tokens: int = 64,
    prompts: Annotated[list[str], typer.Option(help="As for `hf-specdec bench`; may be given several times.")] = ["shipped"],
    limit: int | None = None,
    threads: int | None = None,
    stock_attention: Annotated[bool, typer.Option(help="The control: torch's attention beside row-invariant layers.")] = False,
    cost: bool = False,
    out: Path | None = None,
):
    """Print the number of forks, each with its place; exit code 1 if there is one."""
    if threads is not None:
        torch.set_num_threads(threads)
    model, tokenizer = load_target(target, "bfloat16", "cpu")
    if format != "bf16":
        mx.compress(model, format, measure=False)
    mx.row_invariant(model)
    if cost:
        return _cost(model, out)
    if stock_attention:
        model.set_attn_implementation("sdpa")
    plain = generate_arm("plain", model)
    source = load_draft(draft, "bfloat16", model, tokenizer)
    ours = generate_arm("ours", enable(model), assistant_model=source, speculative=True, num_assistant_tokens=parse_k(k))
    done = json.loads(out.read_text(encoding="utf-8"))["prompts"] if out is not None and out.is_file() else {}
    chosen = {f"{Path(name).stem} {prompt.id}": prompt for name in prompts for prompt in load_prompts(name, limit)}
    settings = {"target": target, "draft": draft, "k": k, "format": format, "max_new_tokens": max_new_tokens, "sdpa": stock_attention}
    with counting("Comparing", len(chosen)) as step:
        for name, prompt in chosen.items():
            if name not in done:
                ids = prompt.ids(tokenizer)
                answer, text = ours.run([ids], max_new_tokens), plain.run([ids], max_new_tokens).tokens[0]
                done[name] = {"fork": first_difference(text, answer.tokens[0]), "tokens": len(text), "prompt": len(ids),
                              "accepted": answer.trace.accepted}
                if out is not None:
                    save_json({"environment": environment(model), **settings, "prompts": done}, out)
            step(f"{_forks(done)} forks")
    for name in chosen:
        if done[name]["fork"] is not None:
            console.print(f"{name}: differs from token {done[name]['fork'] + 1} on")
    tokens, accepted = (sum(done[name][key] for name in chosen) for key in ("tokens", "accepted"))
    console.print(f"{len(chosen)} prompts, {_forks(done)} forks; {tokens} tokens, {accepted} drafted ones accepted.")
    raise typer.Exit(1 if _forks(done) else 0)


def _forks(done: dict) -> int:
    return sum(entry["fork"] is not None for entry in done.values())


@torch.inference_mode()
def _cost(model, out: Path | None, steps: int = 8, rounds: int = 5) -> None:
    """Milliseconds per forward: one token at a context of 64 and 1,024, eight tokens there, and the prompt itself."""
    result = {}
    for context in (64, 1024):
        ids = torch.randint(0, model.config.vocab_size, (1, context))
        for width in (1, 8, context):
            times = {"sdpa": [], "hf_specdec_rows": []}
            for _ in range(rounds):
                for name, spent in times.items():
                    model.set_attn_implementation(name)
                    spent.append(_step(model, ids, width, steps if width < context else 1))
            medians = {name: 1000 * statistics.median(spent) for name, spent in times.items()}
            result[f"context {context}, width {width}"] = medians
            stock, own = medians.values()
            console.print(f"context {context}, width {width}: sdpa {stock:.2f} ms, row-invariant {own:.2f} ms, ratio {own / stock:.3f}")
    if out is not None:
        save_json({"environment": environment(model), "milliseconds": result}, out)


def _step(model, ids: torch.Tensor, width: int, steps: int) -> float:
    """Seconds per forward of `width` tokens behind `ids` (of `ids` alone if it is as wide), after one that does not count."""
    if width == ids.shape[1]:
        model(input_ids=ids[:, :64], use_cache=True)
        begin = perf_counter()
        model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return perf_counter() - begin
    cache = model(input_ids=ids[:, :-width], use_cache=True, logits_to_keep=1)[CACHE]
    spent = []
    for _ in range(steps + 1):
        begin = perf_counter()
        model(input_ids=ids[:, -width:], **{CACHE: cache}, use_cache=True)
        spent.append(perf_counter() - begin)
        cache.crop(-width)
    return statistics.median(spent[1:])


if __name__ == "__main__":
    typer.run(main)
