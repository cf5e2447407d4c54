"""More ranks than cores: every byte right, every call counted, and none left to the inner."""

from __future__ import annotations

import secrets

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor

from pg_sdma import fast_path_share, stats
from pg_sdma.stats import RouteCounts

# Bytes of a shard: less than a word, odd, more than a slot of shared memory, more than its slots.
SHARDS = (1, 4099, 70_001, 1_100_000)


def shard(seed: int, rank: int, size: int) -> Tensor:
    """What `rank` gives, as any rank can make it."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def gathers(seed: int, group: dist.ProcessGroup) -> tuple[RouteCounts, dict[str, tuple[int, int]]]:
    """Gathers in every form; returns the counts, and what they should be: calls and bytes.

    Raises where a byte is wrong.
    """
    rank, world = dist.get_rank(group), group.size()
    expected = {size: torch.cat([shard(seed, r, size) for r in range(world)]) for size in SHARDS}
    poisoned = {size: ~whole for size, whole in expected.items()}
    own = {size: shard(seed, rank, size) for size in SHARDS}
    total = world * sum(SHARDS)

    for size in SHARDS:
        output = poisoned[size].clone()
        dist.all_gather_into_tensor(output, own[size], group=group)
        assert torch.equal(output, expected[size])

        output = poisoned[size].clone()
        mine = output.narrow(0, rank * size, size)
        mine.copy_(own[size])
        dist.all_gather_into_tensor(output, mine, group=group)
        assert torch.equal(output, expected[size])

        outputs = list(poisoned[size].clone().chunk(world))
        dist.all_gather(outputs, own[size], group=group)
        assert torch.equal(torch.cat(outputs), expected[size])

    late = {size: poisoned[size].clone() for size in SHARDS}
    works = [
        dist.all_gather_into_tensor(late[size], own[size], group=group, async_op=True)
        for size in SHARDS
    ]
    for work in works:
        work.wait()
    assert all(torch.equal(late[size], expected[size]) for size in SHARDS)

    together = {size: poisoned[size].clone() for size in SHARDS}
    with dist._coalescing_manager(group=group):
        for size in SHARDS:
            dist.all_gather_into_tensor(together[size], own[size], group=group)
    assert all(torch.equal(together[size], expected[size]) for size in SHARDS)

    return stats(group), {
        "all_gather_into_tensor": (3 * len(SHARDS), 3 * total),
        "all_gather": (len(SHARDS), total),
        "all_gather_into_tensor_coalesced": (1, total),
    }


def everything(seed: int) -> None:
    """On every rank: gathers in the world and, at the same time, in groups of its two halves."""
    world = dist.get_world_size()
    halves = [list(range(world // 2)), list(range(world // 2, world))]
    half, _ = dist.new_subgroups_by_enumeration(halves, backend="cpu:sdma")
    for group in (dist.group.WORLD, half):
        if group.size() == 1:
            continue
        counts, right = gathers(seed, group)
        assert counts == {
            operation: {"direct": {"calls": calls, "bytes": size}}
            for operation, (calls, size) in right.items()
        }
        assert fast_path_share(group) == 1
    dist.barrier()


@pytest.mark.parametrize("size", [2, 4, 8, pytest.param(16, marks=pytest.mark.nightly)])
def test_every_byte_is_right_and_every_call_is_counted(size: int) -> None:
    run_ranks(size, everything, secrets.randbelow(1 << 40), timeout=240)
