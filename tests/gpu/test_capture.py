"""Graphs that hold collectives, recorded and launched between direct gathers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from groups import PATIENT, GpuRanks, calls_by_route

pytestmark = pytest.mark.gpu

SHARD = 1 << 20
REPLAYS = 5


def gather(value: int) -> None:
    """A direct gather of `value` plus the rank, whose output is checked."""
    rank, world = dist.get_rank(), dist.get_world_size()
    output = torch.full((world, SHARD), -1, dtype=torch.int32, device="cuda")
    own = torch.full((SHARD,), value + rank, dtype=torch.int32, device="cuda")
    dist.all_gather_into_tensor(output.view(-1), own)
    own.fill_(-2)
    assert output.eq(value + torch.arange(world, device="cuda")[:, None]).all()


def record_and_launch() -> Counter[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    summed = torch.zeros(SHARD, dtype=torch.int32, device="cuda")
    own = torch.zeros(SHARD, dtype=torch.int32, device="cuda")
    output = torch.zeros(world * SHARD, dtype=torch.int32, device="cuda")
    dist.all_reduce(summed)  # NCCL's first call cannot be recorded
    gather(100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(summed)
        dist.all_gather_into_tensor(output, own)
    gather(200)
    for replay in range(REPLAYS):
        summed.fill_(replay + rank)
        own.fill_(replay * world + rank)
        output.fill_(-1)
        graph.replay()
        gather(300 + replay)
        assert summed.eq(replay * world + world * (world - 1) // 2).all()
        expected = replay * world + torch.arange(world, device="cuda")
        assert output.view(world, SHARD).eq(expected[:, None]).all()
    return calls_by_route()


def test_recorded_collectives_are_the_inners(gpu_ranks: GpuRanks) -> None:
    if gpu_ranks.share(2):
        pytest.skip("gloo's collectives, which ranks of one GPU have, cannot be recorded")
    for routes in gpu_ranks(2, env=PATIENT).run(record_and_launch):
        assert routes == {"direct": 2 + REPLAYS, "inner: graph capture": 1}
