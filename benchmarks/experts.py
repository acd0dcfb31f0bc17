"""Mixtures of experts (MoE): what a pass costs in tiles and MX formats, and what speculation makes of it.

    OMP_NUM_THREADS=2 python benchmarks/experts.py --layer          # one layer's experts for one token, beside a plain read of as many bytes
    OMP_NUM_THREADS=2 python benchmarks/experts.py [--shape qwen3_moe gpt_oss ...] [--routing apart alike] [--dtype float32] [--compile] [--k 3 7]

Layers of the sizes of these models, fewer of them, random weights. How many experts the tokens of a pass need between them decides what speculation costs, and random weights
are no guide to it: with --routing apart tokens choose nearly independently of one another (embeddings large beside what attention adds), the worst case; with alike neighbours
choose much the same (embeddings as they begin). Trained models lie between. The arms take turns in one process: plain generate and prompt passes of the stock
model, in tiles (the same numbers), in MXFP6 with a head in MXINT8, and in MXFP4 experts with everything else in tiles, which is how gpt-oss was published. Acceptance is
SIMULATED: at each place a draft that costs nothing proposes the arm's own next token with probability --rate, else another one; the passes, which read the experts that any
of their tokens needs, cost what they cost. Medians; every text is compared with the arm's own plain text, with --compile with the compiled one of which no draft was accepted (random weights: in bfloat16 near-ties fork where a product depends
on what is around it, as the stock model's do). Ends with exit code 1 where one differs that is float32's, or in tiles.
"""

from __future__ import annotations

import argparse
import copy
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
from hf_specdec.mx.experts import ExpertMatrix
from hf_specdec.mx.kernels import cpu
from hf_specdec.proposal import Proposal
from hf_specdec.theory import expected_tokens

