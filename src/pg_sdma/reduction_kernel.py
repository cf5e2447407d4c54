"""The kernel that sums a direct reduce-scatter's slices on a GPU. Imports Triton.

The peers' slices have arrived in rows, one a peer. The own slice is read where it lies. The result
equals in every bit what pg_sdma does with ATen for CPU tensors: the slices are added in rank order
in fp32 (fp64 for fp64), the sum is scaled in that precision, and rounded once. pg_sdma._C launches
it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource

# Thread blocks of a launch: each goes on with the next block of elements until all are summed. 32
# keep up with NVLink while nothing else runs. Beside multiplications they fall behind, and being
# fewer for longer they take as much from those: docs/experiments.md.
BLOCKS = 128
THREADS = 256  # of a block
# Of each slice, what a thread reads before it adds up. More of it hides more of the memory's
# latency, and takes registers for every rank.
BYTES_A_THREAD = 64
BYTES_A_THREAD_OF_MANY = 32
MANY = 4  # ranks, beyond which a thread reads less of each

SUM, AVERAGE, PREMULTIPLIED = 0, 1, 2  # as Reduction::Kind in csrc/backend/collectives/reduction.h


class Kernel(NamedTuple):
    """A compiled kernel as csrc/backend/collectives/kernels.h knows it; the last is for people."""

    function: int  # the driver's CUfunction or hipFunction_t
    threads: int
    shared_bytes: int
    blocks: int
    registers: int


def elements_a_block(dtype: torch.dtype, world: int) -> int:
    size = BYTES_A_THREAD if world <= MANY else BYTES_A_THREAD_OF_MANY
    return THREADS * size // dtype.itemsize


@triton.jit
def _sum_block(  # type: ignore[no-untyped-def]
    output,
    own,
    landing,
    stride,
    at,
    count,
    factor,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    KIND: tl.constexpr,
    HIP: tl.constexpr,
    MASKED: tl.constexpr,
):
    wide: tl.constexpr = tl.float64 if output.dtype.element_ty == tl.float64 else tl.float32
    inside = at < count if MASKED else None
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            row = own
        elif rank < RANK:
            row = landing + rank * stride
        else:
            row = landing + (rank - 1) * stride
        part = tl.load(row + at, mask=inside).to(wide)
        if rank == 0:
            total = part
        else:
            total += part
    if KIND == 1:
        if WORLD & (WORLD - 1) == 0:
            total *= 1.0 / WORLD  # exact, so that both round alike, and this is faster
        elif wide == tl.float64:
            total /= WORLD
        else:
            total = tl.div_rn(total, tl.full((), WORLD, wide))
    if KIND == 2:
        # The bits of a double travel as an integer: one argument for all dtypes.
        total *= factor.to(tl.float64, bitcast=True).to(wide)
    if HIP and KIND != 0 and output.dtype.element_ty == tl.float16:
        # Nothing, but opaque: of a multiplication that is rounded to fp16 LLVM before August 2026
        # makes one instruction that turns -0 into 0 (llvm-project#214544).
        total = tl.inline_asm_elementwise("", "=v,0", [total], tl.float32, is_pure=True, pack=1)
    # To nearest. Another rounding would go here, keyed by the elements' numbers.
    rounded = total.to(output.dtype.element_ty)
    tl.store(output + at, rounded, mask=inside)


# A mask makes every access as narrow as one element: so what whole blocks leave is for small ones.
@triton.jit
def _sum_slices(  # type: ignore[no-untyped-def]
    output,
    own,
    landing,
    stride: tl.int64,
    count: tl.int64,
    factor: tl.int64,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    KIND: tl.constexpr,
    HIP: tl.constexpr,
    BLOCK: tl.constexpr,
    SMALL: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64)
    whole = count // BLOCK
    # Not a range: Triton's interpreter cannot take one of a kernel's numbers with every numpy.
    block = first
    while block < whole:
        at = block * BLOCK + tl.arange(0, BLOCK)
        _sum_block(output, own, landing, stride, at, count, factor, WORLD, RANK, KIND, HIP, False)
        block += tl.num_programs(0)
    start = whole * BLOCK + first * SMALL
    while start < count:
        at = start + tl.arange(0, SMALL)
        _sum_block(output, own, landing, stride, at, count, factor, WORLD, RANK, KIND, HIP, True)
        start += tl.num_programs(0) * SMALL


_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


def compile_for(
    target: Any, dtype: torch.dtype, world: int, rank: int, kind: int, aligned: bool
) -> Any:
    """The kernel as Triton compiles it for `target`, a GPUTarget of either vendor; not loaded.

    All that differs by vendor is here and at `HIP` above: the width of a warp, 64 threads on AMD's
    gfx9 family, of which a block then has half as many. The source is made by hand because a
    `warmup` without a call's tensors takes them for smaller than 2 GiB on AMD GPUs (Triton 3.6).
    """
    divisible = [["tt.divisibility", 16]]
    constants = {
        "WORLD": world,
        "RANK": rank,
        "KIND": kind,
        "HIP": target.backend == "hip",
        "BLOCK": elements_a_block(dtype, world),
        "SMALL": THREADS,
    }
    source = ASTSource(
        fn=_sum_slices,
        signature=dict.fromkeys(("output", "own", "landing"), _TYPES[dtype])
        | dict.fromkeys(("stride", "count", "factor"), "i64")
        | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        # The landing's addresses and the stride are multiples of 16; output and own slice if
        # `aligned`.
        attrs={(i,): divisible for i in range(0 if aligned else 2, 4)},
    )
    options = {
        "num_warps": THREADS // target.warp_size,
        # A fused multiply-add rounds once where ATen rounds twice.
        "enable_fp_fusion": False,
    }
    return triton.compile(source, target=target, options=options)


@functools.cache
def compile_kernel(
    device: int, dtype: torch.dtype, world: int, rank: int, kind: int, aligned: bool
) -> Kernel:
    """The kernel for rank `rank` of `world` ranks on CUDA or HIP device `device`, loaded there.

    `kind`: SUM, AVERAGE or PREMULTIPLIED. `aligned`: output and own slice begin at multiples of 16
    bytes. Raises what Triton raises.
    """
    with torch.cuda.device(device):
        target = triton.runtime.driver.active.get_current_target()
        compiled = compile_for(target, dtype, world, rank, kind, aligned)
        compiled._init_handles()
    _loaded.append(compiled)
    metadata = compiled.metadata
    threads = target.warp_size * metadata.num_warps
    return Kernel(compiled.function, threads, metadata.shared, BLOCKS, compiled.n_regs)


_loaded: list[Any] = []  # never unloaded: pg_sdma._C keeps the functions
