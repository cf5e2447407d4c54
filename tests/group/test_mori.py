"""Groups whose all-gathers go by mori: a stand-in for it, on CPU tensors."""

from __future__ import annotations

import os
import re

import pytest
import torch
import torch.distributed as dist
from harness import init_group, run_ranks
from mori_ranks import LEAST, use_fake_mori
from test_vote import gather, gather_with

RANKS = 3
MORI = {
    "PG_SDMA_TRANSPORT": "mori",
    "PG_SDMA_MORI_ON_CPU": "1",
    "PG_SDMA_MORI_BYTES": str(LEAST),
}


def run(function, *args, env=(), ranks=RANKS, **options):
    return run_ranks(
        ranks, with_mori, function, args, env=MORI | dict(env), backend=None, **options
    )


def with_mori(function, args):
    use_fake_mori()
    return function(*args)


def routes():
    """Calls of the default group by operation and route."""
    import pg_sdma

    return {
        operation: {route: count["calls"] for route, count in by_route.items()}
        for operation, by_route in pg_sdma.stats().items()
    }


def gather_every_way():
    import pg_sdma

    init_group("cpu:sdma")
    before = pg_sdma.transports()
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(5)
    right = []
    for number, size in enumerate([0, 1, 3, 4, 4095, 12_288, 12_289, 50_001] * 3):
        shards = [
            torch.randint(0, 256, (size,), generator=random, dtype=torch.uint8)
            for _ in range(world)
        ]
        output = torch.bitwise_not(torch.cat(shards))
        own = shards[rank].clone()
        if number % 4 == 3:  # in place
            own = output.narrow(0, rank * size, size).copy_(own)
        async_op = number % 3 == 0
        if number % 4 == 1:
            lists = [torch.full((size,), 7, dtype=torch.uint8) for _ in range(world)]
            work = dist.all_gather(lists, own, async_op=async_op)
            if work is not None:
                work.wait()
            output = torch.cat(lists)
        elif number % 4 == 2:
            second = torch.full((2, 5 * world), -1.0, dtype=torch.float16).t()
            halves = torch.full((5, 2), float(rank), dtype=torch.float16)
            with dist._coalescing_manager(async_ops=True) as manager:
                dist.all_gather_into_tensor(output, own)
                dist.all_gather_into_tensor(second, halves)
            manager.wait()
            right.append(
                torch.equal(
                    second, torch.arange(world).half().repeat_interleave(5)[:, None].expand(-1, 2)
                )
            )
        else:
            work = dist.all_gather_into_tensor(output, own, async_op=async_op)
            if work is not None:
                work.wait()
        # The inner's come in between, in order.
        total = torch.full((1,), float(number))
        dist.all_reduce(total)
        own.fill_(0x5A) if number % 4 != 3 else None
        right += [torch.equal(output, torch.cat(shards)), total.item() == world * number]
    return right, routes(), before, pg_sdma.transports()


@pytest.mark.parametrize("only", ["", "AllGatherIntoTensor"])
def test_every_form_goes_by_mori(only):
    env = {"FAKE_MORI_RACE": "0.1", "FAKE_MORI_ONLY": only, "PG_SDMA_STRICT": "1"}
    for right, counts, before, after in run(gather_every_way, env=env):
        assert all(right)
        assert {route for by_route in counts.values() for route in by_route} == {"direct"}
        assert before == {"cpu": "no vote yet"}
        assert after == {"cpu": "mori"}


def vote_with(by_rank):
    """test_vote.gather_with, and what carried the gathers, and whether mori was imported."""
    import sys

    import pg_sdma

    right, counts, lines = gather_with(by_rank)
    return right, counts, lines, pg_sdma.transports()["cpu"], "mori" in sys.modules


def same(**env):
    return [env] * RANKS


def one(rank, **env):
    return [env if r == rank else {} for r in range(RANKS)]


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
        (one(2, PG_SDMA_INJECT="self-test=corrupt"), "rank 2: the self-test read wrong bytes"),
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


def test_auto_takes_mori_where_pulls_fail_their_self_test_and_says_so():
    by_rank = one(1, PG_SDMA_INJECT="self-test=corrupt#1")
    for rank, (right, counts, lines, way, _) in enumerate(
        run(vote_with, by_rank, env={"PG_SDMA_TRANSPORT": "auto"})
    ):
        assert right == [True, True]
        assert counts == {"direct": 2}
        assert way == "mori"
        if rank == 0:
            assert "go by mori, because reading it is refused: rank 1: the self-test" in lines[0]


def test_auto_gives_both_reasons_where_neither_can():
    env = {"PG_SDMA_TRANSPORT": "auto", "FAKE_MORI_BROKEN": "import"}
    by_rank = one(1, PG_SDMA_INJECT="self-test=corrupt#1")
    for _, counts, *_ in run(vote_with, by_rank, env=env):
        [route] = counts
        assert route.startswith("inner: rank 1: the self-test read wrong bytes")
        assert "; and by mori: rank 0: mori cannot be imported" in route


@pytest.mark.parametrize(
    "env",
    [
        {"PG_SDMA_TRANSPORT": "auto"},
        {"PG_SDMA_MORI_ON_CPU": "0"},  # CPU tensors are none of mori's
    ],
    ids=str,
)
def test_where_pulls_do_mori_is_not_imported(env):
    for _, counts, _, way, imported in run(vote_with, same(), env=env):
        assert counts == {"direct": 2}
        assert way in ("pull", "slots")
        assert not imported


