"""`pg-sdma bench reduce_scatter`: the call, and whether the sums are right."""

from __future__ import annotations

import functools
from argparse import Namespace

import torch
import torch.distributed as dist
from torch import Tensor

from pg_sdma.bench import sweep
from pg_sdma.bench.buffers import Buffers, Case
from pg_sdma.bench.launch import World
from pg_sdma.bench.operation import Operation

# Since torch 2.13 `reduce_scatter_tensor` warns that it is deprecated.
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# Whole numbers so small that the sums of 32 ranks are whole in any dtype, bfloat16 and int8
# included: whatever the order of the sum and its precision, its bits are the same.
LARGEST = 3


def reduce(buffers: Buffers, group: dist.ProcessGroup) -> None:
    """Sums the ranks' slices of the whole tensors into the shards."""
    if len(buffers.whole) == 1:
        reduce_scatter(buffers.shards[0], buffers.whole[0], group=group)
        return
    with dist._coalescing_manager(group=group):
        for inputs, own in zip(buffers.whole, buffers.shards, strict=True):
            reduce_scatter(own, inputs, group=group)


def given(case: Case, tensor: int, device: torch.device) -> Tensor:
    """The input of `tensor` on this rank, of (ranks * count,)."""
    own = case.ranks[case.rank]
    return torch.cat([numbers(case, tensor, own, slot, device) for slot in range(len(case.ranks))])


def summed(case: Case, tensor: int, device: torch.device) -> Tensor:
    """What the output of `tensor` should hold, of (count,)."""
    each = (numbers(case, tensor, rank, case.rank, device) for rank in case.ranks)
    return functools.reduce(torch.add, each)


def numbers(case: Case, tensor: int, rank: int, slot: int, device: torch.device) -> Tensor:
    """What `rank` gives to the rank at `slot`, the same on whichever rank it is made."""
    generator = torch.Generator(device).manual_seed((tensor * 65536 + rank) * 65536 + slot)
    least = 0 if case.dtype == torch.uint8 else -LARGEST
    found = torch.randint(
        least, LARGEST + 1, (case.count,), dtype=torch.int8, device=device, generator=generator
    )
    return found.to(case.dtype)


OPERATION = Operation(
    "reduce_scatter",
    "input",
    "output",
    "sum",
    reduce,
    given,
    summed,
    environment={"PG_SDMA_OPS": "all_gather,reduce_scatter"},
)


def run(world: World, options: Namespace) -> None:
    """The benchmark, on one rank: see sweep.run."""
    sweep.run(world, options, OPERATION)
