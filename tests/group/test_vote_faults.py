"""Faults on purpose (PG_SDMA_INJECT) while a group votes: what the ranks see, and how soon.

docs/reliability.md lists these tests by fault.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, init_group, run_ranks
from survivors import RANKS, SLACK, check_survivors, gather, routes, seconds_to_raise

# -- creation: the whole group takes the inner, for one reason


def create_and_gather():
    init_group("cpu:sdma")
    return [gather(), gather()], routes()


@pytest.mark.parametrize(
    ("injection", "reason"),
    [
        ("engine=refuse@1", "rank 1: engine refused on purpose (PG_SDMA_INJECT)"),
        ("watch=refuse@2", "rank 2: watch refused on purpose (PG_SDMA_INJECT)"),
        ("memfd=refuse@0", "rank 0: memfd refused on purpose (PG_SDMA_INJECT)"),
        ("attach=refuse@2", "rank 2: attach refused on purpose (PG_SDMA_INJECT)"),
        ("export=refuse@1", "rank 1: export refused on purpose (PG_SDMA_INJECT)"),
        ("host=corrupt@2", "rank 2 is on another host, in another pid namespace"),
        ("self-test=corrupt@1", "the self-test got wrong bytes from rank 0"),
        (
            "self-test=corrupt#3@0",
            "the self-test got wrong bytes from rank 0 at shards of 1048576",
        ),
    ],
)
def test_a_fault_at_creation_sends_the_whole_group_to_the_inner(injection, reason):
    results = run_ranks(RANKS, create_and_gather, backend=None, env={"PG_SDMA_INJECT": injection})
    for right, counts in results:
        assert right == [True, True]
        assert counts == results[0][1]
    [route] = results[0][1]
    assert route.startswith("inner: ") and reason in route


@pytest.mark.nightly
@pytest.mark.parametrize("step", ["join", "engine", "attach", "voted-mapped", "voted-tested"])
def test_a_rank_that_is_late_in_the_vote_is_waited_for(step):
    env = {"PG_SDMA_INJECT": f"{step}=late:0.7@1"}
    for right, counts in run_ranks(RANKS, create_and_gather, backend=None, env=env):
        assert right == [True, True]
        assert counts == {"direct": 2}


def fork_of_the_vote():
    """A call whose memory cannot be shared goes to the inner on all ranks; the next one direct."""
    init_group("cpu:sdma")
    return [gather() for _ in range(3)], routes()


def test_an_export_that_is_refused_sends_one_call_to_the_inner():
    # The self-test exports three times, at the vote.
    env = {"PG_SDMA_INJECT": "export=refuse#5@1"}
    for right, counts in run_ranks(RANKS, fork_of_the_vote, backend=None, env=env):
        assert right == [True] * 3
        assert counts == {"direct": 2, "inner: memory that cannot be shared": 1}


# -- creation: a rank dies or stalls


def survive_the_vote():
    """The timeout is half an hour: who raises at once has noticed the death."""
    init_group("cpu:sdma")
    elapsed, message = seconds_to_raise(gather)
    assert elapsed < 10, elapsed
    assert "rank 1" in message and "process has ended" in message, message
    assert "rank 1" in seconds_to_raise(gather)[1]  # it stays broken


@pytest.mark.parametrize(
    "injection",
    [
        "carry=die#2@1",
        *(
            pytest.param(f"{point}=die@1", marks=pytest.mark.nightly)
            for point in (
                "engine",
                "voted-engine",
                "attach",
                "voted-mapped",
                "agree",
                "voted-tested",
            )
        ),
    ],
)
def test_a_rank_that_dies_in_the_vote_is_named_at_once(injection):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(RANKS, survive_the_vote, backend=None, env={"PG_SDMA_INJECT": injection})
    check_survivors(failure, 1)


VOTE_TIMEOUT = 3.0  # a vote takes its time where the machine is busy


def stall_in_the_vote():
    init_group("cpu:sdma")  # gloo, too
    dist.group.WORLD.set_timeout(timedelta(seconds=VOTE_TIMEOUT))
    return seconds_to_raise(gather)


@pytest.mark.nightly
@pytest.mark.parametrize("step", ["engine", "voted-mapped", "carry", "voted-tested"])
def test_a_rank_that_stalls_in_the_vote_is_named_after_the_timeout(step):
    env = {"PG_SDMA_INJECT": f"{step}=late:{2 * VOTE_TIMEOUT}#1@1"}
    results = run_ranks(RANKS, stall_in_the_vote, backend=None, env=env)
    for rank in (0, 2):
        elapsed, message = results[rank]
        assert elapsed < VOTE_TIMEOUT + SLACK
        assert "rank 1" in message


def begin_with(operation):
    init_group("cpu:sdma")
    dist.group.WORLD.set_timeout(timedelta(seconds=VOTE_TIMEOUT))
    if dist.get_rank() != 1:
        return seconds_to_raise(gather)[1]
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(torch.ones(1)) if operation == "allreduce" else dist.barrier()
    return str(error.value)


@pytest.mark.parametrize(
    "operation", ["allreduce", pytest.param("barrier", marks=pytest.mark.nightly)]
)
def test_a_first_gather_against_another_operation_names_it(operation):
    """In the vote, before there is a page on which ranks tell what they do."""
    told = f"in vain for rank 1 (whose first operation in this group was {operation}) to make it"
    messages = run_ranks(RANKS, begin_with, operation, backend=None)
    assert told in messages[0] and told in messages[2], messages
