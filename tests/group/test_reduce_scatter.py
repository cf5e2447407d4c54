"""Reduce-scatters that go direct: where, with what result, and with how much memory.

random_reductions.py has the combinations; here is what can be told in one case each.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import Ranks

RANKS = 3
BOTH = {"PG_SDMA_OPS": "all_gather,reduce_scatter"}


@pytest.fixture
def run(ranks: Callable[..., Ranks]) -> Callable:
    """`run(function, *args)` on ranks with both operations on."""
    return ranks(RANKS, env=BOTH).run


def here():
    return dist.get_rank(), dist.get_world_size()


# -- the result


def sum_of(numbers, dtype, op=None):
    """What rank 0 gets of one number from each rank."""
    rank, world = here()
    input = torch.full((world,), numbers[rank], dtype=dtype)
    output = torch.full((1,), 99, dtype=dtype)
    dist.reduce_scatter_tensor(output, input, op or dist.ReduceOp.SUM)
    return output.item()


@pytest.mark.parametrize(
    ("dtype", "numbers", "expected"),
    [
        # In rank order: 1 is lost beside 2**24, but not behind it. Another order, another sum.
        (torch.float32, [2.0**24, 1.0, -(2.0**24)], 0.0),
        (torch.float32, [2.0**24, -(2.0**24), 1.0], 1.0),
        (torch.float64, [2.0**53, 1.0, -(2.0**53)], 0.0),
        (torch.float64, [2.0**24, 1.0, -(2.0**24)], 1.0),
        # In fp32, rounded once. With a rounding behind every addition 256 would stay 256.
        (torch.bfloat16, [256.0, 1.0, 1.0], 258.0),
        (torch.float16, [2048.0, 1.0, 1.0], 2050.0),
        # To even: halfway between 256 and 258, and between 258 and 260.
        (torch.bfloat16, [256.0, 0.5, 0.5], 256.0),
        (torch.bfloat16, [258.0, 0.5, 0.5], 260.0),
        # The sum overflows fp16 only on the way.
        (torch.float16, [65504.0, 65504.0, -65504.0], 65504.0),
    ],
    ids=str,
)
def test_the_sum_is_made_in_rank_order_and_rounded_once(run, dtype, numbers, expected):
    assert run(sum_of, numbers, dtype) == [expected] * RANKS


def scaled(numbers, dtype, factor, by_tensor):
    if factor is None:
        return sum_of(numbers, dtype, dist.ReduceOp.AVG)
    factor = torch.tensor([factor], dtype=dtype) if by_tensor else factor
    return sum_of(numbers, dtype, dist._make_nccl_premul_sum(factor))


@pytest.mark.parametrize(
    ("dtype", "numbers", "factor", "expected"),
    [
        (torch.float32, [1.0, 2.0, 6.0], None, 3.0),
        # 7 / 3, where 7 times the nearest number to 1 / 3 would be another.
        (torch.float64, [1.0, 2.0, 4.0], None, 7 / 3),
        (torch.float16, [65504.0, 65504.0, 65504.0], None, 65504.0),
        (torch.bfloat16, [256.0, 1.0, 1.0], 0.5, 129.0),
        (torch.float32, [1.0, 2.0, 4.0], -0.25, -1.75),
        # The factor meets the sum, not each number.
        (torch.float32, [2.0**24, -(2.0**24), 1.0], 3.0, 3.0),
    ],
    ids=str,
)
def test_the_sum_is_scaled_before_it_is_rounded(run, dtype, numbers, factor, expected):
    for by_tensor in (False, True):
        assert run(scaled, numbers, dtype, factor, by_tensor) == [expected] * RANKS


def factor_on_its_way():
    """The factor is written by a collective that is issued right before."""
    rank, world = here()
    factor = torch.full((1,), 2.0 if rank == 0 else 77.0)
    first = dist.broadcast(factor, 0, async_op=True)
    output = torch.empty(2)
    op = dist._make_nccl_premul_sum(factor)
    second = dist.reduce_scatter_tensor(output, torch.ones(2 * world), op, async_op=True)
    first.wait()
    second.wait()
    return output.tolist()


def test_a_factor_is_read_in_its_turn(run):
    assert run(factor_on_its_way) == [[2.0 * RANKS] * 2] * RANKS


# -- where the tensors lie


def overlapping(kind):
    """(what came, what should have) of outputs that lie somewhere in the inputs."""
    rank, world = here()
    n = 60_000
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(world, world * n, generator=generator)
    right = inputs[0].clone()
    for other in inputs[1:]:
        right += other
    own, right = inputs[rank].clone(), right[rank * n : (rank + 1) * n]
    if kind == "in place":
        output = own[rank * n : (rank + 1) * n]
    elif kind == "shifted":
        start = min(rank * n + 7, (world - 1) * n)
        output = own[start : start + n]
    elif kind == "a peer's slice":
        peer = (rank + 1) % world
        output = own[peer * n : (peer + 1) * n]
    dist.reduce_scatter_tensor(output, own)
    return output, right


@pytest.mark.parametrize("kind", ["in place", "shifted", "a peer's slice"])
def test_outputs_within_the_input(run, kind):
    for output, right in run(overlapping, kind):
        assert torch.equal(output, right)


def across():
    """In a coalesced call each output lies in the other's input."""
    rank, world = here()
    n = 1000
    a = torch.arange(world * n).float() + rank
    b = -torch.arange(world * n).float() - rank
    peer = (rank + 1) % world
    out_a, out_b = b[rank * n : (rank + 1) * n], a[peer * n : (peer + 1) * n]
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(out_a, a)
        dist.reduce_scatter_tensor(out_b, b)
    right = world * torch.arange(rank * n, (rank + 1) * n).float() + sum(range(world))
    return torch.equal(out_a, right) and torch.equal(out_b, -right)


