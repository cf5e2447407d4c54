"""`rounding.accumulate` as one Triton kernel, equal to it in every bit. Imports Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pg_sdma.zero2.rounding import BF16_NAN, COUNTERS, LANES, TILE, Key


def accumulate(
    shard: Tensor, gradient: Tensor, first: int, scale: float, overwrite: bool, key: Key
) -> None:
    """See `rounding.accumulate`; enqueued on the current stream of the tensors' device."""
    words = (word - (word >> 31 << 32) for word in key.words())  # as signed words of the same bits
    _accumulate[(triton.cdiv(gradient.numel(), TILE),)](
        shard,
        gradient,
        first,
        first + shard.numel(),
        gradient.numel(),
        scale,
        *words,
        OVERWRITE=overwrite,
        ROUND=shard.dtype == torch.bfloat16,
        COUNTERS=COUNTERS,
        LANES=LANES,
        NAN=BF16_NAN,
        # A fused multiply-add rounds once where ATen rounds twice.
        enable_fp_fusion=False,
    )


# No argument that changes between calls is specialised on, or new values would compile anew.
@triton.jit(
    do_not_specialize=["first", "end", "numel", "low", "high", "tensor", "micro_step", "step"]
)
def _accumulate(  # type: ignore[no-untyped-def]
    shard,
    gradient,
    first,
    end,
    numel,
    scale,
    low,
    high,
    tensor,
    micro_step,
    step,
    OVERWRITE: tl.constexpr,
    ROUND: tl.constexpr,
    COUNTERS: tl.constexpr,
    LANES: tl.constexpr,
    NAN: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * COUNTERS * LANES
    lane = tl.arange(0, COUNTERS)
    if (start < end) & (start + COUNTERS * LANES > first):
        if ROUND:
            c0 = tl.program_id(0) * COUNTERS + lane
            zero = tl.zeros_like(c0)
            seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(
                tl.uint32, bitcast=True
            ).to(tl.uint64)
            words = tl.philox(seed, c0, zero + tensor, zero + micro_step, zero + step)
        for j in tl.static_range(LANES):
            i = start + j * COUNTERS + lane
            mine = (i >= first) & (i < end)
            total = tl.load(gradient + i, mask=mine, other=0.0).to(tl.float32) * scale
            if not OVERWRITE:
                total += tl.load(shard + (i - first), mask=mine, other=0.0).to(tl.float32)
            if ROUND:
                draw = (words[j % 4] >> (16 * (j // 4))) & 0xFFFF
                bits = total.to(tl.uint32, bitcast=True)
                size = bits & 0x7FFFFFFF
                upper = (bits + tl.where(size < 0x7F800000, draw, 0)) >> 16
                upper = tl.where(size > 0x7F800000, NAN, upper)
                total = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
            tl.store(shard + (i - first), total, mask=mine)
            tl.store(gradient + i, 0.0, mask=i < numel)
    else:
        for j in tl.static_range(LANES):
            i = start + j * COUNTERS + lane
            tl.store(gradient + i, 0.0, mask=i < numel)
