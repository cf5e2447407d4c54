"""When a group goes by mori, and what the log and the reasons say of it: a stand-in for mori."""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.distributed as dist
from harness import init_group
from mori_ranks import one, run, same
from test_vote import gather, gather_with


def vote_with(by_rank):
    """test_vote.gather_with, and what carried the gathers, and whether mori was imported."""
    import sys

    import pg_sdma

    right, counts, lines = gather_with(by_rank)
    return right, counts, lines, pg_sdma.transports()["cpu"], "mori" in sys.modules


def test_the_log_names_what_carries():
    for rank, (right, counts, lines, way, _) in enumerate(run(vote_with, same())):
        assert right == [True, True]
        assert counts == {"direct": 2}
        assert way == "mori"
        if rank == 0:
            assert len(lines) == 1 and lines[0].endswith("all-gathers go by mori")


@pytest.mark.parametrize(
    ("by_rank", "reason"),
    [
        (
            one(1, FAKE_MORI_BROKEN="import"),
            "rank 1: mori cannot be imported: OSError: libamdhip64.so.7: cannot open shared object "
            "file: No such file or directory",
        ),
        (same(FAKE_MORI_BROKEN="init"), "rank 0: mori's shmem_init_attr returned -1"),
        (one(0, MORI_ENABLE_SDMA="0"), "rank 0: MORI_ENABLE_SDMA=0"),
        (
            one(1, FAKE_MORI_ONLY="nothing"),
            "rank 1: this mori has no ccl.AllgatherSdma; this mori has no ccl.AllGatherIntoTensor",
        ),
        (one(2, PG_SDMA_INJECT="self-test=corrupt"), "rank 2: the self-test got wrong bytes"),
        (
            same(PG_SDMA_MORI_BYTES=str(2 << 20), MORI_SHMEM_HEAP_SIZE="1M"),
            "rank 0: Out of static heap memory!",
        ),
    ],
    ids=["import", "init", "variable", "class", "bytes", "memory"],
)
def test_one_rank_without_mori_sends_all_to_the_inner(by_rank, reason):
    for rank, (right, counts, lines, way, _) in enumerate(run(vote_with, by_rank)):
        assert right == [True, True]
        [route] = counts
        assert route.startswith(f"inner: {reason}")
        assert way == route
        assert len(lines) == (rank == 0)


def test_auto_takes_mori_where_peer_copies_fail_their_self_test_and_says_so():
    by_rank = one(1, PG_SDMA_INJECT="self-test=corrupt#1")
    for rank, (right, counts, lines, way, _) in enumerate(
        run(vote_with, by_rank, env={"PG_SDMA_TRANSPORT": "auto"})
    ):
        assert right == [True, True]
        assert counts == {"direct": 2}
        assert way == "mori"
        if rank == 0:
            assert (
                "go by mori, because copies between the ranks are refused: rank 1: the self-test"
                in lines[0]
            )


def test_auto_gives_both_reasons_where_neither_can():
    env = {"PG_SDMA_TRANSPORT": "auto", "FAKE_MORI_BROKEN": "import"}
    by_rank = one(1, PG_SDMA_INJECT="self-test=corrupt#1")
    for _, counts, *_ in run(vote_with, by_rank, env=env):
        [route] = counts
        assert route.startswith("inner: rank 1: the self-test got wrong bytes")
        assert "; and by mori: rank 0: mori cannot be imported" in route


@pytest.mark.parametrize(
    "env",
    [
        {"PG_SDMA_TRANSPORT": "auto"},
        {"PG_SDMA_MORI_ON_CPU": "0"},  # CPU tensors are none of mori's
    ],
    ids=str,
)
def test_where_peer_copies_do_mori_is_not_imported(env):
    for _, counts, _, way, imported in run(vote_with, same(), env=env):
        assert counts == {"direct": 2}
        assert way in ("pull", "slots")
        assert not imported


