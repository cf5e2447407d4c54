"""What the future and the result of a call hold: the same as the inner's, whichever way it went."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

RANKS = 2


def described(value, outputs):
    """Where among the outputs each tensor lies, its shape and what it holds."""
    if isinstance(value, list):
        return [described(part, outputs) for part in value]
    at = [n for n, o in enumerate(outputs) if 0 <= value.data_ptr() - o.data_ptr() < o.nbytes]
    return at, value.storage_offset(), tuple(value.shape), value.flatten().tolist()


def calls(rank):
    """Each call's name, its outputs and its Work."""
    backend = dist.distributed_c10d._get_default_group()
    x, y = torch.full((3, 4), rank + 1.0), torch.full((3,), rank + 1.0)
    of_x = [torch.zeros(6, 4), torch.zeros(24)]
    for out in of_x:
        input = x if out.dim() != 1 else x.flatten()
        yield "tensor", [out], dist.all_gather_into_tensor(out, input, async_op=True)
    each = [torch.zeros(3, 4), torch.zeros(3, 4)]
    yield "list", each, dist.all_gather(each, x, async_op=True)
    both = [torch.zeros(6, 4), torch.zeros(6)]
    yield "coalesced", both, backend.allgather_into_tensor_coalesced(both, [x, y])
    yield "alone", both[:1], backend.allgather_into_tensor_coalesced(both[:1], [x])
    yield "reduction", [x], dist.all_reduce(x, async_op=True)
    lists = [[torch.zeros(3, 4), torch.zeros(3)] for _ in range(RANKS)]
    flat = [tensor for of_rank in lists for tensor in of_rank]
    yield "coalesced lists", flat, backend.allgather_coalesced(lists, [x, y])
    yield "barrier", [], dist.barrier(async_op=True)


def results(busy):
    rank = dist.get_rank()
    seen = {}
    for number, (name, outputs, work) in enumerate(calls(rank)):
        # What comes behind a pending call is the worker's, too.
        pending = dist.all_gather_into_tensor(torch.empty(2), torch.ones(1), async_op=busy)
        if rank == 0:
            time.sleep(0.005)
        value = work.get_future().wait()
        work.wait()
        try:
            result = described(work.result(), outputs)
        except RuntimeError:
            result = "raises"
        seen[number, name] = described(value, outputs), result
        if pending:
            pending.wait()
    return seen


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(
    "env",
    [{}, {"PG_SDMA_MIN_BYTES": str(1 << 40)}, {"PG_SDMA_PATIENCE_MS": "0.001"}],
    ids=["direct", "small", "late"],
)
def test_results_are_gloos(ranks, env, busy):
    ours = ranks(RANKS, env=env).run(results, busy)
    assert ours == ranks(RANKS, "gloo").run(results, False)
