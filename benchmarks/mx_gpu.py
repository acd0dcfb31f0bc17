"""How fast the MX kernel for GPUs is beside a bfloat16 linear layer and beside a copy, on the shapes of Llama-2-7B.

    python benchmarks/mx_gpu.py --json mx_gpu.json

Every arm has enough copies of its weight to outgrow the L2 cache fourfold; one CUDA graph goes over all of them, and the arms'
graphs are replayed in turn. A time is the median over the rounds, per call; the error is the largest |y - exact| / sum |x| |w|.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch
import torch.nn.functional as F

SHAPES = [(4096, 4096), (11008, 4096), (4096, 11008), (32000, 4096)]  # N, K
FORMATS = {"mxfp6_e2m3": (6, 2, 3, 1), "mxfp6_e3m2": (6, 3, 2, 3), "mxfp4_e2m1": (4, 2, 1, 1)}  # bits, exponent, mantissa, bias


def decoded(codes: torch.Tensor, scales: torch.Tensor, name: str) -> torch.Tensor:
    """float32 `[N, K]`: what the packed codes and the scale bytes mean."""
    bits, exponent_bits, mantissa_bits, bias = FORMATS[name]
    word = (codes.int().unsqueeze(-1) >> torch.arange(8, dtype=torch.int32, device=codes.device) & 1).view(len(codes), -1, bits)
    code = (word << torch.arange(bits, dtype=torch.int32, device=codes.device)).sum(-1)
    exponent, mantissa = code >> mantissa_bits & 2**exponent_bits - 1, code & 2**mantissa_bits - 1
    significand = (mantissa + torch.where(exponent > 0, 2**mantissa_bits, 0)) * (1 - 2 * (code >> bits - 1))
    power = exponent.clamp(min=1) - bias - mantissa_bits + scales.int().repeat_interleave(32, 1) - 127
    return torch.ldexp(significand.float(), power)


def graph_of(call, copies: list) -> torch.cuda.CUDAGraph:
    """One call on each copy, after three that compile and warm up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call(copies[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in copies:
            call(copy)
    return graph


def microseconds(graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]], rounds: int) -> dict[str, float]:
    """The median time of a call of each arm; the arms take turns."""
    times = {arm: [] for arm in graphs}
    for number in range(rounds + 3):
        for arm, (graph, calls) in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number >= 3:
                times[arm].append(start.elapsed_time(end) * 1000 / calls)
    return {arm: statistics.median(values) for arm, values in times.items()}


def measured(kernel, n: int, k: int, rows_list: list[int], rounds: int, room: int) -> list[dict]:
    """One entry per arm and number of rows. `room`: bytes of weights that an arm goes over."""
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    arms = {"bf16": (weight.double(), [weight.clone() for _ in range(-(-room // (2 * n * k)))], F.linear, 2 * n * k)}
    for name, (bits, *_) in FORMATS.items():
        codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, device="cuda")
        scales = torch.randint(118, 124, (n, k // 32), dtype=torch.uint8, device="cuda")
        size = codes.numel() + scales.numel()
        copies = [kernel.to_planes(codes, scales, name) for _ in range(-(-room // size))]
        call = lambda x, planes, name=name: kernel.linear(x, planes, name)  # noqa: E731
        arms[name] = (decoded(codes, scales, name).double(), copies, call, size)
    found = []
    for rows in rows_list:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        graphs, errors = {}, {}
        for arm, (exact, copies, call, _) in arms.items():
            graphs[arm] = (graph_of(lambda copy, call=call: call(x, copy), copies), len(copies))
            y, terms = call(x, copies[-1]).double(), x.double().abs() @ exact.abs().T
            errors[arm] = ((y - x.double() @ exact.T).abs() / terms).max().item()
        for arm, time in microseconds(graphs, rounds).items():
            entry = {"n": n, "k": k, "rows": rows, "arm": arm, "us": time, "error": errors[arm]}
            found.append(entry | {"GB/s": arms[arm][3] / time / 1000})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", help="write the figures here, too")
    for setting in ("programs", "tile_n", "stages"):
        parser.add_argument(f"--{setting}", type=int, help="instead of the kernel's own")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device, and torch sees none.")
    from hf_specdec.mx.kernels import triton_mx as kernel

    for setting in ("programs", "tile_n", "stages"):
        setattr(kernel, setting.upper(), getattr(options, setting) or getattr(kernel, setting.upper()))
    properties, big = torch.cuda.get_device_properties(0), torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    copy = microseconds({"copy": (graph_of(lambda other: other.copy_(big), [big.clone()]), 1)}, options.rounds)["copy"]
    print(f"{properties.name}, torch {torch.__version__}, copy {2 * big.numel() / copy / 1000:.0f} GB/s (read and written)")
    found = []
    for n, k in SHAPES:
        found += measured(kernel, n, k, options.rows, options.rounds, max(4 * properties.L2_cache_size, 1 << 28))
        for entry in [entry for entry in found if (entry["n"], entry["k"]) == (n, k)]:
            faster = next(e["us"] for e in found if e["arm"] == "bf16" and all(e[key] == entry[key] for key in ("n", "k", "rows")))
            ratio = faster / entry["us"]
            print("{n:6} x {k:5}  M {rows:2}  {arm:10} {us:8.1f} us  {GB/s:6.0f} GB/s  error {error:.1e}".format(**entry), f" {ratio:.2f}x")
    result = {"device": properties.name, "torch": torch.__version__, "copy_GB/s": 2 * big.numel() / copy / 1000, "figures": found}
    text = json.dumps(result, indent=1)
    print(text) if options.json is None else open(options.json, "w", encoding="utf-8").write(text)


if __name__ == "__main__":
    main()
