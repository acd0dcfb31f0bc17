"""The attention kernel beside torch's scaled_dot_product_attention: the same queries, keys and values, a cache with room to spare, a
causal mask, in turns; and how far the two are apart.

    python benchmarks/attention.py --threads 1

SmolLM2-135M has 9 query heads on 3 key heads of 64 numbers, Llama-2-7B 32 on 32 of 128. Ratios above 1: the kernel is faster.
"""

from __future__ import annotations

import statistics
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.bench.meter import CLOCKS
from hf_specdec.bench.terminal import counting
from hf_specdec.mx.attention import rows_attention

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Llama-2-7B": (32, 32, 128)}
PASSES = ((1, 1, 128), (1, 1, 512), (1, 1, 2048), (1, 2, 512), (1, 4, 512), (1, 6, 512), (1, 8, 512), (1, 16, 512), (1, 61, 512), (8, 1, 300), (8, 4, 300))
LAYERS = 6  # as many caches, one after the other, so that none stays in the processor's own


def sdpa(query, key, value, mask):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


def case(shape: tuple[int, int, int], rows: int, queries: int, slots: int, dtype: torch.dtype):
    """Queries [B, H, Q, D], and per layer keys and values [B, G, S, D] in a cache of 64 slots more; the mask of a chain."""
    heads, groups, size = shape
    caches = [[torch.randn(rows, groups, slots + 64, size, dtype=dtype)[:, :, :slots] for _ in range(2)] for _ in range(LAYERS)]
    mask = torch.zeros(rows, 1, queries, slots, dtype=dtype)
    mask[..., slots - queries :] = torch.full((queries, queries), torch.finfo(dtype).min, dtype=dtype).triu(1)
    return torch.randn(rows, queries, heads, size, dtype=dtype).transpose(1, 2), caches, mask


@torch.inference_mode()
def main(
    threads: int = 1,
    repetitions: int = 7,
    clock: Annotated[str, typer.Option(help=f"one of {sorted(CLOCKS)}")] = "cpu",
):
    """Print microseconds per layer of both, the ratio of their medians, and the largest difference of their outputs."""
    if clock not in CLOCKS:
        raise typer.BadParameter(f"--clock {clock}: choose one of {sorted(CLOCKS)}.")
    torch.set_num_threads(threads)
    table = Table("heads of", "dtype", "rows", "queries", "slots", "torch, us", "kernel, us", "ratio", "largest difference", title=f"{threads} threads, {clock}")
    dtypes = (torch.float32, torch.bfloat16)
    with counting("Measuring", len(SHAPES) * len(PASSES) * len(dtypes)) as step:
        for name, shape in SHAPES.items():
            for dtype in dtypes:
                for rows, queries, slots in PASSES:
                    query, caches, mask = case(shape, rows, queries, slots, dtype)
                    spent = {sdpa: [], rows_attention: []}
                    for _ in range(repetitions):
                        for function, times in spent.items():
                            begin = CLOCKS[clock]()
                            for key, value in caches:
                                function(query, key, value, mask)
                            times.append((CLOCKS[clock]() - begin) / LAYERS * 1e6)
                    theirs, ours = (statistics.median(times) for times in spent.values())
                    apart = (sdpa(query, *caches[0], mask).transpose(1, 2).float() - rows_attention(query, *caches[0], mask).float()).abs().max()
                    table.add_row(name, str(dtype)[6:], str(rows), str(queries), str(slots), f"{theirs:.0f}", f"{ours:.0f}", f"{theirs / ours:.2f}", f"{apart:.1e}")
                    step(f"{name}, {dtype}, {rows} x {queries}, {slots} slots")
    Console(highlight=False, width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