def test_outputs_within_another_tensors_input(run):
    assert all(run(across))


def list_overlap(own):
    rank, world = here()
    inputs = [torch.arange(500.0) * (r + 1) + rank for r in range(world)]
    output = inputs[rank if own else (rank + 1) % world]
    dist.reduce_scatter(output, inputs)
    right = world * torch.arange(500.0) * (rank + 1) + sum(range(world))
    return torch.equal(output, right)


@pytest.mark.parametrize("own", [True, False])
def test_an_output_that_is_one_of_the_listed_inputs(run, own):
    assert all(run(list_overlap, own))


def strided(what):
    rank, world = here()
    input = torch.arange(world * 8.0).view(8, world).t() if "input" in what else None
    flat = torch.arange(world * 8.0) if input is None else input.reshape(-1)
    input = flat.clone() + rank if input is None else input + rank
    assert input.is_contiguous() == ("input" not in what)
    output = torch.zeros(16)[::2] if "output" in what else torch.zeros(8)
    dist.reduce_scatter_tensor(output.view(1, 8) if "input" in what else output, input)
    right = world * flat[rank * 8 : (rank + 1) * 8] + sum(range(world))
    return torch.equal(output, right)


@pytest.mark.parametrize("what", ["input", "output", "input and output"])
def test_tensors_that_are_not_contiguous(run, what):
    assert all(run(strided, what))


def mixed(group):
    """One coalesced call of tensors of every dtype, none of which fills whole pieces."""
    rank, world = here()
    shapes = [(3, torch.bfloat16), (5001, torch.float64), (0, torch.float32), (7, torch.float16)]
    shapes += [(1, torch.float32), (2999, torch.bfloat16), (1, torch.float64)]
    rows = []
    for count, dtype in shapes:
        base = torch.arange(world * count).remainder(40)
        output = torch.full((count,), 99, dtype=dtype)
        right = world * base[rank * count : (rank + 1) * count] + sum(range(world))
        rows.append((output, (base + rank).to(dtype), right.to(dtype)))
    with dist._coalescing_manager(group):
        for output, input, _ in rows:
            dist.reduce_scatter_tensor(output, input, group=group)
    return [torch.equal(output, right) for output, _, right in rows]


@pytest.mark.parametrize("most", [4096, 64 << 20])
def test_tensors_of_several_dtypes_in_one_call(run, most):
    env = {**BOTH, "PG_SDMA_LANDING_BYTES": str(most)}
    assert run(with_settings, env, mixed) == [[True] * 7] * RANKS


# -- when it is complete


def leave_at_once(repetitions):
    """Each rank spoils its input as soon as its own call is complete, late ranks or not."""
    rank, world = here()
    n = 300_000
    for number in range(repetitions):
        if number % world == rank:
            # The others have long been ready when this rank comes.
            torch.randn(400, 400) @ torch.randn(400, 400)
        input = torch.full((world * n,), float(number + rank))
        output = torch.empty(n)
        work = dist.reduce_scatter_tensor(output, input, async_op=number % 2 == 1)
        if work is not None:
            work.wait()
        input.fill_(float("nan"))
        if not output.eq(world * number + sum(range(world))).all():
            return number
    return None


def test_inputs_may_be_overwritten_after_wait(run):
    assert run(leave_at_once, 12) == [None] * RANKS


def one_comes_late():
    rank, world = here()
    output = torch.empty(4)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == world - 1:
        store.wait(["checked 0", "checked 1"])
    work = dist.reduce_scatter_tensor(output, torch.ones(4 * world), async_op=True)
    complete = work.is_completed()
    if rank < world - 1:
        store.set(f"checked {rank}", "")
    work.wait()
    return complete, output.tolist()


def test_nothing_is_complete_before_all_ranks_have_come(run):
    results = run(one_comes_late)
    assert [complete for complete, _ in results[:-1]] == [False] * (RANKS - 1)
    assert all(output == [RANKS] * 4 for _, output in results)


# -- which way it goes


def with_settings(env, function, *args):
    """`function(group, *args)` with a group made while `env`, or this rank's of a list, is set."""
    before = dict(os.environ)
    os.environ.update(env[dist.get_rank()] if isinstance(env, list) else env)
    group = dist.new_group(backend="cpu:sdma")
    os.environ.clear()
    os.environ.update(before)
    result = function(group, *args)
    dist.barrier(group)
    dist.destroy_process_group(group)
    return result


