"""MX kernels against torch's own products, one layer at a time, on a CPU: time, share of the read bandwidth, and the error.

    python benchmarks/mx_cpu.py [--shapes 4096x4096 ...] [--rows 1 2 4 8 16 32] [--formats mxfp6_e2m3 ...] [--activations mxint8] [--json FILE]

In each repetition every contestant runs once, in turn, on weights that the caches cannot hold; medians are printed, so that
ratios stand although the machine is shared. "ours" is a layer as a model calls it, "kernel" its product alone, without the module around it. "torch" is
its product alone in bfloat16 (for "fp32", float32 weights in tiles, in float32, as the activations are then), and so are "int8" and "int4". "read" is the
time to read as many bytes as the MX layer has, on the same threads: "bandwidth" is its share of the layer's time and of the kernel's. With --activations, "rounded" is the same layer with its inputs rounded, and c(M)/c(1) is given for it, too; with --instructions that layer by each of them. "error" is the largest |y - y64| / sum |x||w| over all outputs, in float32, of the path that runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from hf_specdec.mx import MXLinear, kernel_info
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.kernels.instructions import INTEGERS, PRODUCTS

SHAPES = ("4096x4096", "11008x4096", "4096x11008", "32000x4096")  # of Llama-2-7B, outputs x inputs
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # "491520K"
COPIES_BYTES = max(96 * 2**20, int(CACHE.read_text(encoding="utf-8").strip("K\n")) * 1280 if CACHE.is_file() else 0)  # weights of each contestant, in several copies: beyond the last-level cache


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    print(kernel_info())
    results = []
    with torch.inference_mode():
        peak = dot_peak()
        print(f"on registers, all threads: {peak / 1e9:.0f} G multiply-adds/s" if peak else "The peak is not measured on this processor.")
        for shape in options.shapes:
            n, k = map(int, shape.split("x"))
            for name in options.formats:
                results += measure(n, k, name, options, peak)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"kernel": kernel_info(), "results": results}, file, indent=1)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 2, 4, 8, 16, 32))
    parser.add_argument("--formats", nargs="+", default=("mxfp6_e2m3",))
    parser.add_argument("--repetitions", type=int, default=31)
    parser.add_argument("--no-int", action="store_true", help="leave out torch's int8 and int4 kernels")
    parser.add_argument("--activations", help='"mxint8": measure the layers with rounded inputs, too, where the format goes with it')
    parser.add_argument("--instructions", nargs="+", help="the layers by each of these, too, and rounded ones with --activations (hf_specdec.mx.kernels.instructions)")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.instructions:  # others would be timed under their name
        there = {kind for family in (PRODUCTS, INTEGERS if options.activations else PRODUCTS) for kind in family.available(kernel_info()["path"])}
        if any(name not in there for name in options.instructions):
            parser.error(f"--instructions: of {', '.join(sorted(there)) or 'none'} here{'' if options.activations else ', without --activations'}.")
    return options


def measure(n: int, k: int, name: str, options, peak: float) -> list[dict]:
    dtype = torch.float32 if name == "fp32" else torch.bfloat16  # of the activations and of torch's product
    weight = (torch.randn(n, k) * 0.02).to(dtype)
    copies = max(2, COPIES_BYTES // (n * k))
    linear = torch.nn.Linear(k, n, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    layers = [MXLinear.from_linear(linear, name) for _ in range(copies)]
    rounded = [copy.deepcopy(layer) for layer in layers] if options.activations and layers[0].format.fits_int8 else []
    for layer in rounded:
        layer.activations = options.activations
    kernels = [layer.prepare()._known[1].address for layer in layers]
    size = layers[0].weight.numel() + layers[0].weight_scale.numel()
    probes = [torch.ones(size // 8, dtype=torch.int64) for _ in range(copies)]
    dense = [weight.clone() for _ in range(max(2, copies // 2))]
    contestants = {
        "ours": lambda x, i: layers[i % copies](x),
        "kernel": lambda x, i: cpu.multiply(kernels[i % copies], x, n),
        **({"rounded": lambda x, i: rounded[i % copies](x)} if rounded else {}),
        **{kind: partial(by_instructions, kind, layers if kind in PRODUCTS.kinds else rounded) for kind in options.instructions or [] if kind in PRODUCTS.kinds or rounded},
        "torch": lambda x, i: torch.nn.functional.linear(x, dense[i % len(dense)]),
        "read": lambda x, i: read(probes[i % copies]),
    }
    if not options.no_int and name != "fp32":
        contestants |= integer_contestants(n, k, copies)
    error = check(layers[0], n, k)
    rows = []
    print(f"\n{name} {n} x {k}, {size / 2**20:.1f} MiB, error {error:.1e}\n rows " + "".join(f"{c:>{max(8, len(c) + 1)}}" for c in contestants), end="")
    print("  x torch     bandwidth      peak  c(M)/c(1)" + ("  of rounded, its x torch" if rounded else ""))
    for m in options.rows:
        x = torch.randn(m, k).to(dtype)
        ms = interleaved(contestants, x, options.repetitions)
        rows.append({"format": name, "n": n, "k": k, "rows": m, "error": error, "ms": ms, "bytes": size})
        share = f"{n * k * m / (ms['ours'] / 1e3) / peak:10.0%}" if peak else "         -"
        print(
            f"{m:5d} " + "".join(f"{value:{max(8, len(c) + 1)}.3f}" for c, value in ms.items())
            + f"{ms['torch'] / ms['ours']:9.2f}{ms['read'] / ms['ours']:8.0%}, {ms['read'] / ms['kernel']:4.0%}{share}{ms['ours'] / rows[0]['ms']['ours']:11.2f}"
            + (f"{ms['rounded'] / rows[0]['ms']['rounded']:12.2f}{ms['torch'] / ms['rounded']:13.2f}" if rounded else ""),
            flush=True,
        )  # fmt: skip
    return rows


def by_instructions(kind: str, layers: list, x: torch.Tensor, i: int) -> torch.Tensor:
    """The product of a layer by these instructions."""
    family = PRODUCTS if kind in PRODUCTS.kinds else INTEGERS
    family.force(kind)
    try:
        return layers[i % len(layers)](x)
    finally:
        family.force(None)


def interleaved(contestants: dict, x: torch.Tensor, repetitions: int) -> dict:
    """Median milliseconds of each contestant, all of them run once per repetition."""
    seconds = {name: [] for name in contestants}
    for i in range(repetitions + 2):
        for name, run in random.sample(list(contestants.items()), len(contestants)):  # nobody always follows the same one
            start = time.perf_counter()
            run(x, i)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[2:]) * 1e3 for name, values in seconds.items()}


def integer_contestants(n: int, k: int, copies: int) -> dict:
    """torch's own weight-only kernels: int8 with a scale per row, int4 with a scale per group of 32."""
    int8 = [torch.randint(-127, 128, (n, k), dtype=torch.int8) for _ in range(copies)]
    scales = torch.rand(n).bfloat16()
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    int4 = [torch._convert_weight_to_int4pack_for_cpu(codes, 1) for _ in range(copies)]
    groups = torch.rand(k // 32, n, 2).bfloat16()
    return {
        "int8": lambda x, i: torch._weight_int8pack_mm(x, int8[i % copies], scales),
        "int4": lambda x, i: torch._weight_int4pack_mm_for_cpu(x, int4[i % copies], 32, groups),
    }


def read(words: torch.Tensor) -> None:
    cpu.library().mx_read(words.data_ptr(), words.numel(), torch.get_num_threads())


def dot_peak() -> float:
    """Multiply-adds per second on registers alone, on all threads, the best of five, by the instructions in use; 0: not known."""
    return max(cpu.library().mx_dot_peak(torch.get_num_threads()) for _ in range(5))


def check(layer: MXLinear, n: int, k: int) -> float:
    """The kernel against float64, on float32 inputs, before any rounding of the result to 16 bits."""
    x = torch.randn(4, k)
    exact = layer.packed().dequantize(torch.float64)
    return float(((layer(x).double() - x.double() @ exact.T).abs() / (x.double().abs() @ exact.abs().T)).max())


if __name__ == "__main__":
    main()
