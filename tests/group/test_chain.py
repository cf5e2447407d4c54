"""The collectives of a group run in the order in which they are issued, whichever way they go.

The peers of a rank are made late by turns, so that what is issued behind a pending gather is put
off there and not elsewhere.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

RANKS = 3
N = 1 << 18  # floats: long enough for gloo to be still at it when the next call is made


def here():
    return dist.get_rank(), dist.get_world_size()


def late(turn):
    """Holds one rank back, each by turns."""
    if turn % RANKS == dist.get_rank():
        time.sleep(0.02)


def shards_of(output):
    """What arrived of each rank, where each sent one number only."""
    return [part.unique_consecutive().tolist() for part in output.chunk(RANKS)]


def all_gather(output, input, **options):
    return dist.all_gather_into_tensor(output, input, **options)


# -- order


def gather_then_reduce():
    """An inner collective on the output of a gather that nobody has waited for."""
    rank, _ = here()
    for turn in range(12):
        late(turn)
        output = torch.full((RANKS * N,), -1.0)
        work = all_gather(output, torch.full((N,), float(rank + turn)), async_op=True)
        dist.all_reduce(output)
        if shards_of(output) != [[3.0 * (r + turn)] for r in range(RANKS)]:
            return f"turn {turn}: {shards_of(output)}"
        work.wait()
    return None


def reduce_then_gather(inners_between, async_op):
    """A gather of what an inner collective, or the first of several, has yet to write."""
    rank, _ = here()
    for turn in range(6):
        late(turn)
        x = torch.full((8 * N,), float(rank + turn))
        output = torch.full((RANKS * 8 * N,), -1.0)
        works = [dist.all_reduce(x, async_op=True)]
        works += [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(inners_between)]
        gather = all_gather(output, x, async_op=async_op)
        if async_op:
            gather.wait()
        if shards_of(output) != [[3.0 + 3 * turn]] * RANKS:
            return f"turn {turn}: {shards_of(output)}"
        for work in works:
            work.wait()
    return None


def strided_reduce_then_gather():
    """The same with an input that has to be made contiguous first."""
    rank, _ = here()
    for turn in range(12):
        late(turn)
        x = torch.full((N, 2), float(rank + turn))
        output = torch.full((RANKS * N,), -1.0)
        work = dist.all_reduce(x, async_op=True)
        all_gather(output, x[:, 0])
        if shards_of(output) != [[3.0 + 3 * turn]] * RANKS:
            return f"turn {turn}: {shards_of(output)}"
        work.wait()
    return None


def gathers_and_reductions_by_turns():
    """Each operation reads what the one before it writes; only the last is waited for."""
    rank, _ = here()
    for turn in range(8):
        late(turn)
        x = torch.full((N,), float(rank + 1))
        wholes = [torch.full((RANKS * N,), -1.0) for _ in range(3)]
        works = []
        for whole in wholes:
            works.append(all_gather(whole, x, async_op=True))
            works.append(dist.all_reduce(whole, async_op=True))
            x = whole[rank * N : (rank + 1) * N]
        works[-1].wait()
        if shards_of(wholes[-1]) != [[27.0], [54.0], [81.0]]:
            return f"turn {turn}: {[shards_of(whole) for whole in wholes]}"
        for work in works:
            work.wait()
    return None


def two_threads():
    """Gathers and reductions of one tensor, issued from two threads by turns."""
    rank, _ = here()
    x = torch.full((64,), 1.0)
    output = torch.zeros(RANKS * 64)
    turn = threading.Condition()
    state = {"next": 0, "failed": None}

    def run(mine):
        for number in range(mine, 60, 2):
            with turn:
                turn.wait_for(lambda n=number: state["next"] == n)
                if number % RANKS == rank:
                    time.sleep(0.002)
                if number % 3 == 0:
                    dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=number % 2 == 0)
                else:
                    all_gather(output, x, async_op=number % 4 == 1)
                    dist.all_reduce(output, op=dist.ReduceOp.MAX)
                    if output.unique().tolist() != [1.0]:
                        state["failed"] = f"turn {number}: {output.unique().tolist()}"
                    output.zero_()
                state["next"] += 1
                turn.notify_all()

    threads = [threading.Thread(target=run, args=(mine,)) for mine in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    return state["failed"]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (gather_then_reduce, ()),
        (reduce_then_gather, (0, False)),
        (reduce_then_gather, (1, False)),
        (reduce_then_gather, (0, True)),
        (reduce_then_gather, (1, True)),
        (strided_reduce_then_gather, ()),
        (gathers_and_reductions_by_turns, ()),
        (two_threads, ()),
    ],
)
def test_order(ranks, function, args):
    assert ranks(RANKS).run(function, *args) == [None] * RANKS


# -- every inner collective, put off behind a gather


def everything_behind_a_gather():
    rank, world = here()
    shape = (world, 2)
    ones = [torch.full((2,), float(rank)) for _ in range(world)]
    calls = {
        "broadcast": lambda x, y: dist.broadcast(x, 1, async_op=True),
        "all_reduce": lambda x, y: dist.all_reduce(x, async_op=True),
        "all_reduce_coalesced": lambda x, y: dist.all_reduce_coalesced([x, y], async_op=True),
        "reduce": lambda x, y: dist.reduce(x, 2, async_op=True),
        "gather": lambda x, y: dist.gather(
            x[0], list(y) if rank == 0 else None, dst=0, async_op=True
        ),
        "scatter": lambda x, y: dist.scatter(
            y[0], ones if rank == 1 else None, src=1, async_op=True
        ),
        "reduce_scatter": lambda x, y: dist.reduce_scatter(y[0], list(x), async_op=True),
        "reduce_scatter_tensor": lambda x, y: dist.reduce_scatter_tensor(y[:1], x, async_op=True),
        "all_to_all_single": lambda x, y: dist.all_to_all_single(y, x, async_op=True),
        "barrier": lambda x, y: dist.barrier(async_op=True),
    }
    got = {}
    for pending in (False, True):
        for name, call in calls.items():
            x = torch.arange(2.0 * world).view(shape) + 10 * rank
            y = torch.full(shape, -1.0)
            output = torch.full((world,), -1.0)
            if pending:
                before = all_gather(output, torch.tensor([float(rank)]), async_op=True)
                if rank == 2:
                    time.sleep(0.01)
            work = call(x, y)
            work.wait()
            if pending:
                assert output.tolist() == [0.0, 1.0, 2.0]
                before.wait()
            got[name, pending] = (x, y)
    return all(
        torch.equal(a, b)
        for name in calls
        for a, b in zip(got[name, False], got[name, True], strict=True)
    )


def test_every_collective_waits_for_its_turn(ranks):
    assert ranks(RANKS).run(everything_behind_a_gather) == [True] * RANKS


def fail_behind_a_gather():
    """gloo refuses the dtype at once; put off, it does so when the Work is waited for."""
    rank, world = here()
    output = torch.empty(world)
    bad = torch.ones(4, dtype=torch.uint16)
    if rank == 0:
        dist.recv(torch.empty(1), 1)  # the others' gather is pending until then
    gather = all_gather(output, torch.ones(1), async_op=True)
    if rank == 0:
        gather.wait()
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(bad)
        return str(error.value)
    work = dist.all_reduce(bad, async_op=True)
    if rank == 1:
        dist.send(torch.ones(1), 0)
    gather.wait()
    with pytest.raises(RuntimeError) as error:
        work.wait()
    assert work.is_completed() and not work.is_success()
    return str(error.value)


def test_a_call_that_was_put_off_raises_when_waited_for(ranks):
    at_once, *put_off = ranks(RANKS).run(fail_behind_a_gather)
    assert "Invalid scalar type" in at_once
    assert put_off == [at_once, at_once]


# -- programs that run ahead of their peers


def send_behind_a_gather(fresh):
    """The peer joins the gather only when it has a message that is sent after it was issued."""
    rank, world = here()
    group = dist.new_group() if fresh else None  # fresh: the gather is the group's first
    x = torch.full((4,), float(rank))
    output = torch.full((4 * world,), -1.0)
    message = torch.zeros(1)
    if rank == 0:
        work = all_gather(output, x, group=group, async_op=True)
        dist.send(torch.ones(1), 1, group=group)
        dist.recv(message, world - 1, group=group)
    else:
        dist.recv(message, rank - 1, group=group)
        work = all_gather(output, x, group=group, async_op=True)
        dist.send(torch.ones(1), (rank + 1) % world, group=group)
    work.wait()
    return shards_of(output)


@pytest.mark.parametrize("fresh", [False, True])
def test_messages_overtake_pending_gathers(ranks, fresh):
    expected = [[[0.0], [1.0], [2.0]]] * RANKS
    assert ranks(RANKS).run(send_behind_a_gather, fresh, timeout=20) == expected


def two_groups_crosswise():
    """Each rank starts with another group's gather; none is waited for before all are issued."""
    rank, world = here()
    groups = [dist.new_group() for _ in range(world)]
    outputs = [torch.full((world,), -1.0) for _ in groups]
    works = []
    for step in range(world):
        group = (rank + step) % world
        input = torch.tensor([float(10 * group + rank)])
        works.append(all_gather(outputs[group], input, group=groups[group], async_op=True))
    for work in works:
        work.wait()
    return [output.tolist() for output in outputs]


