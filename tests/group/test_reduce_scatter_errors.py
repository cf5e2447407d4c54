"""Bad and contradicting reduce-scatters raise on every rank and leave the group usable."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, run_ranks
from torch.distributed.distributed_c10d import ReduceScatterOptions

RANKS = 3
BOTH = {"PG_SDMA_OPS": "all_gather,reduce_scatter"}
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


@pytest.fixture
def run(ranks: Callable[..., Ranks]) -> Callable:
    """`run(function, *args)` on ranks with both operations on."""
    return ranks(RANKS, env=BOTH).run


def options(op, async_op):
    options = ReduceScatterOptions()
    options.reduceOp = op
    options.asyncOp = async_op
    return options


def premul(factor):
    return dist._make_nccl_premul_sum(factor)


def call(form, outputs, inputs, op=SUM):
    """A call through the group's own method, which checks nothing in Python."""

    def make(async_op):
        group, how = dist.group.WORLD, options(op, async_op)
        if form == "single":
            return group._reduce_scatter_base(outputs[0], inputs[0], how)
        if form == "coalesced":
            return group.reduce_scatter_tensor_coalesced(outputs, inputs, how)
        return group.reduce_scatter(outputs, [inputs], how)

    return make


def floats(*sizes, dtype=torch.float32):
    return [torch.ones(size, dtype=dtype) for size in sizes]


def raised(make, async_op):
    """(when, type, message) of what `make(async_op)` raised."""
    when = "call"
    try:
        work = make(async_op)
        when = "wait()"
        if work is not None:
            work.wait()
    except Exception as error:
        return when, type(error).__name__, str(error)
    return None


def usable():
    rank = dist.get_rank()
    output = torch.empty(1)
    dist.reduce_scatter_tensor(output, torch.arange(3.0) + rank)
    return output.item() == 3 * rank + 3


# Each: what rank 1 passes, what the others pass, what the message has to say.
BAD = {
    "input too small": (
        lambda: call("single", floats(4), floats(11)),
        lambda: call("single", floats(4), floats(12)),
        "reduce_scatter_tensor: expected an input of 12 elements (world size 3 times the output's)",
    ),
    "two dtypes": (
        lambda: call("single", floats(4, dtype=torch.float64), floats(12)),
        lambda: call("single", floats(4), floats(12)),
        "reduce_scatter_tensor: expected one dtype, got a Double tensor of shape [4] as output",
    ),
    "uneven list": (
        lambda: call("list", floats(4), floats(4, 5, 4)),
        lambda: call("list", floats(4), floats(4, 4, 4)),
        "reduce_scatter: expected an input at index 1 of 4 elements (the output's size)",
    ),
    "short list": (
        lambda: call("list", floats(4), floats(4, 4)),
        lambda: call("list", floats(4), floats(4, 4, 4)),
        "reduce_scatter: expected a list of 3 input tensors, one a rank, got 2",
    ),
    "more outputs than inputs": (
        lambda: call("coalesced", floats(4, 4), floats(12)),
        lambda: call("coalesced", floats(4, 4), floats(12, 12)),
        "reduce_scatter_tensor_coalesced: expected as many outputs as inputs, got 2 outputs and 1",
    ),
}


def bad(name, async_op):
    mine = BAD[name][0 if dist.get_rank() == 1 else 1]()
    return raised(mine, async_op), usable()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_one_rank_raise_everywhere(run, name, async_op):
    for result, still_usable in run(bad, name, async_op):
        assert result is not None, "did not raise"
        when, kind, message = result
        assert (when, kind) == ("wait()" if async_op else "call", "RuntimeError"), result
        assert f"Bad arguments on rank 1: {BAD[name][2]}" in message
        assert still_usable


def one(size=4, dtype=torch.float32, op=SUM):
    return lambda: call("single", floats(size, dtype=dtype), floats(3 * size, dtype=dtype), op)


