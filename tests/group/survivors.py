"""What tests of faults have their ranks do, and what they ask of those that are left."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import init_group

RANKS = 3
SLACK = 2.0  # what survivors may take beyond the timeout


def gather(group=None):
    """One gather of the rank numbers; True when they came right."""
    world = dist.get_world_size(group)
    output = torch.full((world,), -1.0)
    dist.all_gather_into_tensor(output, torch.tensor([float(dist.get_rank(group))]), group)
    return output.tolist() == [float(rank) for rank in range(world)]


def routes():
    import pg_sdma

    [counts] = pg_sdma.stats().values()
    return {route: count["calls"] for route, count in counts.items()}


def voted_group(seconds):
    """Makes the default group, votes with all the time that takes, then sets its timeout."""
    init_group("cpu:sdma")
    assert gather()
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))


def seconds_to_raise(call, *args):
    """How long the call took to raise its DistBackendError, and the message."""
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        call(*args)
    return time.monotonic() - start, str(error.value)


def check_survivors(failure, victim, ranks=RANKS):
    report = str(failure.value)
    for rank in range(ranks):
        told = "died with exit code -9" if rank == victim else "passed"
        assert f"rank {rank}: {told}" in report, report