def calls(group):
    """One call of every kind; (calls, bytes) by route for each operation."""
    import pg_sdma

    world = group.size()
    input, output = torch.ones(world * 4), torch.empty(4)
    dist.reduce_scatter_tensor(output, input, group=group)
    dist.reduce_scatter(output, list(input.chunk(world)), dist.ReduceOp.AVG, group)
    with dist._coalescing_manager(group):
        dist.reduce_scatter_tensor(output, input, group=group)
        dist.reduce_scatter_tensor(output.clone(), input, group=group)
    dist.reduce_scatter_tensor(output, input, dist.ReduceOp.MAX, group)
    dist.reduce_scatter_tensor(output.long(), input.long(), group=group)
    dist.all_gather_into_tensor(torch.empty(world), torch.ones(1), group)
    return {
        operation: {route: (count["calls"], count["bytes"]) for route, count in routes.items()}
        for operation, routes in pg_sdma.stats(group).items()
    }


def test_what_goes_direct_and_what_does_not(run):
    size = RANKS * 16
    for routes in run(with_settings, BOTH, calls):
        assert routes == {
            "reduce_scatter_tensor": {
                "direct": (1, size),
                "inner: reduce operation MAX": (1, size),
                "inner: reduce-scatter of Long": (1, 2 * size),
            },
            "reduce_scatter": {"direct": (1, size)},
            "reduce_scatter_tensor_coalesced": {"direct": (1, 2 * size)},
            "all_gather_into_tensor": {"direct": (1, RANKS * 4)},
        }


def test_without_the_setting_every_call_is_the_inners(run):
    for routes in run(with_settings, {"PG_SDMA_OPS": ""}, calls):
        assert routes == {"all_gather_into_tensor": {"direct": (1, RANKS * 4)}}


def test_without_all_gather_in_the_setting_they_are_the_inners(run):
    for routes in run(with_settings, {"PG_SDMA_OPS": "reduce_scatter"}, calls):
        assert "all_gather_into_tensor" not in routes
        assert routes["reduce_scatter"] == {"direct": (1, RANKS * 16)}


def sums(group):
    """Three sums, and how many calls went by which route."""
    import pg_sdma

    results = []
    for number in range(3):
        output = torch.empty(2)
        dist.reduce_scatter_tensor(output, torch.ones(2 * group.size()) * number, group=group)
        results.append(output.tolist())
    routes = pg_sdma.stats(group).get("reduce_scatter_tensor", {})
    return results, {route: count["calls"] for route, count in routes.items()}


def test_ranks_that_differ_in_the_setting_all_use_the_inner(run):
    by_rank = [BOTH, {"PG_SDMA_OPS": "all_gather"}, BOTH]
    results = run(with_settings, by_rank, sums)
    assert all(got == [[0, 0], [RANKS] * 2, [2 * RANKS] * 2] for got, _ in results)
    assert results[1][1] == {}
    for rank in (0, 2):
        [(route, number)] = results[rank][1].items()
        assert route.startswith("inner: settings differ: rank 0 has ") and number == 3


def test_off_on_one_rank_is_off_for_all(run):
    by_rank = [BOTH, {**BOTH, "PG_SDMA": "off"}, BOTH]
    for got, routes in run(with_settings, by_rank, sums):
        assert got == [[0, 0], [RANKS] * 2, [2 * RANKS] * 2]
        assert routes == {"inner: PG_SDMA=off on rank 1": 3}


def strictly(group):
    messages = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        try:
            dist.reduce_scatter_tensor(torch.empty(1), torch.ones(group.size()), op, group)
            messages.append(None)
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_strict_raises_where_the_inner_would_be_used(run):
    for right, wrong in run(with_settings, {**BOTH, "PG_SDMA_STRICT": "1"}, strictly):
        assert right is None
        assert "reduce_scatter_tensor of group" in wrong and "reduce operation MAX" in wrong


# -- memory


def peak_bytes(call):
    """The most that torch's CPU allocator gave out at a time while `call` ran, and what is left."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    level = peak = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak, level


def landing(group, count, dtype):
    world = group.size()
    input, output = torch.ones(world * count, dtype=dtype), torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(output, input, group=group)  # votes
    used = peak_bytes(lambda: dist.reduce_scatter_tensor(output, input, group=group))
    return used, output.eq(world).all().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("most", [4096, 70_000, 64 << 20])
def test_memory_stays_within_the_setting(run, most, dtype):
    env = {**BOTH, "PG_SDMA_LANDING_BYTES": str(most)}
    for (peak, left), right in run(with_settings, env, landing, 1 << 20, dtype):
        assert right
        assert left == 0
        # Some of it is used, too: a count of nothing would prove nothing.
        assert min(most, 1 << 16) / 2 <= peak <= most


def test_small_calls_take_little_memory(run):
    for (peak, _), right in run(with_settings, BOTH, landing, 100, torch.float32):
        assert right
        assert 0 < peak <= 3 * 416
