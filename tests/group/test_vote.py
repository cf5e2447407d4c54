"""Which way a group's all-gathers go is decided once, on all ranks alike, with the reason given."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, init_group, run_ranks

RANKS = 3


def set_environment(by_rank):
    """Sets each rank's own variables: `by_rank` has one dict for each."""
    os.environ.update(by_rank[int(os.environ["RANK"])])


def gather(size=4, dtype=torch.float32, group=None):
    """Gathers `size` bytes a rank and returns whether they came right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = [torch.arange(size).add(r).remainder(2).to(torch.uint8) for r in range(world)]
    input = shards[rank].view(dtype)
    output = torch.full((size * world,), 7, dtype=torch.uint8).view(dtype)
    dist.all_gather_into_tensor(output, input, group)
    return torch.equal(output.view(torch.uint8), torch.cat(shards))


def routes():
    """Calls by route of the default group's all-gathers."""
    import pg_sdma

    [counts] = pg_sdma.stats().values()
    return {route: count["calls"] for route, count in counts.items()}


def gather_with(by_rank, sizes=(4, 4096)):
    import pg_sdma  # noqa: F401  its logger has to be there

    set_environment(by_rank)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    logging.getLogger("pg_sdma").addHandler(handler)
    logging.getLogger("pg_sdma").setLevel(logging.INFO)
    init_group("cpu:sdma")
    right = [gather(size) for size in sizes]
    return right, routes(), lines


def check_inner(results, reason, level="INFO"):
    for rank, (right, counts, lines) in enumerate(results):
        assert right == [True, True]
        assert counts == {f"inner: {reason}": 2}
        if rank > 0:
            assert lines == []
            continue
        [line] = lines
        assert line.startswith(f"{level} group ") and line.endswith(
            f"all-gathers use gloo: {reason}"
        )


def test_direct_where_nothing_speaks_against_it():
    for rank, (right, counts, lines) in enumerate(run(gather_with, [{}] * RANKS)):
        assert right == [True, True]
        assert counts == {"direct": 2}
        assert [line.split(": ")[1] for line in lines] == (
            ["all-gathers read the peers' memory directly"] if rank == 0 else []
        )


def run(function, *args, **options):
    return run_ranks(RANKS, function, *args, backend=None, **options)


@pytest.mark.parametrize("off", [(1,), (0, 2), (0, 1, 2)])
def test_one_rank_with_off_decides_for_all(off):
    by_rank = [{"PG_SDMA": "off" if rank in off else "on"} for rank in range(RANKS)]
    check_inner(run(gather_with, by_rank), f"PG_SDMA=off on rank {off[0]}")


def test_settings_that_have_to_match_and_do_not():
    results = run(gather_with, [{}, {}, {"PG_SDMA_MIN_BYTES": "12"}])
    [reason] = {reason for _, counts, _ in results for reason in counts}
    assert reason == (
        "inner: settings differ: rank 0 has PG_SDMA_MIN_BYTES=default, "
        "rank 2 has PG_SDMA_MIN_BYTES=12"
    )
    check_inner(results, reason.removeprefix("inner: "), "WARNING")


def levels_of_two_groups(by_rank):
    import pg_sdma  # noqa: F401  its logger has to be there

    set_environment(by_rank)
    levels = []
    handler = logging.Handler()
    handler.emit = lambda record: levels.append(record.levelname)
    logging.getLogger("pg_sdma").addHandler(handler)
    logging.getLogger("pg_sdma").setLevel(logging.INFO)
    init_group("cpu:sdma")
    gather()
    gather(group=dist.new_group())
    return levels


def test_settings_that_differ_are_warned_of_once():
    levels = run(levels_of_two_groups, [{}, {}, {"PG_SDMA_MIN_BYTES": "12"}])
    assert levels == [["WARNING", "INFO"], [], []]


def test_settings_that_need_not_match():
    for _, counts, _ in run(gather_with, [{"PG_SDMA_PTRACER": "0"}, {}, {"PG_SDMA_DRIVER": "x"}]):
        assert counts == {"direct": 2}


def gather_strictly(by_rank):
    set_environment(by_rank)
    init_group("cpu:sdma")
    outcomes = []
    for size in (4, 4096):
        try:
            outcomes.append(gather(size))
        except RuntimeError as error:
            outcomes.append(str(error))
    dist.barrier()  # the group is in step
    return outcomes


STRICT = {"PG_SDMA_STRICT": "1"}


@pytest.mark.parametrize(
    ("by_rank", "small", "large"),
    [
        ([STRICT] * RANKS, True, True),
        # The inner was asked for, by everybody.
        ([STRICT | {"PG_SDMA": "off"}] * RANKS, True, True),
        # By one rank only: the others have not, and it must not wait for them in the inner.
        (
            [STRICT, STRICT | {"PG_SDMA": "off"}, STRICT],
            "PG_SDMA=off on rank 1",
            "PG_SDMA=off on rank 1",
        ),
        (
            [STRICT | {"PG_SDMA_MIN_BYTES": "4096"}] * RANKS,
            "below 4096 bytes (PG_SDMA_MIN_BYTES) (12 bytes in 1 tensor)",
            True,
        ),
    ],
)
def test_strict_raises_instead_of_the_inner_on_every_rank(by_rank, small, large):
    for rank, outcomes in enumerate(run(gather_strictly, by_rank)):
        for outcome, expected in zip(outcomes, (small, large), strict=True):
            if expected is True:
                assert outcome is True
                continue
            assert outcome.startswith(f"rank {rank}: PG_SDMA_STRICT=1: all_gather_into_tensor of ")
            assert expected in outcome