# Each: what rank 1 calls and how it is named; the same for the others.
MISMATCHES = {
    "reduction": (
        (one(op=AVG), r"reduce_scatter_tensor \(AVG\) of 1 Float tensor, 48 bytes of input"),
        (one(), r"reduce_scatter_tensor \(SUM\) of 1 Float tensor, 48 bytes of input"),
    ),
    "factor": (
        (one(op=premul(0.1)), r"\(PREMUL_SUM by 0\.10000000000000001\)"),
        (one(op=premul(0.2)), r"\(PREMUL_SUM by 0\.20000000000000001\)"),
    ),
    "factor in the last bit, one a tensor": (
        (
            one(op=premul(torch.tensor([1 + 2**-52], dtype=torch.float64))),
            r"\(PREMUL_SUM by 1\.0000000000000002\)",
        ),
        (one(op=premul(1.0)), r"\(PREMUL_SUM by 1\)"),
    ),
    "dtype": (
        (one(8, torch.bfloat16), "1 BFloat16 tensor, 48 bytes"),
        (one(8, torch.float16), "1 Half tensor, 48 bytes"),
    ),
    "size": ((one(5), "60 bytes of input"), (one(4), "48 bytes of input")),
    "form": (
        (lambda: call("list", floats(4), floats(4, 4, 4)), r"reduce_scatter \(SUM\)"),
        (one(), r"reduce_scatter_tensor \(SUM\)"),
    ),
    "a size behind what one operation carries": (
        (
            lambda: call("coalesced", floats(*[4] * 69, 5), floats(*[12] * 69, 15)),
            "70 Float tensors, 3372 bytes",
        ),
        (
            lambda: call("coalesced", floats(*[4] * 70), floats(*[12] * 70)),
            "70 Float tensors, 3360 bytes",
        ),
    ),
    "operation": (
        (lambda: lambda on: dist.all_gather_into_tensor(*floats(12, 4), async_op=on), "all_gather"),
        (one(), "reduce_scatter_tensor"),
    ),
}


def mismatch(name, async_op):
    make, _ = MISMATCHES[name][0 if dist.get_rank() == 1 else 1]
    return raised(make(), async_op), usable()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", MISMATCHES)
def test_contradicting_calls_raise_everywhere_and_are_all_named(run, name, async_op):
    (_, of_rank_1), (_, of_others) = MISMATCHES[name]
    for rank, (result, still_usable) in enumerate(run(mismatch, name, async_op)):
        assert result is not None, "did not raise"
        when, kind, message = result
        assert (when, kind) == ("wait()" if async_op else "call", "RuntimeError"), result
        assert message.startswith(f"rank {rank}: operation ")
        for peer, named in enumerate([of_others, of_rank_1, of_others]):
            [told] = re.findall(rf"Rank {peer}: (.*?bytes of \w+)", message)
            assert re.search(named, told), told
        assert still_usable


def refused_by_the_inner():
    """What only the inner may judge is left to it, with its own words."""
    output, input = torch.empty(2, dtype=torch.int32), torch.ones(7, dtype=torch.int32)
    return raised(call("single", [output], [input]), False), usable()


def test_what_goes_to_the_inner_is_checked_by_the_inner(run):
    for (_, kind, message), still_usable in run(refused_by_the_inner):
        assert kind == "RuntimeError"
        assert "reduce_scatter_tensor: expected" not in message
        assert still_usable


def never_comes():
    # The vote belongs to the first operation, so it is made before.
    assert usable()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["told 0", "told 2"])
        return None
    how = options(AVG, False)
    how.timeout = timedelta(milliseconds=300)
    try:
        dist.group.WORLD._reduce_scatter_base(torch.empty(4), torch.ones(12), how)
    except dist.DistBackendError as error:
        return str(error)
    finally:
        store.set(f"told {rank}", "")


def test_a_rank_that_never_comes_is_named():
    results = run_ranks(RANKS, never_comes, env=BOTH)
    assert results[1] is None
    told = "48 bytes of input) timed out after 300 ms: rank 1 has not made this call"
    # The first to run out of patience breaks the group, and the other says the same.
    for rank in (0, 2):
        assert told in results[rank]
        assert ": reduce_scatter_tensor (operation " in results[rank]