def test_gathers_of_several_groups_in_different_orders(ranks):
    expected = [[float(10 * group + r) for r in range(RANKS)] for group in range(RANKS)]
    assert ranks(RANKS).run(two_groups_crosswise, timeout=20) == [expected] * RANKS


# -- what a Work does


def use_a_work():
    rank, world = here()
    output = torch.full((world,), -1.0)
    if rank == 0:
        dist.recv(torch.empty(1), 1)
    work = all_gather(output, torch.tensor([float(rank)]), async_op=True)
    seen = {}
    if rank == 1:
        seen["completed early"] = work.is_completed()
        with pytest.raises(RuntimeError, match=r"Work::result\(\) needs a completed operation"):
            work.result()
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            work.wait(timedelta(milliseconds=20))
        dist.send(torch.ones(1), 0)
    future = work.get_future().then(lambda f: [t.sum().item() for t in f.value()])
    seen["sums"] = future.wait()
    seen["waited"] = work.wait(timedelta(seconds=10))
    seen["completed"] = work.is_completed(), work.is_success()
    of_ranks = output.chunk(world)  # as gloo's
    seen["result"] = [t.data_ptr() for t in work.result()] == [t.data_ptr() for t in of_ranks]
    seen["twice"] = work.wait()
    return seen


def test_work(ranks):
    for rank, seen in enumerate(ranks(RANKS).run(use_a_work)):
        assert seen.pop("completed early", None) == (False if rank == 1 else None)
        assert seen == {
            "sums": [0.0, 1.0, 2.0],
            "waited": True,
            "completed": (True, True),
            "result": True,
            "twice": True,
        }


