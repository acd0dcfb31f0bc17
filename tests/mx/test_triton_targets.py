"""The GPU kernel as machine code: Triton's compiler needs no GPU for that, so what it makes of the kernel is looked at on any machine."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.mx.test_triton import load

triton = pytest.importorskip("triton")
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
    bits, mantissa, bias = kernel.FORMATS[name]
    number, x_mantissa, x_bias = kernel.DTYPES[dtype]
    stages = max(3, kernel.STAGES + 1 - groups)
    constants = dict(SIX=bits == 6, LSB=x_mantissa - mantissa, DTYPE=number, UP=2.0 ** (x_bias - bias), TILE_N=kernel.TILE_N, GROUPS=groups,
                     HAS_BIAS=False, STAGES=stages)
    x = POINTERS[dtype]
    types = dict(x_ptr=x, nibbles_ptr="*i32", twos_ptr="*i32", scales_ptr="*i32", bias_ptr=x, out_ptr="*fp32", rows="i32", N="i32", K="i32",
                 tiles="i32", per_part="i32")
    places = {(kernel._matmul.arg_names.index(key),): value for key, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(types) if key.endswith("_ptr") or key in ("N", "K")}
    source = ASTSource(kernel._matmul, types | dict.fromkeys(constants, "constexpr"), constexprs=places, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": kernel.WARPS, "num_stages": stages})


@pytest.mark.share(1 / 4)
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", POINTERS, ids=str)
@pytest.mark.parametrize("name", ["mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1"])
def test_the_kernel_compiles_for_every_gpu_and_keeps_its_numbers_in_registers(name, dtype, groups, capability):
    made = compiled(name, dtype, groups, capability)
    code = made.asm["ptx"]
    assert f".target sm_{capability}" in code and made.asm["cubin"]
    assert ".local" not in code  # nothing is spilled
    if capability >= 80:
        assert "cp.async" in code  # weights are on their way while others are multiplied
        assert code.count("mma.sync.aligned.m16n8k16") == 8 * groups  # tensor cores: four blocks of 32 in two halves, 8 rows each
    assert made.metadata.shared < 48 * 1024


@pytest.mark.parametrize("name", ["mxfp6_e2m3", "mxfp4_e2m1"])
def test_one_row_takes_few_instructions_per_byte_that_is_read(name, tmp_path):
    """Of the loop, per warp and tile, for a GPU of compute capability 9.0. An H200 that reads 3.6 TB/s (75 % of its bandwidth) has some 410 for MXFP6: 3,200
    bytes at 15.6 bytes per clock and multiprocessor, which issues four instructions a clock to programs of two warps."""
    disassembler = next(Path(triton.__file__).parent.glob("backends/nvidia/bin/nvdisasm"), None)
    if disassembler is None:
        pytest.skip("this Triton has no disassembler")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled(name, torch.bfloat16, 1, 90).asm["cubin"])
    listing = subprocess.run([str(disassembler), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    assert 0 < loop_length(listing) <= 410


def loop_length(listing: str) -> int:
    """Instructions of the longest loop: from a label to the branch back to it."""
    seen, labels, longest = 0, {}, 0
    for line in listing.splitlines():
        label = re.match(r"\s*(\.L_[\w_]+):", line)
        instruction = re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if label:
            labels[label[1]] = seen
        elif instruction:
            seen += 1
            back = re.search(r"BRA\s.*`\((\.L_[\w_]+)\)", instruction[1])
            if back and back[1] in labels:
                longest = max(longest, seen - labels[back[1]])
    return longest
