"""What calls reduce-scatters for its users: FSDP2, DTensor and functional collectives.

Each runs on gloo and on sdma with direct reduce-scatters, from the same numbers. All of them are
whole and small, so every order of adding them gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, run_ranks
from torch.distributed._functional_collectives import reduce_scatter_tensor, wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

RANKS = 3
BOTH = {"PG_SDMA_OPS": "all_gather,reduce_scatter", "PG_SDMA_STRICT": "1"}


@pytest.fixture(scope="module")
def pools() -> Iterator[list[Ranks]]:
    pools = [Ranks(RANKS, env=BOTH), Ranks(RANKS, "cpu:gloo")]
    yield pools
    for pool in pools:
        if pool.alive:
            pool.close()


def whole(*shape, seed=0, rank=None):
    """Small whole numbers, other ones for every seed and rank (this one if None)."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randint(-4, 5, shape, generator=generator).float()


def functional():
    group = dist.group.WORLD
    results = [
        reduce_scatter_tensor(whole(6, 4), op, dim, group)
        for op, dim in [("sum", 0), ("avg", 0), ("sum", 1)]
        if not (dim and 4 % group.size())
    ]
    return [wait_tensor(result).clone() for result in results]


def redistributed():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = whole(6, 7, seed=1)
    rows = DTensor.from_local(local, mesh, [Partial("sum")]).redistribute(mesh, [Shard(0)])
    columns = DTensor.from_local(local, mesh, [Partial("avg")]).redistribute(mesh, [Shard(1)])
    return [rows.to_local().clone(), columns.to_local().clone()]


def trained(dtype, divide_by):
    """Gradients of a model of whole numbers, sharded by FSDP2."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3))
    for parameter in model.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape).float()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mp_policy=policy)
    if divide_by:
        for module in (model[0], model[2], model):
            module.set_gradient_divide_factor(divide_by)
    model(whole(5, 6, seed=2)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [gradient.full_tensor() for gradient in gradients]


def directs():
    import pg_sdma

    counts = pg_sdma.stats()
    return sum(
        routes.get("direct", {"calls": 0})["calls"]
        for operation, routes in counts.items()
        if operation.startswith("reduce_scatter")
    )


def calls_of(function: Callable, *args: object) -> tuple[int, list[torch.Tensor]]:
    before = directs()
    results = function(*args)
    return directs() - before, results


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (functional, ()),
        (redistributed, ()),
        (trained, (None, None)),
        (trained, (torch.bfloat16, None)),
    ],
    ids=["functional", "DTensor", "FSDP2", "FSDP2 in bf16"],
)
def test_the_same_as_over_gloo(pools, function, args):
    ours, theirs = pools
    direct = ours.run(calls_of, function, *args)
    inner = theirs.run(function, *args)
    for (calls, results), expected in zip(direct, inner, strict=True):
        assert calls >= 2
        for result, right in zip(results, expected, strict=True):
            torch.testing.assert_close(result, right, rtol=0, atol=0)


def test_a_gradient_divide_factor_that_gloo_does_not_take(pools):
    """FSDP2 then reduces with PREMUL_SUM by 1 / factor."""
    ours, _ = pools
    for (calls, halves), (_, averages) in zip(
        ours.run(calls_of, trained, None, 6.0), ours.run(calls_of, trained, None, None), strict=True
    ):
        assert calls >= 2
        for half, average in zip(halves, averages, strict=True):
            torch.testing.assert_close(half * 2, average)


def sharded_in_a_part():
    """A mesh of two dimensions, each with its sub-groups. (got, expected) for each of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    rank, results = dist.get_rank(), []
    for name, members in ("outer", [rank % 2, rank % 2 + 2]), ("inner", [rank & 2, rank | 1]):
        part = mesh[name]
        tensor = DTensor.from_local(whole(4, 3, seed=3), part, [Partial("sum")])
        got = tensor.redistribute(part, [Shard(0)]).to_local().clone()
        total = sum(whole(4, 3, seed=3, rank=member) for member in members)
        results.append((got, total.chunk(2)[members.index(rank)]))
    return results


def test_sub_groups_of_a_mesh():
    for results in run_ranks(4, sharded_in_a_part, env=BOTH):
        for got, expected in results:
            assert torch.equal(got, expected)
