"""Long context: the time of a round outside attention, from 256 to 8,192 tokens. It is to stay flat.

    python benchmarks/long_context.py
    python benchmarks/long_context.py --draft suffix_automaton --batch 2

A small random model (4 layers, width 256), because what is looked for is work of the loop that grows with the text, and a small model hides
none. "attention" is torch's attention and nothing else: writing the cache, masks and positions are outside. The prompt pass is left out.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

from hf_specdec import enable
from hf_specdec.loop import SpeculativeLoop

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
VOCABULARY = 64  # few enough that a random text repeats itself, and lookups propose
spent = {"attention": 0.0, "rounds": []}


def small(kv_heads: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=kv_heads,
                         vocab_size=VOCABULARY, max_position_embeddings=16384, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def timed_attention(*args, **kwargs):
    begin = time.process_time()
    try:
        return AttentionInterface()["sdpa"](*args, **kwargs)
    finally:
        spent["attention"] += time.process_time() - begin


def rounds(model, ids: torch.Tensor, tokens: int, **options) -> tuple[list[float], list[float]]:
    """Milliseconds per round after the first, and of them in attention."""
    whole, inside, original = [], [], SpeculativeLoop.round

    def timed(loop):
        spent["attention"], begin = 0.0, time.process_time()
        original(loop)
        whole.append(1000 * (time.process_time() - begin))
        inside.append(1000 * spent["attention"])

    SpeculativeLoop.round = timed
    try:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0, **options)
    finally:
        SpeculativeLoop.round = original
    return whole[1:], inside[1:]


def main(
    lengths: Annotated[list[int], typer.Option(help="Tokens of the prompt.")] = list(LENGTHS),
    draft: str = "prompt_lookup",
    k: int = 7,
    batch: int = 1,
    tokens: int = 96,
    repetitions: int = 3,
    kv_heads: int = 4,
    out: Path | None = None,
):
    """Print milliseconds of processor time per round, medians."""
    torch.set_num_threads(1)
    AttentionInterface.register("timed", timed_attention)
    AttentionMaskInterface.register("timed", AttentionMaskInterface()["sdpa"])
    model = enable(small(kv_heads))
    model.set_attn_implementation("timed")
    generator = torch.Generator().manual_seed(0)
    prompts = {length: torch.randint(1, VOCABULARY, (batch, length), generator=generator) for length in lengths}
    options = {"speculative": {"draft": draft, "seed": 0}, "num_assistant_tokens": k}
    rounds(model, prompts[lengths[0]], tokens, **options)
    whole, inside = {length: [] for length in lengths}, {length: [] for length in lengths}
    for _ in range(repetitions):
        for length, ids in prompts.items():
            for kept, measured in zip((whole, inside), rounds(model, ids, tokens, **options)):
                kept[length] += measured
    table = Table("tokens", "round", "attention", "outside", "over the shortest", title=f"ms per round: {draft}, K={k}, {batch} rows")
    result, base = {}, None
    for length in lengths:
        outside = statistics.median(a - b for a, b in zip(whole[length], inside[length]))
        base = base or outside
        result[length] = {"round": statistics.median(whole[length]), "attention": statistics.median(inside[length]), "outside": outside}
        table.add_row(f"{length:,}", *(f"{value:.2f}" for value in result[length].values()), f"{outside / base:.2f}x")
    Console(highlight=False).print(table)
    if out is not None:
        out.write_text(json.dumps({"torch": torch.__version__, "draft": draft, "k": k, "batch": batch, "ms": result}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