VOCAB, WIDTHS, PROMPT = 32_000, (1, 2, 4, 8), 256
SHAPES = {
    "qwen3_moe": ("Qwen3-30B-A3B, 3 of 48 layers", dict(hidden_size=2048, num_hidden_layers=3, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
                                                        num_experts_per_tok=8, moe_intermediate_size=768)),
    "gpt_oss": ("gpt-oss-20b, 2 of 24 layers", dict(hidden_size=2880, intermediate_size=2880, num_hidden_layers=2, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
                                                   num_local_experts=32, num_experts_per_tok=4)),
    "olmoe": ("OLMoE-1B-7B, 6 of 16 layers", dict(hidden_size=2048, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=16,
                                                 num_experts=64, num_experts_per_tok=8)),
}
LAYERS = ((8, 128), 1536, 2048), ((4, 32), 5760, 2880), ((8, 64), 1024, 1024)  # experts that a token chooses, of how many; outputs and inputs
LAYER_FORMATS = ("mxfp6_e2m3", "mxfp4_e2m1", "bf16")
ARMS = {
    "stock": lambda model: model,
    "tiles": mx.to_tiles,
    "MXFP6": lambda model: mx.compress(model, "mxfp6_e2m3", lm_head="mxint8", measure=False),
    "MXFP6, rounded": lambda model: mx.compress(model, "mxfp6_e2m3", lm_head="mxint8", measure=False, activations="mxint8"),
    "MXFP4 experts": lambda model: mx.compress(model, "bf16", lm_head="bf16", measure=False, layer_formats={"experts": "mxfp4_e2m1"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--routing", nargs="+", choices=("apart", "alike"), default=["apart", "alike"])
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--compile", action="store_true", help="compiled passes in speculation (after a warm-up that is not timed)")
    parser.add_argument("--rate", type=float, default=0.8)
    parser.add_argument("--k", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layer", action="store_true", help="only how fast one projection of a layer's experts is read")
    given = parser.parse_args()
    console, wrong = Console(width=170), 0
    if given.layer:
        console.print(layers())
        return
    for shape, routing in ((shape, routing) for shape in given.shape for routing in given.routing):
        arms = built(shape, routing, given)
        title = f"{SHAPES[shape][0]}, routing {routing}: 8 tokens need {needed(next(iter(arms.values()))):.0f} experts a layer"
        costs, prompts = passes(arms, given)
        plain, ours, same = generated(arms, given)
        table = Table(title=f"{title}; {given.dtype}{', speculation compiled' if given.compile else ''}, acceptance SIMULATED at {given.rate}; tokens per round at most "
                            + ", ".join(f"K = {k}: {expected_tokens(given.rate, k):.2f}" for k in given.k))
        for name in ("arm", "GiB", "plain, over stock", f"prompt of {PROMPT}", *(f"T({width}) / T(1)" for width in WIDTHS[1:]), *(f"K = {k}, over its plain" for k in given.k),
                     *(f"K = {k}, over stock" for k in given.k), "= its plain"):
            table.add_column(name)
        for name in arms:
            own, stock = statistics.median(plain[name]), statistics.median(plain["stock" if "stock" in arms else name])
            fast = [statistics.median(ours[name, k]) for k in given.k]
            texts = given.repetitions * len(given.k)
            table.add_row(name, f"{size_of(arms[name]):.1f}", f"{stock / own:.2f}x", f"{prompts['stock' if 'stock' in arms else name] / prompts[name]:.2f}x",
                          *(f"{costs[name][width] / costs[name][1]:.2f}" for width in WIDTHS[1:]), *(f"{own / each:.2f}x" for each in fast),
                          *(f"{stock / each:.2f}x" for each in fast), f"{same[name]}/{texts}")
            wrong += (texts - same[name]) * (given.dtype == "float32" or name == "tiles")
        console.print(table)
        del arms
    sys.exit(int(wrong > 0))


@torch.no_grad()
def layers() -> Table:
    """Of a projection: the bytes per second of the experts that one token has chosen, over those of a plain read of as many bytes, in turns; medians of 50."""
    table = Table("experts", "inputs x outputs of each", *LAYER_FORMATS, title="one token in bfloat16: speed of its experts' weights over a plain read's, and their largest error over sum |x||w|")
    for (chosen, count), n, k in LAYERS:
        weight, x, cells = torch.randn(count * n, k).to(torch.bfloat16), torch.randn(1, k).to(torch.bfloat16), []
        for name in LAYER_FORMATS:
            matrix = ExpertMatrix(k, count * n, name, "meta", experts=count)
            matrix.set_packed(mx.quantize(weight.clone(), name))
            words = (matrix.weight.numel() + matrix.weight_scale.numel()) * chosen // count // 8
            memory, seconds = torch.zeros(20 * words, dtype=torch.int64), {"experts": [], "read": []}
            for turn in range(50):
                index = torch.randperm(count)[None, :chosen]
                begin = perf_counter()
                out = matrix(x, index)
                seconds["experts"].append(perf_counter() - begin)
                begin = perf_counter()
                cpu.library().mx_read(memory.data_ptr() + turn % 20 * words * 8, words, torch.get_num_threads())
                seconds["read"].append(perf_counter() - begin)
            exact = torch.stack([matrix.expert(i, torch.float32).double() for i in index[0].tolist()])
            error = ((out.double() - exact @ x[0].double()).abs() / (exact.abs() @ x[0].double().abs())).max()
            cells.append(f"{statistics.median(seconds['read']) / statistics.median(seconds['experts']):.2f} ({error:.0e})")
        table.add_row(f"{chosen} of {count}", f"{k} x {n}", *cells)
    return table


def built(shape: str, routing: str, given: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape, vocab_size=VOCAB, pad_token_id=0, bos_token_id=None, eos_token_id=None, **SHAPES[shape][1])
    stock = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, given.dtype)).eval()
    if routing == "apart":
        stock.get_input_embeddings().weight.data *= 50  # of a deviation of 0.02
    arms = {name: hf_specdec.enable(ARMS[name](copy.deepcopy(stock) if name != "stock" else stock)) for name in given.arms}
    if given.compile:
        for model in arms.values():
            hf_specdec.warmup(model, config={"compile": True}, nodes=max(given.k))
    return arms


@torch.no_grad()
def needed(model) -> float:
    """Experts that eight neighbouring tokens choose between them, in the mean over the layers."""
    found = []
    hooks = [layer.mlp.experts.register_forward_pre_hook(lambda module, args: found.append(args[1][-8:].unique().numel())) for layer in model.model.layers]
    model(input_ids=torch.randint(1, VOCAB, (1, 100)))
    for hook in hooks:
        hook.remove()
    return statistics.mean(found)


def size_of(model) -> float:
    return sum(each.numel() * each.element_size() for each in model.parameters()) / 2**30


@torch.no_grad()
def passes(arms: dict, given: argparse.Namespace) -> tuple[dict, dict]:
    """Median seconds of a pass over each of WIDTHS tokens behind 200 others, and of a prompt's, by arm; in turns."""
    texts = [torch.randint(1, VOCAB, (200,)).tolist() for _ in range(given.repetitions + 2)]
    seconds = {name: {width: [] for width in WIDTHS} for name in arms}
    prompts = {name: [] for name in arms}
    for text in texts:
        for name, model in arms.items():
            begin = perf_counter()
            model(input_ids=torch.tensor([text + text[: PROMPT - 200]]), logits_to_keep=1)
            prompts[name].append(perf_counter() - begin)
            cached = CachedModel(model, 400, compile=given.compile)
            for width in WIDTHS:
                cached.score([text[:-1]])  # so that the pass after it finds just one token that is not cached
                cached.commit([1])
                begin = perf_counter()
                cached.score([text], Proposal.from_lists([torch.randint(1, VOCAB, (width - 1,)).tolist()], model.device))
                seconds[name][width].append(perf_counter() - begin)
                cached.crop([len(text) - 2])
    middle = statistics.median
    return {name: {width: middle(own) for width, own in each.items()} for name, each in seconds.items()}, {name: middle(own) for name, own in prompts.items()}


def generated(arms: dict, given: argparse.Namespace) -> tuple[dict, dict, dict]:
    """Seconds of plain generate by arm, and of speculation by arm and K; how many texts are the arm's own plain text."""
    plain, ours, same = {name: [] for name in arms}, {(name, k): [] for name in arms for k in given.k}, dict.fromkeys(arms, 0)
    for repetition in range(given.repetitions):
        ids = torch.randint(1, VOCAB, (1, 64))
        settings = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=given.new_tokens, min_new_tokens=given.new_tokens, pad_token_id=0)
        for name, model in arms.items():
            begin = perf_counter()
            text = model.generate(ids, **settings)
            plain[name].append(perf_counter() - begin)
            if given.compile:  # whose bits may be others: the text of which no draft was accepted
                wrong = SimulatedTable(text[:, 64:].tolist(), 0.0, seed=0)
                text = model.generate(ids, speculative={"compile": True}, assistant_model=wrong, num_assistant_tokens=given.k[0], **settings)
            for k in given.k:
                draft = SimulatedTable(text[:, 64:].tolist(), given.rate, seed=repetition)
                begin = perf_counter()
                out = model.generate(ids, speculative={"compile": given.compile}, assistant_model=draft, num_assistant_tokens=k, **settings)
                ours[name, k].append(perf_counter() - begin)
                same[name] += int(torch.equal(out, text))
    return plain, ours, same


if __name__ == "__main__":
    main()