def vote_without(peer_copies_on, without):
    """vote_with, where the ranks `without` are not built for mori."""
    from pg_sdma import mori_transport

    os.environ["PG_SDMA_INJECT"] = "self-test=corrupt@1"
    mori_on = () if int(os.environ["RANK"]) in without else ("cpu",)
    found = mori_transport.Where(peer_copies_on, mori_on, "no mori here")
    mori_transport.where = lambda settings: found
    return vote_with(same())


def test_a_rank_that_is_not_built_for_mori_is_not_asked_for_it():
    for _, counts, _, _, imported in run(vote_without, ("cpu",), (2,)):
        [route] = counts
        assert route.startswith("inner: rank 1: the self-test") and "mori" not in route
        assert not imported


def test_where_mori_is_asked_for_and_there_is_none_the_reason_says_so():
    for _, counts, *_ in run(vote_without, (), (0, 1, 2)):
        assert counts == {"inner: no mori here": 2}


def test_ranks_that_want_different_transports_use_the_inner():
    for _, counts, *_ in run(vote_with, one(1, PG_SDMA_TRANSPORT="auto")):
        [route] = counts
        assert route.startswith("inner: settings differ")


def gather_in_groups():
    """What carries a part, and the whole job twice."""
    import pg_sdma

    init_group("cpu:sdma")
    part = dist.new_group([0, 1])
    again = dist.new_group(range(dist.get_world_size()))
    ways = []
    for group in (part, None, again):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            member = dist.get_rank(group) >= 0
            world = dist.get_world_size(group)
            own = torch.full((5,), float(dist.get_rank(group)))
            output = torch.full((5 * world,), -1.0)
            dist.all_gather_into_tensor(output, own, group=group)
            assert member and torch.equal(output, torch.arange(world).float().repeat_interleave(5))
            ways.append(pg_sdma.transports(group)["cpu"])
    return ways


def test_a_part_of_the_job_and_a_second_world_are_refused():
    results = run(gather_in_groups)
    for rank, ways in enumerate(results):
        *parts, whole, again = ways
        assert whole == "mori"
        assert again.startswith("inner: rank 0: mori's one SHMEM world a process is that of group ")
        assert len(parts) == (rank < 2)
        for way in parts:
            assert way.startswith("inner: rank 0: a group of part of the job")


def gather_after_a_foreign_world():
    import mori.shmem.api

    import pg_sdma

    init_group("cpu:sdma")
    if dist.get_rank() == 1:
        mori.shmem.api._shmem_module_loaded_gpus.add(0)
    return gather(), pg_sdma.transports()["cpu"]


def test_a_world_that_other_code_made_is_not_touched():
    for right, way in run(gather_after_a_foreign_world):
        assert right
        assert way == (
            "inner: rank 1: something else in this process has made mori's one SHMEM world"
        )


def gather_alone():
    import pg_sdma

    init_group("cpu:sdma")
    return gather(), pg_sdma.transports()["cpu"]


def test_one_rank_alone_has_nobody_to_ask():
    [(right, way)] = run(gather_alone, ranks=1)
    assert right
    assert way in ("pull", "slots")


def fail_in_the_self_test():
    from pg_sdma import mori_transport

    def no_compiler(self, input, outputs):
        raise RuntimeError("no hipcc")

    mori_transport.MoriGather.gather = no_compiler
    return vote_with(same())


def test_a_mori_that_fails_in_its_first_gather_leaves_the_group_to_the_inner():
    for right, _, _, way, _ in run(fail_in_the_self_test):
        assert right and re.match(r"inner: rank \d: .*no hipcc", way)


def make_groups_again():
    """What carries the default group of two lives, and an exit with the second alive."""
    import pg_sdma

    ways = []
    for _ in range(2):
        init_group("cpu:sdma")
        assert gather()
        ways.append(pg_sdma.transports()["cpu"])
        dist.barrier()
        if len(ways) < 2:
            dist.destroy_process_group()
    return ways


def test_a_process_has_one_life_with_mori():
    for first, second in run(make_groups_again):
        assert first == "mori"
        assert second.startswith("inner: rank 0: mori's one SHMEM world a process")
