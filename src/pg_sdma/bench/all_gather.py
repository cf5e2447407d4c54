"""`pg-sdma bench all_gather`: the call, and whether its results are right."""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.distributed as dist
from torch import Tensor

from pg_sdma.bench import sweep
from pg_sdma.bench.buffers import Buffers, Case
from pg_sdma.bench.launch import World
from pg_sdma.bench.operation import Operation

# Since torch 2.13 `all_gather_into_tensor` warns that it is deprecated.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gather(buffers: Buffers, group: dist.ProcessGroup) -> None:
    """Gathers the shards into the whole tensors."""
    if len(buffers.whole) == 1:
        all_gather(buffers.whole[0], buffers.shards[0], group=group)
        return
    with dist._coalescing_manager(group=group):
        for output, own in zip(buffers.whole, buffers.shards, strict=True):
            all_gather(output, own, group=group)


def gathered(case: Case, tensor: int, device: torch.device) -> Tensor:
    """The bytes that the output of `tensor` should hold."""
    return torch.cat([shard(case, tensor, rank, device) for rank in case.ranks])


def own_shard(case: Case, tensor: int, device: torch.device) -> Tensor:
    """The bytes that this rank gives."""
    return shard(case, tensor, case.ranks[case.rank], device)


def shard(case: Case, tensor: int, rank: int, device: torch.device) -> Tensor:
    """The bytes that `rank` gives, the same on whichever rank they are made."""
    generator = torch.Generator(device).manual_seed(tensor * 65536 + rank)
    words = -(-case.shard_bytes // 8)
    bits = torch.randint(
        -(2**63), 2**63 - 1, (words,), dtype=torch.int64, device=device, generator=generator
    )
    return bits.view(torch.uint8)[: case.shard_bytes]


OPERATION = Operation("all_gather", "output", "input", "none", gather, own_shard, gathered)


def run(world: World, options: Namespace) -> None:
    """The benchmark, on one rank: see sweep.run."""
    sweep.run(world, options, OPERATION)
