"""All that is measured on a GPU, in one run with a time limit for each part: checks first, then kernels, compiled passes and the 7B shape.

    python benchmarks/on_gpu.py --out on_gpu                 # some ten minutes
    python benchmarks/on_gpu.py --out on_gpu --parts tests kernels

Nothing is downloaded: models are shapes with random weights. What a part prints goes to OUT/PART.txt as it comes; one that fails or runs out of
time does not stop the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import torch

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ["recipes/llama2_7b__115m.py", "--scale", "shape", "--acceptance", "0.8"]
PARTS = {  # what is run, and for how many seconds at most
    "tests": (["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "tests"], 240),
    "kernels": (["benchmarks/mx_gpu.py", "--json", "{out}/kernels.json"], 120),
    "shape_7b": ([*RECIPE, "--prompts", "1", "--out", "{out}/shape_7b"], 180),
}


def run(name: str, out: Path) -> str:
    """Run one part; what became of it, in a word."""
    command, limit = PARTS[name]
    begin = perf_counter()
    with (out / f"{name}.txt").open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run([sys.executable, *(word.format(out=out) for word in command)], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            return f"stopped after {limit} s"
    return f"{'done' if code == 0 else f'failed ({code})'} in {perf_counter() - begin:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("on_gpu"), help="folder for what the parts print and write")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No GPU that torch can use; these parts need one.")
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in given.parts:
        print(f"{name}: {run(name, given.out.resolve())}", flush=True)
        tail = (given.out / f"{name}.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        print("\n".join(f"    {line}" for line in tail), flush=True)


if __name__ == "__main__":
    main()
