"""Models whose layers carry states (Mamba 2, gated delta rules, short convolutions), or whose cache is of its own kind: what a pass costs, and what speculation makes of it.

    OMP_NUM_THREADS=2 python benchmarks/states.py [--shape qwen3_5 lfm2 ...] [--dtype bfloat16] [--tiles] [--compile] [--rate 0.8] [--batch 4]

Shapes of small models of these families, random weights. Acceptance is SIMULATED: at each place a draft that costs nothing proposes the target's own next token
with probability --rate, else another one. The cost of the passes, with what is fed once more after a rejection, is real. Plain generate and speculation take turns;
medians; every text is compared with plain generate's; with --compile with the compiled one of which no draft was accepted, whose bits may be others. In float32 the script ends with exit code 1 where one differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

import hf_specdec
from hf_specdec import mx
from hf_specdec.bench.simulated import SimulatedTable
from hf_specdec.cached_model import CachedModel
from hf_specdec.proposal import Proposal
from hf_specdec.theory import expected_tokens

VOCAB, WIDTHS = 32_000, (1, 2, 4, 8, 16)
SHAPES = {
    "qwen3_5": ("qwen3_5_text", dict(hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
                                     linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
                                     layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6)),
    "lfm2": ("lfm2", dict(hidden_size=1024, intermediate_size=4608, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=8, block_auto_adjust_ff_dim=False,
                          layer_types=["conv", "conv", "full_attention"] * 5 + ["conv"])),
    "granite": ("granitemoehybrid", dict(hidden_size=768, intermediate_size=2048, shared_intermediate_size=2048, num_hidden_layers=32, num_attention_heads=12,
                                         num_key_value_heads=4, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=48, mamba_d_head=32, mamba_d_state=128,
                                         layer_types=(["mamba"] * 7 + ["attention"]) * 4)),
    "deepseek_v4": ("deepseek_v4", dict(hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=1, head_dim=128,
                                        q_lora_rank=256, o_lora_rank=128, o_groups=4, n_routed_experts=16, num_experts_per_tok=4, index_n_heads=16, index_head_dim=64,
                                        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"] * 6)),
    "minimax_m3": ("minimax_m3_vl_text", dict(hidden_size=1024, intermediate_size=512, dense_intermediate_size=2048, shared_intermediate_size=512, num_hidden_layers=12,
                                              num_attention_heads=16, num_key_value_heads=4, head_dim=64, rotary_dim=32, num_local_experts=16, num_experts_per_tok=4,
                                              index_head_dim=64, layer_types=["full_attention"] + ["minimax_m3_sparse"] * 11)),
    "rwkv": ("rwkv", dict(hidden_size=768, attention_hidden_size=768, num_hidden_layers=12, context_length=1024, rescale_every=0)),
    "xlstm": ("xlstm", dict(hidden_size=768, embedding_dim=768, num_hidden_layers=12, num_blocks=12, num_heads=4)),
    "minimax": ("minimax", dict(hidden_size=1024, intermediate_size=512, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
                                num_local_experts=16, num_experts_per_tok=4)),
    "openai_gpt": ("openai-gpt", dict(n_positions=512)),  # 117M: the model itself
    "llama": ("llama", dict(hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=4)),  # none, to compare
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"),
                        help="in bfloat16 texts of random weights fork, and what is proposed is no longer right")
    parser.add_argument("--tiles", action="store_true", help="weights in the kernels' tiles")
    parser.add_argument("--compile", action="store_true", help="compiled passes (after a warm-up that is not timed); plain generate stays as it is")
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--k", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--batch", type=int, default=1, help="rows, each shorter than the one before")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    table = Table(title=f"{given.dtype}{', tiles' if given.tiles else ''}{', compiled' if given.compile else ''}, acceptance SIMULATED at {given.rate}; tokens per round without rejections' cost: "
                        + ", ".join(f"K = {k}: {expected_tokens(given.rate, k):.2f}" for k in given.k))
    for name in ("shape", *(f"T({width}) / T(1)" for width in WIDTHS[1:]), *(f"K = {k}, over plain" for k in given.k), "block efficiency", "= plain"):
        table.add_column(name)
    differ = 0
    console = Console(width=170)
    for name in given.shape:
        console.print(f"{name} ...")
        model = shaped(name, given)
        costs = passes(model, given.repetitions + 2, given.compile)
        ratios, blocks, same, texts = compared(model, given)
        differ += texts - same
        table.add_row(name, *(f"{costs[width] / costs[1]:.2f}" for width in WIDTHS[1:]), *(f"{ratio:.2f}x" for ratio in ratios), " / ".join(blocks), f"{same}/{texts}")
    console.print(table)
    sys.exit(int(given.dtype == "float32" and differ > 0))


def shaped(name: str, given: argparse.Namespace):
    kind, settings = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, pad_token_id=0, bos_token_id=None, eos_token_id=None, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, given.dtype)).eval()
    return hf_specdec.enable(mx.to_tiles(model) if given.tiles else model)


@torch.no_grad()
def passes(model, repetitions: int, compile: bool) -> dict[int, float]:
    """Median seconds of a pass over each of WIDTHS tokens behind 200 others, in turns."""
    if compile:
        hf_specdec.warmup(model, config={"compile": True}, nodes=WIDTHS[-1] - 1)
    cached, text, seconds = CachedModel(model, 400, compile=compile), torch.randint(1, VOCAB, (200,)).tolist(), {width: [] for width in WIDTHS}
    for _ in range(repetitions):
        for width in WIDTHS:
            cached.score([text[:-1]])  # so that the pass after it finds just one token that is not cached
            cached.commit([1])
            begin = perf_counter()
            cached.score([text], Proposal.from_lists([text[: width - 1]], model.device))
            seconds[width].append(perf_counter() - begin)
            cached.crop([len(text) - 2])
    return {width: statistics.median(own) for width, own in seconds.items()}


def compared(model, given: argparse.Namespace) -> tuple[list[float], list[str], int, int]:
    """Per K plain generate's median seconds over ours, and the block efficiency; how many texts are plain generate's, and of how many."""
    ids, mask = torch.randint(1, VOCAB, (given.batch, 64)), torch.ones((given.batch, 64), dtype=torch.long)
    for b in range(given.batch):
        ids[b, : 3 * b] = mask[b, : 3 * b] = 0
    settings = dict(attention_mask=mask, do_sample=False, max_new_tokens=given.new_tokens, min_new_tokens=given.new_tokens, pad_token_id=0)
    seconds, blocks, same = {k: [] for k in (0, *given.k)}, {}, 0
    for repetition in range(given.repetitions):
        begin = perf_counter()
        plain = model.generate(ids, **settings)
        seconds[0].append(perf_counter() - begin)
        if given.compile:
            wrong = SimulatedTable(plain[:, 64:].tolist(), 0.0, seed=0)
            plain = model.generate(ids, speculative={"compile": True}, assistant_model=wrong, num_assistant_tokens=given.k[0], **settings)
        for k in given.k:
            draft = SimulatedTable(plain[:, 64:].tolist(), given.rate, seed=repetition)
            begin = perf_counter()
            out = model.generate(ids, speculative={"compile": given.compile}, assistant_model=draft, num_assistant_tokens=k, return_dict_in_generate=True, **settings)
            seconds[k].append(perf_counter() - begin)
            same += int((out.sequences == plain).all(-1).sum())
            blocks.setdefault(k, []).append(out.speculation.block_efficiency)
    first = statistics.median(seconds[0])
    return [first / statistics.median(seconds[k]) for k in given.k], [f"{statistics.mean(own):.2f}" for own in blocks.values()], same, given.repetitions * len(given.k) * given.batch


if __name__ == "__main__":
    main()
