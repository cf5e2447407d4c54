"""Faults on purpose (PG_SDMA_INJECT) in operations: what the others see, and how soon.

docs/reliability.md lists these tests by fault.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, RanksFailed, run_ranks
from survivors import RANKS, SLACK, check_survivors, gather, seconds_to_raise, voted_group

TIMEOUT = 1.0  # of groups whose ranks stall


# -- operations: a rank dies


def survive(async_op):
    assert gather()
    start = time.monotonic()
    output = torch.empty(dist.get_world_size() << 20)
    with pytest.raises(dist.DistBackendError) as error:
        for _ in range(20):
            work = dist.all_gather_into_tensor(output, torch.ones(1 << 20), async_op=async_op)
            if work is not None:
                work.wait()
    assert time.monotonic() - start < 10
    assert "rank 1" in str(error.value)
    assert "all_gather_into_tensor (operation " in str(error.value)


@pytest.mark.parametrize("async_op", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("injection", ["agree=die#7@1", "carry=die#7@1"])
@pytest.mark.parametrize("ranks", [2, RANKS])  # two have slots on two cores, three on as many
def test_a_rank_that_dies_in_an_operation_is_named_at_once(ranks, injection, async_op):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(ranks, survive, async_op, env={"PG_SDMA_INJECT": injection})
    check_survivors(failure, 1, ranks)


# -- operations: a rank fails between a verdict and its copies


def fail_to_begin(async_op):
    """Goes on after the failure, as a program may: that must not release the peers."""
    voted_group(60)

    def call():
        output = torch.full((dist.get_world_size() * 5,), -1.0)
        own = torch.full((5,), float(dist.get_rank()))
        work = dist.all_gather_into_tensor(output, own, async_op=async_op)
        if work is not None:
            work.wait()

    return [seconds_to_raise(call) for _ in range(2)]


@pytest.mark.parametrize("async_op", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_rank_that_cannot_begin_a_direct_operation_breaks_the_group(async_op):
    env = {"PG_SDMA_INJECT": "carry=refuse#5@1"}
    for failures in run_ranks(RANKS, fail_to_begin, async_op, backend=None, env=env):
        for elapsed, message in failures:
            assert elapsed < 10
            assert "rank 1: all_gather_into_tensor (operation 5 of group" in message
            assert "carry refused on purpose" in message


# -- operations: a rank stalls


def stall(async_op):
    voted_group(TIMEOUT)
    dist.all_reduce(torch.ones(1))
    group = dist.group.WORLD.group_name

    def call():
        output = torch.empty(dist.get_world_size() * 5)
        work = dist.all_gather_into_tensor(output, torch.ones(5), async_op=async_op)
        if work is not None:
            work.wait()

    return *seconds_to_raise(call), group


@pytest.mark.parametrize("async_op", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("point", "missing"),
    [
        (
            "agree",
            r"Not called by rank 1 \(it is at operation 4, the last of its 1 other collectives",
        ),
        ("carry", r"Not finished (copying|sharing) by rank 1\b"),
    ],
)
@pytest.mark.parametrize("ranks", [2, RANKS])
def test_a_stalled_rank_is_named_with_all_that_is_known(ranks, point, missing, async_op):
    env = {"PG_SDMA_INJECT": f"{point}=late:{2.5 * TIMEOUT}#5@1"}
    results = run_ranks(ranks, stall, async_op, backend=None, env=env)
    for rank, (elapsed, message, group) in enumerate(results):
        if rank != 1:
            assert TIMEOUT - 0.1 < elapsed < TIMEOUT + SLACK
        assert f"(operation 5 of group {group}, {20 * ranks} bytes of output) timed out" in message
        assert re.search(missing, message)
        assert "Outstanding for 1." in message
        assert "Culprit: rank 1." in message


def wait_for_a_stopped_rank():
    voted_group(TIMEOUT)
    if dist.get_rank() == 1:
        parent = os.getpid()
        child = os.fork()
        if child == 0:  # wakes the rank, which cannot do that itself
            time.sleep(2.5 * TIMEOUT)
            os.kill(parent, signal.SIGCONT)
            os._exit(0)
        os.kill(parent, signal.SIGSTOP)
        os.waitpid(child, 0)
        return 0.0, seconds_to_raise(gather)[1]
    return seconds_to_raise(gather)


@pytest.mark.nightly
def test_a_stopped_process_is_named_and_raises_itself_when_it_goes_on():
    for elapsed, message in run_ranks(RANKS, wait_for_a_stopped_rank, backend=None):
        assert elapsed < TIMEOUT + SLACK
        assert "timed out after 1000 ms: rank 1 has not made this call" in message
        assert "Culprit: rank 1." in message


def gather_against_another_operation(operation):
    voted_group(TIMEOUT)
    if dist.get_rank() != 1:
        return seconds_to_raise(gather)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        if operation == "allreduce":
            dist.all_reduce(torch.ones(1))
        elif operation == "broadcast":
            dist.broadcast(torch.ones(1), 0)
        else:
            dist.barrier()
    return time.monotonic() - start, str(error.value)


@pytest.mark.parametrize(
    "operation",
    ["allreduce", *(pytest.param(o, marks=pytest.mark.nightly) for o in ("broadcast", "barrier"))],
)
def test_a_gather_against_another_operation_names_it(operation):
    results = run_ranks(RANKS, gather_against_another_operation, operation, backend=None)
    for rank, (elapsed, message) in enumerate(results):
        assert elapsed < TIMEOUT + SLACK
        if rank != 1:
            assert f"the last of its 1 other collectives is {operation}" in message
            assert "Culprit: rank 1." in message


# -- timeouts of one call


def wait_with_a_timeout():
    assert gather()
    if dist.get_rank() == 1:
        time.sleep(1.5)
    output = torch.empty(RANKS)
    work = dist.all_gather_into_tensor(output, torch.ones(1), async_op=True)
    elapsed = 0.0
    if dist.get_rank() != 1:
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            work.wait(timedelta(milliseconds=300))
        elapsed = time.monotonic() - start
    work.wait()  # the operation itself goes on
    return elapsed, output.tolist()


def test_waiting_with_a_timeout_raises_and_leaves_the_operation_alone():
    for elapsed, outcome in run_ranks(RANKS, wait_with_a_timeout):
        assert elapsed < 1.2
        assert outcome == [1.0, 1.0, 1.0]


def change_the_timeout(name):
    """As a group does it, and as ProcessGroupNCCL and ProcessGroupGloo have it."""
    assert gather()
    group = dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    of = {"set_timeout": group, "_set_default_timeout": backend}[name]
    getattr(of, name)(timedelta(milliseconds=400))
    if dist.get_rank() == 1:
        time.sleep(1.2)
        return None
    return seconds_to_raise(gather)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["set_timeout", "_set_default_timeout"])
def test_the_timeout_of_a_group_can_be_set_later(name):
    results = run_ranks(RANKS, change_the_timeout, name)
    for rank in (0, 2):
        elapsed, message = results[rank]
        assert elapsed < 0.4 + SLACK
        assert "timed out after 400 ms: rank 1" in message


# -- any rank, at any moment


def gather_until_a_peer_is_gone():
    """Gathers of all kinds, every result checked. Raises only where a result is wrong."""
    random = torch.Generator().manual_seed(7)
    try:
        for number in range(1_000_000):
            size = int(torch.randint(1, 1 << 15, (), generator=random))
            shards = [torch.full((size,), float(1000 * number + r)) for r in range(world())]
            output = torch.full((size * world(),), -1.0)
            async_op = number % 3 == 0
            work = dist.all_gather_into_tensor(output, shards[dist.get_rank()], async_op=async_op)
            if work is not None:
                work.wait()
            assert torch.equal(output, torch.cat(shards)), number
            if number % 7 == 0:
                dist.barrier()
    except RuntimeError as error:  # gloo raises these, where its barrier lost the peer
        # As the end of this process would: another survivor may be in gloo's barrier, which waits
        # for this rank as long as it is connected.
        dist.destroy_process_group()
        return str(error)


def world():
    return dist.get_world_size()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_200_ranks_killed_at_random_moments():
    seed = int(time.time())
    random = torch.Generator().manual_seed(seed)
    for number in range(200):
        size = int(torch.randint(2, 5, (), generator=random))
        victim = int(torch.randint(0, size, (), generator=random))
        moment = float(torch.rand((), generator=random)) * 0.4
        ranks = Ranks(size)
        ranks.run(world)  # all have connected: gloo waits its whole timeout for one that never does
        killer = threading.Timer(moment, ranks._processes[victim].kill)
        killer.start()
        with pytest.raises(RanksFailed) as failure:
            ranks.run(gather_until_a_peer_is_gone)
        killer.join()
        report = f"seed {seed}, run {number}:\n{failure.value}"
        for rank in range(size):
            # The harness gives survivors GRACE_SECONDS, and then says that they did not finish.
            told = "died with exit code -9" if rank == victim else "passed"
            assert f"rank {rank}: {told}" in report, report
