"""Groups with and without slots of shared memory for their all-gathers of CPU tensors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

MOST_SHARED = 2 << 20  # bytes that a group may have
A_CORE_EACH = len(os.sched_getaffinity(0)) >= 2


def shared_bytes():
    """Of all groups of this process."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:pg_sdma" in line:
            first, end = (int(address, 16) for address in line.split()[0].split("-"))
            total += end - first
    return total


def gather_all_sizes():
    """Whether all arrived, in place and not, sync and async in turn; and what is shared then."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(7)
    right = []
    for number, size in enumerate([0, 1, 63_232, 252_928, 252_929, 1_000_003, 4 << 20] * 4):
        shards = [
            torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
            for _ in range(world)
        ]
        output = torch.bitwise_not(torch.cat(shards))
        own = output.narrow(0, rank * size, size) if number % 2 else torch.empty_like(shards[rank])
        own.copy_(shards[rank])
        # Only one rank may ask for pulls: all must follow.
        async_op = number % 5 == 0 or (number % 3 == 0 and rank == 0)
        work = dist.all_gather_into_tensor(output, own, async_op=async_op)
        if work is not None:
            work.wait()
        if number % 2 == 0:
            own.fill_(0x5A)  # a peer that still read it would see that
        right.append(torch.equal(output, torch.cat(shards)))
        if rank == number % world:
            torch.rand(200, 200).sum()  # comes late to the next
    return right, shared_bytes()


@pytest.mark.skipif(not A_CORE_EACH, reason="slots need a core a rank")
def test_two_ranks_share_at_most_two_mebibytes():
    for right, shared in run_ranks(2, gather_all_sizes):
        assert all(right)
        assert MOST_SHARED / 2 < shared <= MOST_SHARED


def test_pulls_need_no_slots():
    for right, shared in run_ranks(2, gather_all_sizes, env={"PG_SDMA_TRANSPORT": "peer"}):
        assert all(right)
        assert 0 < shared < MOST_SHARED / 4


def test_more_ranks_than_cores_pull():
    ranks = len(os.sched_getaffinity(0)) + 1
    if ranks > 5:
        pytest.skip("too many cores")
    for right, shared in run_ranks(ranks, gather_all_sizes):
        assert all(right)
        assert 0 < shared < MOST_SHARED / 2
