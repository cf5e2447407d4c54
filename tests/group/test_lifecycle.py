"""How groups end: by ranks that die, stall, abort, leave or fork. And what is left of a group."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, init_group, run_ranks
from torch.distributed.distributed_c10d import AllgatherOptions

RANKS = 3


def gather(group=None, async_op=False):
    """One gather of the rank numbers: its Work if asynchronous, else what arrived."""
    world = dist.get_world_size(group)
    output = torch.full((world,), -1.0)
    input = torch.tensor([float(dist.get_rank(group))])
    work = dist.all_gather_into_tensor(output, input, group, async_op=async_op)
    return (work, output) if async_op else output.tolist()


def gather_of(group, timeout=None):
    """The same on a group that torch.distributed may not know any more."""
    options = AllgatherOptions()
    options.asyncOp = False
    if timeout is not None:
        options.timeout = timeout
    group._allgather_base(torch.empty(group.size()), torch.ones(1), options)


def raised(function, *args):
    """The message of the DistBackendError that the call has to raise."""
    with pytest.raises(dist.DistBackendError) as error:
        function(*args)
    return str(error.value)


def run(function, *args, world=RANKS, **options):
    return run_ranks(world, function, *args, **options)


# -- ranks that die
#
# The group's timeout is half an hour here: who raises in the seconds that the harness gives has
# noticed the death itself.


def lose_rank_2(phase):
    rank = dist.get_rank()
    gather()
    if rank == 2:
        time.sleep(0.2)  # so that the others wait already
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and phase == "while another is late":
        time.sleep(1.5)
    if phase == "async":
        work, _ = gather(async_op=True)
        message = raised(work.wait)
        assert work.is_completed()
        assert raised(work.get_future().wait) == message
    else:
        message = raised(gather)
    assert "waits for rank 2, whose process has ended" in message
    assert "rank 2" in raised(gather)  # it stays broken


@pytest.mark.parametrize("phase", ["sync", "async", "while another is late"])
def test_the_death_of_a_rank_is_noticed_and_named(phase):
    with pytest.raises(RanksFailed) as failure:
        run(lose_rank_2, phase, world=4)
    report = str(failure.value)
    for rank in (0, 1, 3):
        assert f"rank {rank}: passed" in report, report
    assert "rank 2: died with exit code -9" in report


def lose_a_rank_that_is_not_needed():
    """One that dies after its last gather is not missed in what it had a part in."""
    work, output = gather(async_op=True)
    if dist.get_rank() == 2:
        work.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    work.wait()
    assert output.tolist() == [0.0, 1.0, 2.0]


def test_a_rank_that_dies_after_its_part_does_no_harm():
    with pytest.raises(RanksFailed) as failure:
        run(lose_a_rank_that_is_not_needed)
    assert "rank 0: passed" in str(failure.value) and "rank 1: passed" in str(failure.value)


# -- ranks that stall


def stall(async_op):
    init_group("cpu:sdma")
    gather()  # with the vote, which may take longer than the timeout below
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(2.5)
    elif async_op:
        work, _ = gather(async_op=True)
        return raised(work.wait)
    return raised(gather)  # on the late rank, too


@pytest.mark.parametrize("async_op", [False, True])
def test_a_missing_rank_is_named_after_the_groups_timeout(async_op):
    for message in run(stall, async_op, backend=None):
        assert "timed out after 1000 ms: rank 1 has not made this call" in message
        assert "all_gather_into_tensor (operation " in message


def stall_longer_than_set():
    """The timeout of one call, and the group's when it is set later."""
    gather()
    group = dist.new_group()
    gather(group)
    if dist.get_rank() == 1:
        time.sleep(1)
    of_call = raised(gather_of, group, timedelta(milliseconds=300))
    dist.group.WORLD.set_timeout(timedelta(milliseconds=400))
    if dist.get_rank() == 1:
        time.sleep(1)
    return of_call, raised(gather)


