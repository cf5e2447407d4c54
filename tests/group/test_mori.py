"""Gathers that go by mori: a stand-in for it, on CPU tensors."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from harness import init_group
from mori_ranks import RANKS, routes, run
from test_vote import gather


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
