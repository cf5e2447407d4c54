"""Adds gradients into shards, rounding to bf16 stochastically.

A value between two neighbours in bf16 goes up with the probability of its place between them, so a
sum of many small terms is right on average, where rounding to nearest loses every term below half
a unit in the last place. Each element of each micro-step has a draw of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pg_sdma.zero2.philox import MASK, philox

# One Philox counter gives 8 draws of 16 bits, which is all that fp32 has below bf16. Within a tile,
# draw j of counter i is element 512 j + i's: a kernel then reads and writes runs of 512.
COUNTERS = 512
LANES = 8
TILE = COUNTERS * LANES

CHUNK = 64 * TILE  # elements in work at a time, so that what is between stays in the cache
BF16_NAN = 0x7FC0


@dataclass(frozen=True)
class Key:
    """What the draws of a tensor's elements depend on, besides the element's index.

    `seed` has 64 bits, the others 32; more are cut off.
    """

    seed: int
    step: int
    micro_step: int
    tensor: int

    def words(self) -> tuple[int, int, int, int, int]:
        """Lower and upper half of the seed, tensor, micro-step and step: unsigned, of 32 bits."""
        halves = (self.seed, self.seed >> 32, self.tensor, self.micro_step, self.step)
        low, high, tensor, micro_step, step = (half & MASK for half in halves)
        return low, high, tensor, micro_step, step


def draws(key: Key, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The draws of elements `first` to `first + count` of a tensor.

    Returns int32 (count,), each even over 0 to 65535 and independent of all others.
    """
    low, high, tensor, micro_step, step = key.words()
    tiles = range(first // TILE, -(-(first + count) // TILE))
    counter = torch.arange(
        tiles.start * COUNTERS, tiles.stop * COUNTERS, dtype=torch.int64, device=device
    )
    found = torch.empty(len(tiles), LANES, COUNTERS, dtype=torch.int32, device=device)
    for lane, word in enumerate(philox((counter, tensor, micro_step, step), (low, high))):
        assert isinstance(word, Tensor)
        narrow = word.view(-1, COUNTERS).int()  # the same bits
        torch.bitwise_and(narrow, 0xFFFF, out=found[:, lane])
        torch.bitwise_and(narrow.bitwise_right_shift_(16), 0xFFFF, out=found[:, lane + 4])
    return found.flatten()[first - tiles.start * TILE :][:count]


def round_to_bf16(x: Tensor, draw: Tensor) -> Tensor:
    """`x` (fp32) as bf16 (same shape), rounded away from zero where its lower 16 bits and the draw
    (int32, 0 to 65535) carry.

    Exact values, infinities and NaN stay what they are; a finite value beyond bf16's largest may
    become infinite, as it may in rounding to nearest.
    """
    bits = x.view(torch.int32)
    # Where looking costs the host nothing: a sum of finite values is finite, but for an overflow.
    if x.device.type == "cpu" and x.sum().isfinite():
        return (bits + draw).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    upper = (bits + torch.where(x.isfinite(), draw, 0)) >> 16
    # A NaN's payload may lie in the bits that are cut off.
    return torch.where(x.isnan(), BF16_NAN, upper).to(torch.int16).view(torch.bfloat16)


def accumulate(
    shard: Tensor, gradient: Tensor, first: int, scale: float, overwrite: bool, key: Key
) -> None:
    """Adds `scale` times this rank's part of a gradient to its shard, and zeroes the gradient.

    `shard` is bf16 or fp32 (m,); `gradient` is bf16 or fp32 (n,), of which elements `first` to
    `first + m` are this rank's. With `overwrite` the shard's old content counts as zero. The sum is
    made in fp32; into bf16 it is rounded stochastically, element i of the gradient by draw i of
    `key`. On CUDA one Triton kernel on the current stream, with no host synchronisation; elsewhere,
    and on CUDA without Triton, ATen operations of the same result.
    """
    if shard.is_cuda and _has_triton():
        from pg_sdma.zero2.kernel import accumulate as accumulate_by_kernel

        accumulate_by_kernel(shard, gradient, first, scale, overwrite, key)
        return
    part = gradient[first : first + shard.numel()]
    for start in range(0, shard.numel(), CHUNK):
        chunk = shard[start : start + CHUNK]
        # A product and a sum of their own, never one fused operation: see kernel.py.
        total = part[start : start + CHUNK].float()
        if scale != 1:
            total = total * scale
        if shard.dtype == torch.float32:
            chunk.copy_(total) if overwrite else chunk.add_(total)
            continue
        if not overwrite:
            total = chunk + total
        draw = draws(key, first + start, chunk.numel(), shard.device)
        chunk.copy_(round_to_bf16(total, draw))
    gradient.zero_()


@cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