def test_timeouts_of_one_call_and_set_later():
    for of_call, of_group in run(stall_longer_than_set):
        assert "timed out after 300 ms: rank 1" in of_call
        assert "timed out after 400 ms: rank 1" in of_group


# -- abort


def count_and_abort():
    """What another thread must be able to do while one waits for its peers."""
    import pg_sdma

    assert pg_sdma.stats()["all_gather_into_tensor"]["direct"]["calls"] == 1
    dist.distributed_c10d._abort_process_group()


def abort_while_waiting(who):
    """Rank 1 never makes the call that the others wait in."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    gather()
    timer = threading.Timer(0.3, count_and_abort)
    if rank == 2 and who == "another thread":
        timer.start()
    if rank == 1:
        time.sleep(1)
        if who == "a peer":
            dist.distributed_c10d._abort_process_group()
        messages = [raised(gather_of, group)]
    else:
        messages = [raised(gather, group), raised(gather_of, group)]
    if timer.is_alive():
        timer.join()
    if dist.is_initialized():
        dist.destroy_process_group()
    init_group("cpu:sdma")
    return messages, gather()


@pytest.mark.parametrize(("who", "rank"), [("a peer", 1), ("another thread", 2)])
def test_abort_releases_all_ranks_and_a_new_group_works(who, rank):
    for messages, again in run(abort_while_waiting, who):
        for message in messages:
            assert f"rank {rank} aborted group " in message
        assert again == [0.0, 1.0, 2.0]


def abort_during_the_vote():
    if dist.get_rank() == 1:
        time.sleep(1)
        return None
    timer = threading.Timer(0.3, dist.group.WORLD.abort)
    timer.start()
    return raised(gather)


def test_abort_ends_the_vote():
    messages = run(abort_during_the_vote)
    assert messages[1] is None
    for rank in (0, 2):  # each may hear of the other's first
        assert re.search("rank [02] aborted group", messages[rank])


# -- destroy


def destroy_with_pending_works(peers):
    rank = dist.get_rank()
    gather()
    x = torch.ones(4)
    if rank > 0 and peers == "late":
        time.sleep(3)
        for _ in range(3):
            gather()
        dist.all_reduce(x)
        return None
    if rank > 0:
        time.sleep(0.5)
        dist.destroy_process_group()
        return None
    pending = [gather(async_op=True) for _ in range(3)]
    reduction = dist.all_reduce(x, async_op=True)  # put off behind them
    dist.destroy_process_group()
    assert reduction.is_completed() and all(work.is_completed() for work, _ in pending)
    if peers == "gone":
        return [raised(work.wait) for work, _ in pending]
    for work in (reduction, *(work for work, _ in pending)):
        work.wait()
    return [output.tolist() for _, output in pending], x.tolist()


def test_destroy_waits_for_what_peers_have_yet_to_make():
    gathered, reduced = run(destroy_with_pending_works, "late", timeout=30)[0]
    assert (gathered, reduced) == ([[0.0, 1.0, 2.0]] * 3, [3.0] * 4)


def test_destroy_with_works_that_peers_never_make_fails_them():
    for message in run(destroy_with_pending_works, "gone", timeout=30)[0]:
        assert re.search("waits for rank [12], which has destroyed the group", message)


def destroy_with_works_that_never_end():
    gather()
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    if dist.get_rank() > 0:
        return None
    reduction = dist.all_reduce(torch.ones(4), async_op=True)
    work, _ = gather(async_op=True)
    dist.group.WORLD.shutdown()
    assert reduction.is_completed()
    return raised(work.wait)


def test_destroy_ends_at_the_deadlines_of_what_is_pending():
    message, *_ = run(destroy_with_works_that_never_end, timeout=30)
    assert re.search("timed out after 1000 ms: rank [12] has not made this call", message)


def destroy_a_broken_group():
    """Half an hour is left to an operation of gloo, which peers have yet to make."""
    gather()
    if dist.get_rank() > 0:
        time.sleep(1)
        if dist.get_rank() == 1:
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        return None
    dist.all_reduce(torch.ones(4), async_op=True)
    work, _ = gather(async_op=True)
    dist.group.WORLD.shutdown()
    return raised(work.wait)


def test_destroy_of_a_broken_group_ends():
    message, *_ = run(destroy_a_broken_group, timeout=30)
    assert "rank 0 destroyed group" in message and "with operations pending" in message


def destroy_from_another_thread():
    group = dist.new_group()
    gather(group)
    got = []
    if dist.get_rank() == 0:
        thread = threading.Thread(target=lambda: got.append(gather(group)))
        thread.start()
        time.sleep(0.3)
        group.shutdown()
        thread.join(1)
    else:
        time.sleep(3)
        got.append(gather(group))
    dist.barrier()
    return got, gather()


def test_destroy_waits_for_a_call_in_another_thread():
    assert (
        run(destroy_from_another_thread, timeout=30)
        == [([[0.0, 1.0, 2.0]], [0.0, 1.0, 2.0])] * RANKS
    )


def leave_early():
    gather()
    if dist.get_rank() == 2:
        dist.destroy_process_group()
        return None
    return raised(gather)


def test_a_rank_that_has_destroyed_the_group_is_named():
    for message in run(leave_early)[:2]:
        assert "waits for rank 2, which has destroyed the group or is exiting" in message


def destroy_at_once(rounds):
    """Each rank leaves as soon as its own part is done; the peers may still be about theirs."""
    got = []
    for number in range(rounds):
        group = dist.new_group()
        if number % RANKS == dist.get_rank():
            time.sleep(0.01)
        got.append(gather(group))
        dist.destroy_process_group(group)
    return got


@pytest.mark.nightly
def test_ranks_that_leave_after_their_part_do_no_harm():
    assert run(destroy_at_once, 60, timeout=240) == [[[0.0, 1.0, 2.0]] * 60] * RANKS


# -- what is left


def belongings():
    """Descriptors, threads and shared memory of this process."""
    return {
        "descriptors": descriptors(),
        "threads": len(os.listdir("/proc/self/task")),
        "maps": sum("memfd:pg_sdma" in line for line in Path("/proc/self/maps").open()),
        "/dev/shm": sorted(os.listdir("/dev/shm")),
    }


def descriptors():
    """How many of each kind: the number in "socket:[123]" is another one each time."""
    kinds = collections.Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            kinds[re.sub(r"\[\d+\]", "", os.readlink(f"/proc/self/fd/{name}"))] += 1
    return kinds


def make_groups(rounds):
    """`rounds` times a few groups, used and destroyed. What this process has after each."""
    seen = []
    for _ in range(rounds):
        groups = [dist.new_group() for _ in range(4)]
        for group in groups:
            gather(group)
            work, _ = gather(group, async_op=True)
            work.wait()
        dist.barrier()
        for group in groups:
            dist.destroy_process_group(group)
        del group, groups, work
        dist.barrier()
        seen.append(belongings())
    return seen


def test_groups_leave_nothing_behind():
    for seen in run(make_groups, 5):
        # The first round may leave what torch keeps for good.
        for name in ("descriptors", "threads", "maps"):
            assert all(after[name] == seen[1][name] for after in seen[1:]), (name, seen)


def end_the_only_group():
    before = belongings()
    init_group("cpu:sdma")
    gather()
    gather(async_op=True)[0].wait()
    during = belongings()
    dist.destroy_process_group()
    return before, during, belongings()


def test_the_last_group_leaves_nothing_behind():
    for before, during, after in run(end_the_only_group, backend=None):
        assert during["maps"] > 0
        assert during["/dev/shm"] == before["/dev/shm"] == after["/dev/shm"]
        assert after["maps"] == 0
        assert during["descriptors"]["anon_inode:[pidfd]"] > 0
        for kind in ("anon_inode:[pidfd]", "/memfd:pg_sdma (deleted)"):
            assert after["descriptors"][kind] == 0
