"""The kernel that sums slices on a GPU, run by Triton's interpreter, against ATen: every bit equal.

Not for bf16, to which the interpreter rounds towards zero. That compiled code rounds to nearest,
and each operation by itself, is read off what Triton compiles for a GPU; for AMD's that is done in
test_reduction_kernel_for_amd.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: Triton reads the variable when it is imported.
PROGRAM = """
import itertools, random, struct, torch
from pg_sdma import reduction_kernel as kernel

dice = random.Random(SEED)
torch.manual_seed(SEED)
dtypes = (torch.float16, torch.float32, torch.float64)
cases = list(itertools.product(dtypes, (1, 2, 3, 4, 7), range(3)))
for dtype, world, kind in cases:
    rank = dice.randrange(world)
    block = kernel.elements_a_block(dtype, world)
    count = dice.choice((1, block - 1, block, block + 1, 3 * block + 5, 35 * block + 7))
    stride = (count + 15) // 16 * 16 + 16
    scale = torch.exp2(torch.randint(-12, 13, (world, count)).double())
    slices = (torch.randn(world, count, dtype=torch.float64) * scale).to(dtype)
    at = torch.randint(0, count, (count // 10 + 1,))
    special = torch.tensor([0.0, -0.0, torch.inf, 65504.0, 6e-8, 1e-40, -1e-40]).to(dtype)
    slices[:, at] = special[torch.randint(0, len(special), (world, len(at)))]
    factor = dice.uniform(-3, 3)

    total = slices[0].to(torch.float64 if dtype == torch.float64 else torch.float32)
    for part in slices[1:]:
        total = total + part.to(total.dtype)
    if kind == kernel.AVERAGE:
        total = total / world
    elif kind == kernel.PREMULTIPLIED:
        total = total * factor
    expected = total.to(dtype)

    landing = torch.full(((world - 1) * stride + 16,), torch.nan, dtype=dtype)
    for row, peer in enumerate(r for r in range(world) if r != rank):
        landing[row * stride : row * stride + count] = slices[peer]
    output = torch.full((count + 16,), 7, dtype=dtype)
    bits = struct.unpack("q", struct.pack("d", factor))[0]
    kernel._sum_slices[(kernel.BLOCKS,)](
        output, slices[rank].clone(), landing, stride, count, bits,
        WORLD=world, RANK=rank, KIND=kind, HIP=False, BLOCK=block, SMALL=kernel.THREADS,
    )
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    wrong = output[:count].view(width) != expected.view(width)
    wrong &= ~(output[:count].isnan() & expected.isnan())
    assert not wrong.any(), (dtype, world, rank, kind, count, wrong.nonzero()[0])
    assert output[count:].eq(7).all(), "it wrote behind its output"
print(len(cases), "cases")
"""


COMPILED = """
import itertools, re, torch
from triton.backends.compiler import GPUTarget
from pg_sdma import reduction_kernel as kernel

for dtype, world, kind in itertools.product(kernel._TYPES, (2, 3), range(3)):
    compiled = kernel.compile_for(GPUTarget("cuda", 90, 32), dtype, world, 1, kind, True)
    ptx = compiled.asm["ptx"]
    float_op = r"\\b((?:add|mul|fma|div|cvt)\\.[a-z0-9.]*f(?:16|32|64)[a-z0-9.x]*)"
    arithmetic = set(re.findall(float_op, ptx))
    inexact = {op for op in arithmetic if ".rn" not in op and not op.startswith("cvt.f")}
    inexact |= {op for op in arithmetic if "ftz" in op or op.startswith("fma")}
    assert not inexact, inexact
    assert any(op.startswith("add.rn") for op in arithmetic), arithmetic
    # No access is narrower than it could be, but for those of what whole blocks leave.
    assert re.search(r"ld\\.global\\.v[24]", ptx) and re.search(r"st\\.global\\.v[24]", ptx)
    # Eight bytes each, and two for Triton's own.
    parameters = re.search(r"\\.entry[^)]*\\)", ptx)[0]
    assert len(re.findall(r"\\.param \\.u64", parameters)) == 8, parameters
    assert 32 * compiled.metadata.num_warps == kernel.THREADS
print("compiled")
"""


def run(program: str, **env: str) -> str:
    source = Path(__file__).parents[2] / "src"
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        (sys.executable, "-c", program),
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_equals_aten(seed: int) -> None:
    assert run(PROGRAM.replace("SEED", str(seed)), TRITON_INTERPRET="1") == "45 cases\n"


@pytest.mark.nightly
def test_compiled_arithmetic_rounds_to_nearest_at_each_step() -> None:
    assert run(COMPILED, TRITON_INTERPRET="0") == "compiled\n"