def test_small_calls_go_to_the_inner():
    by_rank = [{"PG_SDMA_MIN_BYTES": "12288"}] * RANKS
    for right, counts, _ in run(gather_with, by_rank, (4, 4096)):
        assert right == [True, True]
        assert counts == {"inner: below 12288 bytes (PG_SDMA_MIN_BYTES)": 1, "direct": 1}


def come_late():
    init_group("cpu:sdma")
    if dist.get_rank() == 2:
        time.sleep(3)
    return gather(), routes()


def test_a_rank_that_is_late_for_the_first_gather():
    assert run(come_late) == [(True, {"direct": 1})] * RANKS


def lose_a_rank():
    """The group's timeout is half an hour: who raises here has noticed the death itself."""
    init_group("cpu:sdma")
    if dist.get_rank() == 1:
        time.sleep(0.2)  # so that the others wait already
        os._exit(7)
    with pytest.raises(dist.DistBackendError) as error:
        gather()
    assert f"rank {dist.get_rank()}: the first direct operation of group" in str(error.value)
    assert "waits for rank 1, whose process has ended" in str(error.value)
    with pytest.raises(dist.DistBackendError, match="waits for rank 1"):
        gather()  # it stays broken


def come_too_late():
    init_group("cpu:sdma", timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(2)
        return None
    with pytest.raises(dist.DistBackendError) as error:
        gather()
    return str(error.value)


def test_a_rank_that_never_comes_to_the_vote():
    messages = run(come_too_late)
    for rank in (0, 2):
        assert f"rank {rank}: the first direct operation of group" in messages[rank]
        assert "waited 1000 ms in vain for rank 1 to make it" in messages[rank]


def test_a_rank_that_dies_before_the_vote():
    with pytest.raises(RanksFailed) as failure:
        run(lose_a_rank)
    report = str(failure.value)
    assert "rank 0: passed" in report and "rank 2: passed" in report
    assert "rank 1: died with exit code 7" in report


# -- patience


DTYPES = (torch.uint8, torch.int16, torch.float32, torch.complex64, torch.uint32, torch.bool)


def be_late(calls):
    """One rank after the other comes later than the peers have patience for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right = []
    for number in range(calls):
        if number % world == rank:
            time.sleep(0.03)
        right.append(gather(4096, DTYPES[number % len(DTYPES)]))
    outputs = [torch.full((world,), -1, dtype=torch.int16) for _ in range(70)]
    inputs = [torch.full((1,), 10 * rank + t, dtype=torch.int16) for t in range(70)]
    if rank == 0:
        time.sleep(0.03)
    with dist._coalescing_manager(async_ops=True) as work:
        for output, input in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, input)
    work.wait()
    right += [o.tolist() == [10 * r + t for r in range(world)] for t, o in enumerate(outputs)]
    # Tensors that are not contiguous arrive by way of copies, whichever way they take.
    if rank == 1:
        time.sleep(0.03)
    strided = [torch.zeros(4, 2)[:, 0] for _ in range(world)]
    dist.all_gather(strided, torch.full((4, 2), float(rank))[:, 1])
    right += [part.tolist() == [float(r)] * 4 for r, part in enumerate(strided)]
    import pg_sdma

    return all(right), pg_sdma.stats()


@pytest.mark.parametrize("ring", ["2", "16"])
def test_late_ranks_send_calls_to_the_inner_on_all_ranks_alike(ring):
    env = {"PG_SDMA_PATIENCE_MS": "2", "PG_SDMA_RING": ring}
    results = run_ranks(RANKS, be_late, 24, env=env)
    assert [right for right, _ in results] == [True] * RANKS
    stats = results[0][1]
    assert [counts for _, counts in results] == [stats] * RANKS
    assert stats["all_gather_into_tensor"]["inner: late"]["calls"] > 0
    # On a busy machine the others may be as late as rank 1.
    assert list(stats["all_gather"].values()) == [{"calls": 1, "bytes": 48}]


def be_late_with_bad_arguments():
    """The peers have gone to the inner by the time the bad call is made: it still has to raise."""
    gather()
    if dist.get_rank() == 0:
        time.sleep(0.1)
        with pytest.raises(RuntimeError, match="expected an output of 12 elements"):
            dist.all_gather_into_tensor(torch.empty(11), torch.ones(4))
    else:
        work = dist.all_gather_into_tensor(torch.empty(12), torch.ones(4), async_op=True)
    # The inner's gather of the others is completed by hand, as a plain gloo group would need it.
    if dist.get_rank() == 0:
        inner = dist.group.WORLD._get_backend(torch.device("cpu")).inner("cpu")
        outputs = [torch.empty(16, dtype=torch.uint8) for _ in range(RANKS)]
        options = dist.distributed_c10d.AllgatherOptions()
        inner.allgather([outputs], [torch.zeros(16, dtype=torch.uint8)], options).wait()
    else:
        work.wait()
    return gather(), routes()


def test_bad_arguments_that_come_late():
    env = {"PG_SDMA_PATIENCE_MS": "2"}
    for right, _ in run_ranks(RANKS, be_late_with_bad_arguments, env=env):
        assert right


def issue_many(calls):
    """More pending gathers than the ring has slots, waited for from the last to the first."""
    rank, world = dist.get_rank(), dist.get_world_size()
    outputs = [torch.full((world,), -1.0) for _ in range(calls)]
    works = []
    for number, output in enumerate(outputs):
        if number % 7 == rank:
            time.sleep(0.002)
        input = torch.full((1,), float(number + rank))
        works.append(dist.all_gather_into_tensor(output, input, async_op=True))
    for work in reversed(works):
        work.wait()
    return all(
        output.tolist() == [number + r for r in range(world)]
        for number, output in enumerate(outputs)
    )


def test_a_ring_of_two_slots():
    assert run_ranks(RANKS, issue_many, 200, env={"PG_SDMA_RING": "2"}) == [True] * RANKS
