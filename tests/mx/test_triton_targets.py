"""The GPU kernel as machine code: Triton's compiler needs no GPU for that, so what it makes of the kernel is looked at on any machine."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from tests.mx.test_triton import load

triton = pytest.importorskip("triton", minversion="3.5")
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET is set"),
    pytest.mark.skipif(not any(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")), reason="this Triton has no assembler for CUDA"),
]
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}


def compiled(name: str, dtype: torch.dtype, groups: int, capability: int):
    """`_matmul` for K that is split (float32 sums, no bias), as `_launch` asks for it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load()
    bits, _, bias = kernel.FORMATS[name]
    number, x_bias = kernel.DTYPES[dtype]
    constants = dict(NUMBERS=kernel.NUMBERS[name], WORDS=bits // 2, WHOLE=True, DTYPE=number,
                     UP=2.0 ** (x_bias - bias), TILE_N=kernel.TILE_N, GROUPS=groups, HAS_BIAS=False, STAGES=kernel.STAGES)
    x = POINTERS[dtype]
    types = dict(x_ptr=x, words_ptr="*i32", scales_ptr="*i32", bias_ptr=x, out_ptr="*fp32", rows="i32", N="i32", K="i32", tiles="i32",
                 per_part="i32")
    places = {(kernel._matmul.arg_names.index(key),): value for key, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(types) if key.endswith("_ptr") or key in ("N", "K")}
    source = ASTSource(kernel._matmul, types | dict.fromkeys(constants, "constexpr"), constexprs=places, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": kernel.WARPS, "num_stages": kernel.STAGES})


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", POINTERS, ids=str)
@pytest.mark.parametrize("name", ["mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1"])
def test_the_kernel_compiles_for_every_gpu_and_keeps_its_numbers_in_registers(name, dtype, groups, capability):
    made = compiled(name, dtype, groups, capability)
    code = made.asm["ptx"]
    assert f".target sm_{capability}" in code and made.asm["cubin"]
    assert ".local" not in code  # nothing is kept in memory
    if capability >= 80:
        assert "cp.async" in code  # weights are on their way while others are multiplied
        assert code.count("mma.sync.aligned.m16n8k16") == 16 * groups  # tensor cores: four blocks in two halves, 16 by 8 rows, twice
    assert made.metadata.shared < 48 * 1024
    if capability >= 80:
        assert not re.search(r"\b(STL|LDL)\b", " ".join(loop(made)))  # nothing is spilled in the loop


@pytest.mark.parametrize("name, most", [("mxfp6_e2m3", 460), ("mxfp6_e3m2", 430), ("mxfp4_e2m1", 400)])
def test_one_row_takes_few_instructions_per_weight(name, most):
    """Of the loop, for 32 x 128 weights, on a GPU of compute capability 9.0. An H200 that reads 4.8 TB/s has 420 for the 2,176 bytes of MXFP4 and 618 for
    the 3,200 of MXFP6: each of its 132 multiprocessors issues four a clock at 1.755 GHz."""
    kernel, instructions = load(), len(loop(compiled(name, torch.bfloat16, 1, 90)))
    spare = 1.25 if tuple(map(int, triton.__version__.split(".")[:2])) > (3, 7) else 1  # later ones order x in another way
    assert 0 < instructions * kernel.WARPS * 32 / kernel.TILE_N <= most * spare


def loop(made) -> list[str]:
    """The instructions of the longest loop: from a label to the branch back to it."""
    disassembler = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/nvdisasm"), None)
    if disassembler is None:
        pytest.skip("this Triton has no disassembler")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        listing = subprocess.run([str(disassembler), "-c", file.name], capture_output=True, text=True, check=True).stdout
    seen, labels, longest = [], {}, []
    for line in listing.splitlines():
        label = re.match(r"\s*(\.L_[\w_]+):", line)
        instruction = re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if label:
            labels[label[1]] = len(seen)
        elif instruction:
            seen.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_[\w_]+)\)", instruction[1])
            if back and back[1] in labels:
                longest = max(longest, seen[labels[back[1]] :], key=len)
    return longest
