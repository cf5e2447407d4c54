"""What callbacks of futures may do: make collectives, wait for them, take long, end the group.

A gather that a peer is late for is pending, so that the callbacks are added in time and run on
threads that are not the caller's.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

RANKS = 2


def gather(group=None, late=True):
    """An asynchronous gather, and its future's sum in the end: 1 + 2 a shard of four."""
    rank = dist.get_rank()
    if rank == 0 and late:
        time.sleep(0.02)
    input = torch.full((4,), rank + 1.0)
    return dist.all_gather_into_tensor(torch.empty(8), input, group=group, async_op=True)


def sum_of(future):
    return float(sum(tensor.sum() for tensor in future.value()))


# -- collectives within a callback

NESTED = {
    "gather": lambda x: dist.all_gather_into_tensor(torch.empty(8), x),
    "gather, waited for": lambda x: gather(late=False).wait(),
    "gather, by its future": lambda x: gather(late=False).get_future().wait(),
    "list": lambda x: dist.all_gather([torch.empty(4), torch.empty(4)], x),
    "reduction": lambda x: dist.all_reduce(x),
    "reduction, waited for": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "reduction, by its future": lambda x: dist.all_reduce(x, async_op=True).get_future().wait(),
    "barrier": lambda x: dist.barrier(),
}


def nested(how):
    def then(future):
        NESTED[how](torch.ones(4))
        return sum_of(future)

    first = gather().get_future().then(then)
    return first.wait(), gather().get_future().then(then).wait()


@pytest.mark.parametrize("how", NESTED)
def test_a_callback_makes_collectives(ranks, how):
    assert ranks(RANKS).run(nested, how, timeout=20) == [(12.0, 12.0)] * RANKS


def deeply_nested(depth):
    def then(future):
        if depth_of.pop():
            return gather(late=False).get_future().then(then).wait() + 1
        return sum_of(future)

    depth_of = [False] + [True] * depth
    return gather().get_future().then(then).wait()


def test_a_callback_of_a_call_within_a_callback(ranks):
    assert ranks(RANKS).run(deeply_nested, 5, timeout=20) == [17.0] * RANKS


def wait_for_the_next(how):
    """For a collective that was issued on another thread, beside the callback's own."""
    first, second = gather(), gather()
    seconds_future = second.get_future()  # so that it, too, has callbacks to be run

    def then(future):
        if how == "its own":
            return first.wait(timedelta(seconds=15))
        if how == "work":
            return second.wait(timedelta(seconds=15))
        return sum_of(future) == sum_of_next()

    def sum_of_next():
        seconds_future.wait()
        return sum_of(seconds_future)

    return first.get_future().then(then).wait()


@pytest.mark.parametrize("how", ["its own", "work", "future"])
def test_a_callback_waits_for_a_call_beside_its_own(ranks, how):
    assert ranks(RANKS).run(wait_for_the_next, how, timeout=20) == [True] * RANKS


def in_a_callback_of_the_inner():
    """A callback of a reduction waits for a gather behind another that waits for the reduction."""
    x = torch.full((1 << 20,), dist.get_rank() + 1.0)
    begun = threading.Event()

    def then(future):
        begun.set()
        gather(late=False).wait()
        return float(future.value()[0][0])

    reduction = dist.all_reduce(x, async_op=True).get_future().then(then)
    behind = gather(late=False)
    return reduction.wait(), behind.wait(), begun.is_set()


def test_a_callback_of_an_inner_collective_makes_a_gather(ranks):
    for _ in range(3):
        assert ranks(RANKS).run(in_a_callback_of_the_inner, timeout=20) == [(3.0, True, True)] * 2