# -- memory


def drop_tensors(how):
    """Whether the tensors of an asynchronous gather are gone, and after what."""
    rank, world = here()

    def issue():
        input, output = torch.full((8,), float(rank)), torch.empty(8 * world)
        return weakref.ref(input), weakref.ref(output), all_gather(output, input, async_op=True)

    *refs, work = issue()
    if how == "waited for, the Work kept":
        work.wait()
        refs = refs[:1]  # its result() is the output
    elif how == "waited for":
        work.wait()
        del work
    else:
        while how == "polled" and not work.is_completed():
            time.sleep(0.001)
        del work
        dist.barrier()  # behind the gather
        dist.barrier()  # the next call
    gc.collect()
    return [ref() is None for ref in refs]


@pytest.mark.parametrize(
    "how", ["waited for", "waited for, the Work kept", "never waited for", "polled"]
)
def test_gathers_pin_no_memory(ranks, how):
    for gone in ranks(RANKS).run(drop_tensors, how):
        assert all(gone)


def drop_tensors_of_a_deferred_call():
    rank, world = here()
    late(0)
    gather = all_gather(torch.empty(world), torch.ones(1), async_op=True)
    x = torch.full((4,), float(rank))
    ref, work = weakref.ref(x), dist.all_reduce(x, async_op=True)
    del x
    gather.wait()
    work.wait()
    del work
    gc.collect()
    # Where the gather was over before it, the reduction was not deferred: gloo's thread may hold
    # its tensor for a moment longer.
    deadline = time.monotonic() + 5
    while rank == 0 and ref() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    return ref() is None


def test_deferred_calls_pin_no_memory(ranks):
    assert ranks(RANKS).run(drop_tensors_of_a_deferred_call) == [True] * RANKS