def vote_without(pulls_on, without):
    """vote_with, where the ranks `without` are not built for mori, and pulls are `pulls_on`."""
    from pg_sdma import mori_transport

    os.environ["PG_SDMA_INJECT"] = "self-test=corrupt@1"
    mori_on = () if int(os.environ["RANK"]) in without else ("cpu",)
    found = mori_transport.Where(pulls_on, mori_on, "no mori here")
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


def gather_wrongly():
    init_group("cpu:sdma")
    rank, world = dist.get_rank(), dist.get_world_size()
    right = [gather()]
    size = 8 if rank == 1 else 4
    try:
        dist.all_gather_into_tensor(torch.empty(size * world), torch.empty(size))
        message = ""
    except RuntimeError as error:
        message = str(error)
    right.append(gather(64))
    return right, message, routes()


def test_calls_that_do_not_fit_together_raise_everywhere_and_leave_the_group_whole():
    for right, message, counts in run(gather_wrongly):
        assert right == [True, True]
        assert "the ranks' calls do not fit together" in message
        assert set(counts["all_gather_into_tensor"]) == {"direct"}


def gather_alone():
    import pg_sdma

    init_group("cpu:sdma")
    return gather(), pg_sdma.transports()["cpu"]


def test_one_rank_alone_has_nobody_to_ask():
    [(right, way)] = run(gather_alone, ranks=1)
    assert right
    assert way in ("pull", "slots")


def fail_in_mori():
    from pg_sdma import mori_transport

    init_group("cpu:sdma")
    gather()

    def out_of_order(self, input, outputs):
        raise RuntimeError("mori is out of order")

    mori_transport.MoriGather.gather = out_of_order
    messages = []
    for _ in range(2):
        try:
            gather()
        except dist.DistBackendError as error:
            messages.append(str(error))
    return messages


def test_what_mori_raises_breaks_the_group_with_its_words():
    for messages in run(fail_in_mori):
        assert len(messages) == 2
        assert all("mori is out of order" in message for message in messages)


def fail_in_the_self_test():
    from pg_sdma import mori_transport

    def no_compiler(self, input, outputs):
        raise RuntimeError("no hipcc")

    mori_transport.MoriGather.gather = no_compiler
    return vote_with(same())


def test_a_mori_that_fails_in_its_first_gather_leaves_the_group_to_the_inner():
    for right, _, _, way, _ in run(fail_in_the_self_test):
        assert right and re.match(r"inner: rank \d: .*no hipcc", way)


def interrupt_a_gather():
    from pg_sdma import mori_transport

    init_group("cpu:sdma")
    gather()

    def interrupted(self, shard):
        raise KeyboardInterrupt

    mori_transport.MoriGather._gather_chunk = interrupted
    with pytest.raises(dist.DistBackendError) as raised:
        gather()
    return str(raised.value)


def test_an_interrupt_in_a_gather_is_named():
    for message in run(interrupt_a_gather):
        assert ": KeyboardInterrupt" in message


def keep_the_threads_place():
    before = os.sched_getaffinity(0)
    init_group("cpu:sdma")
    gather()
    return before, os.sched_getaffinity(0), os.environ["MORI_ENABLE_SDMA"]


def test_the_calling_thread_keeps_its_cores():
    for before, after, enabled in run(keep_the_threads_place):
        assert before == after
        assert enabled == "1"


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


DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.int64, torch.bool]


def gather_at_random(count):
    """The numbers of the gathers that came wrong, and what went which way."""
    init_group("cpu:sdma")
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(count)
    pending = []
    wrong = []

    def check(number, work, output, expected):
        if work is not None:
            work.wait()
        if not torch.equal(output.view(torch.uint8), expected):
            wrong.append(number)

    for number in range(count):
        draw = [int(n) for n in torch.randint(1 << 20, (5,), generator=random)]
        dtype = DTYPES[draw[0] % len(DTYPES)]
        bits = 2 if dtype == torch.bool else 256
        size = draw[1] % (300 if draw[2] % 8 else 20_000) * dtype.itemsize
        expected = torch.randint(bits, (world, size), generator=random, dtype=torch.uint8)
        output = (1 - expected if bits == 2 else ~expected).view(-1).view(dtype)
        own = expected[rank].clone().view(dtype)
        if draw[3] % 4 == 0:
            own = output.chunk(world)[rank].copy_(own) if size else own
        async_op = draw[4] % 2 == 0
        if draw[3] % 4 == 1 and size:
            work = dist.all_gather(list(output.chunk(world)), own, async_op=async_op)
        else:
            work = dist.all_gather_into_tensor(output, own, async_op=async_op)
        pending.append((number, work, output, expected.view(-1)))
        if work is None or draw[3] % 3 == 0:  # asynchronous ones pile up
            for gathered in pending:
                check(*gathered)
            pending.clear()
    for gathered in pending:
        check(*gathered)
    return wrong, routes()


def check_random_gathers(count, ranks=RANKS, **options):
    env = {"FAKE_MORI_RACE": "0.05"}
    for wrong, counts in run(gather_at_random, count, env=env, ranks=ranks, **options):
        assert wrong == []
        assert {route for by_route in counts.values() for route in by_route} == {"direct"}


def test_random_gathers_of_a_racing_mori():
    check_random_gathers(300)


@pytest.mark.nightly
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("ranks", [2, 4])
def test_5000_random_gathers_of_a_racing_mori(ranks):
    check_random_gathers(5000, ranks, timeout=900.0)