def in_order(number):
    """Callbacks of calls that are pending together, each with a collective of its own."""
    order = []

    def then(turn):
        def note(future):
            order.append(turn)
            x = torch.full((1,), float(turn))
            dist.all_reduce(x, async_op=True).wait()
            return x.item()

        return note

    gather()  # so that all of them are queued
    works = [gather(late=turn == 0) for turn in range(number)]
    futures = [work.get_future().then(then(turn)) for turn, work in enumerate(works)]
    for work in works:
        work.wait()
    seen = list(order)  # gloo's Works, too, end after their callbacks
    return seen, [future.wait() for future in futures]


def test_callbacks_run_in_order(ranks):
    expected = list(range(20)), [2.0 * turn for turn in range(20)]
    assert ranks(RANKS).run(in_order, 20, timeout=30) == [expected] * RANKS


def train_with_power_sgd():
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook as hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    net.register_comm_hook(state, hook)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        pending = gather()
        net(torch.randn(8, 64)).square().sum().backward()
        pending.wait()
    return [parameter.grad for parameter in net.parameters()]


def test_torchs_hooks_beside_a_pending_gather():
    direct = run_ranks(RANKS, train_with_power_sgd, timeout=40)
    inner = run_ranks(RANKS, train_with_power_sgd, backend="cpu:gloo", timeout=40)
    for ours, right in zip(direct, inner, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))


# -- the end of a group


def destroy_beside_a_callback(how):
    group = dist.new_group()
    begun, over, failed = threading.Event(), threading.Event(), []

    def then(future):
        begun.set()
        if how == "within":
            dist.destroy_process_group(group)
        else:
            over.wait(30)
        try:
            dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=group)
        except (RuntimeError, ValueError) as error:
            failed.append(str(error))
        return sum_of(future)

    future = gather(group).get_future().then(then)
    begun.wait(30)
    if how == "beside":
        dist.destroy_process_group(group)
        over.set()
    total = future.wait()
    dist.barrier()
    return total, len(failed)


@pytest.mark.parametrize("how", ["beside", "within"])
def test_destroy_and_a_callback(ranks, how):
    assert ranks(RANKS).run(destroy_beside_a_callback, how, timeout=30) == [(12.0, 1)] * RANKS


def fail_a_pending_gather():
    """The callbacks of a call that is given up run, with its error."""
    group = dist.new_group()
    dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=group)
    dist.barrier()  # the abort is not to meet a rank that is still in there
    if dist.get_rank() == 1:
        dist.barrier()
        dist.destroy_process_group(group)
        return "given up"
    seen = []
    work = dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=group, async_op=True)

    def note(future):
        with pytest.raises(RuntimeError) as error:
            future.value()
        seen.append(str(error.value))

    noted = work.get_future().then(note)
    dist.distributed_c10d._abort_process_group(group)
    with pytest.raises(RuntimeError):
        work.wait()
    noted.wait()
    dist.barrier()
    return "given up" if "aborted group" in seen[0] else seen


def test_a_call_that_is_given_up_has_its_callbacks_run(ranks):
    assert ranks(RANKS).run(fail_a_pending_gather, timeout=30) == ["given up"] * RANKS


# -- the caller's state of threads


def gather_in_inference_mode():
    with torch.inference_mode():
        outputs = [torch.empty(4, 6).t() for _ in range(RANKS)]
        late = gather()
        dist.all_gather(outputs, torch.full((6, 4), float(dist.get_rank())), async_op=True).wait()
        late.wait()
        return [output.sum().item() for output in outputs]


def test_inference_mode_reaches_an_asynchronous_gather(ranks):
    assert ranks(RANKS).run(gather_in_inference_mode) == [[0.0, 24.0]] * RANKS


def profile(async_op):
    gather().wait()  # the vote is over
    with torch.profiler.profile() as profiler:
        work = dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), async_op=async_op)
        if work:
            work.wait()
    return [event.name for event in profiler.events() if event.name.startswith("sdma::")]


@pytest.mark.parametrize("async_op", [False, True])
def test_the_profiler_sees_direct_gathers(ranks, async_op):
    assert ranks(RANKS).run(profile, async_op) == [["sdma::all_gather_into_tensor direct"]] * RANKS
