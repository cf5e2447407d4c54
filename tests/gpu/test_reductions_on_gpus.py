"""Reduce-scatters of CUDA tensors on the direct route: every bit of them, their memory, their ways
to the inner."""

from __future__ import annotations

import time
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from groups import PATIENT, GpuRanks, level
from random_gathers import MOST_BYTES
from random_reductions import difference, run_cases

import pg_sdma
from pg_sdma import _C, kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("triton") is None, reason="sums on GPUs need Triton"),
]

CASES = 1000
BOTH = {"PG_SDMA_OPS": "all_gather,reduce_scatter"}
ALWAYS_INNER = {"inner: reduce operation MAX", "inner: reduce-scatter of Long"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def reductions(pytestconfig: pytest.Config) -> int:
    return pytestconfig.getoption("--cases", default=None) or CASES


def routes(group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """This rank's reduce-scatters by route."""
    calls: dict[str, int] = {}
    for operation, by_route in pg_sdma.stats(group).items():
        if operation.startswith("reduce_scatter"):
            for route, count in by_route.items():
                calls[route] = calls.get(route, 0) + count["calls"]
    return calls


@pytest.mark.parametrize("landing_bytes", [64 * MIB, 300_000], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_random_reduce_scatters(
    gpu_ranks: GpuRanks, reductions: int, size: int, landing_bytes: int
) -> None:
    env = {**BOTH, **PATIENT, "PG_SDMA_LANDING_BYTES": str(landing_bytes)}
    ranks = gpu_ranks(size, env=env)
    args = (size + landing_bytes, 0, reductions // 2, MOST_BYTES, -1, "cuda")
    for calls in ranks.run(run_cases, *args, timeout=120 + reductions):
        assert calls.pop("direct") > reductions / 4
        assert set(calls) <= ALWAYS_INNER


def numbers(rank: int, world: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The input of a rank, on the CPU."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(world * count, generator=generator).to(dtype)


def peak_memory(slices: list[int]) -> int:
    """Most bytes that torch's allocator had to give for reduce-scatters of so many elements."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # The group's first call tests the route, with tensors of its own.
    first = torch.empty(world, device="cuda")
    dist.reduce_scatter_tensor(first[:1], first)
    most = 0
    for count in slices:
        for asynchronous in (False, True):
            whole = numbers(rank, world, count, torch.bfloat16).cuda()
            output = torch.empty(count, dtype=torch.bfloat16, device="cuda")
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work = dist.reduce_scatter_tensor(output, whole, async_op=asynchronous)
            if work is not None:
                work.wait()
            torch.cuda.synchronize()
            most = max(most, torch.cuda.max_memory_allocated() - before)
            part = slice(rank * count, (rank + 1) * count)
            expected = sum(
                numbers(r, world, count, torch.bfloat16)[part].float() for r in range(world)
            )
            assert isinstance(expected, torch.Tensor)
            assert not difference(output.cpu(), expected.to(torch.bfloat16))
            assert torch.cuda.memory_allocated() <= before
    assert routes().keys() == {"direct"}
    return most


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("landing", [64 * MIB, 1 * MIB])
def test_memory_is_bounded(gpu_ranks: GpuRanks, size: int, landing: int) -> None:
    env = {**BOTH, **PATIENT, "PG_SDMA_LANDING_BYTES": str(landing)}
    slices = [1, 5_000, 8 * MIB + 1]
    for most in gpu_ranks(size, env=env).run(peak_memory, slices, timeout=120):
        assert 0 < most <= landing


def waited_for_on_another_stream() -> None:
    """The landing is not given to others before the operation's end, whoever waits for that."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), 8 * MIB
    inputs = [numbers(r, world, count, torch.float32) for r in range(world)]
    part = slice(rank * count, (rank + 1) * count)
    expected = inputs[0][part].clone()
    for own in inputs[1:]:
        expected += own[part]
    whole, other = inputs[rank].cuda(), torch.cuda.Stream()
    for _ in range(10):
        output = torch.empty(count, device="cuda")
        work = dist.reduce_scatter_tensor(output, whole, async_op=True)
        with torch.cuda.stream(other):
            work.wait()
        del work
        # On the stream of the call, which nothing orders behind it.
        for _ in range(4):
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").fill_(0xFF)
        torch.cuda.synchronize()
        assert not difference(output.cpu(), expected)
    assert routes().keys() == {"direct"}


def test_a_landing_is_not_reused_too_early(gpu_ranks: GpuRanks) -> None:
    gpu_ranks(2, env={**BOTH, **PATIENT}).run(waited_for_on_another_stream, timeout=60)


def late_calls() -> dict[str, int]:
    """Rank 0 is late at each call: the results are the inner's own."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), 10_001
    group = dist.new_group(backend="cuda:sdma")
    inner_name = group._get_backend(torch.device("cuda")).inner("cuda").name()
    inner = dist.new_group(backend=f"cuda:{inner_name}")
    whole = numbers(rank, world, count, torch.bfloat16).cuda()
    expected = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    dist.reduce_scatter_tensor(expected, whole, group=inner)
    dist.reduce_scatter_tensor(torch.empty_like(expected), whole, group=group)  # the vote
    for _ in range(5):
        level()
        time.sleep(0.2 if rank == 0 else 0)
        output = torch.full_like(expected, torch.nan)
        dist.reduce_scatter_tensor(output, whole, group=group)
        torch.testing.assert_close(output, expected)
    return routes(group)


def test_late_calls_are_the_inners(gpu_ranks: GpuRanks) -> None:
    if gpu_ranks.inner(2) == "gloo":
        pytest.skip("gloo has no reduce-scatters of CUDA tensors on every torch")
    results = gpu_ranks(2, env=BOTH).run(late_calls, timeout=60)
    assert results[0] == results[1]
    assert results[0]["inner: late"] > 0


def without_kernels() -> list[dict[str, int]]:
    """Rank 1 has no Triton, then one that compiles nothing, and then a factor is on the GPU."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    why_none = kernels.why_none
    try:
        if rank == 1:
            kernels.why_none = lambda: "no Triton"
        group = dist.new_group(backend="cuda:sdma")
    finally:
        kernels.why_none = why_none
    whole = torch.ones(4 * world, dtype=torch.float64, device="cuda")
    output = torch.empty(4, dtype=torch.float64, device="cuda")
    dist.reduce_scatter_tensor(output, whole, group=group)
    assert output.eq(world).all()
    found.append(routes(group))

    def fail(*key: object) -> None:
        raise RuntimeError("no compiler\nat all")

    group = dist.new_group(backend="cuda:sdma")
    if rank == 1:
        _C.set_kernels(fail)
    half = output.half().zero_()  # for another dtype than before, of which a kernel is known
    try:
        dist.reduce_scatter_tensor(half, whole.half(), group=group)
    finally:
        _C.set_kernels(kernels.compile_for)
    assert half.eq(world).all()
    found.append(routes(group))

    group = dist.new_group(backend="cuda:sdma")
    factor = dist._make_nccl_premul_sum(torch.tensor([0.5], dtype=torch.float64, device="cuda"))
    dist.reduce_scatter_tensor(output, whole, factor, group=group)
    assert output.eq(world / 2).all()
    found.append(routes(group))
    return found


def test_what_cannot_be_summed_here_goes_to_the_inner(gpu_ranks: GpuRanks) -> None:
    if gpu_ranks.inner(2) == "gloo":
        pytest.skip("gloo has no reduce-scatters of CUDA tensors on every torch")
    # Ranks of their own: one of them remembers that it cannot compile.
    ranks = gpu_ranks(2, env={**BOTH, **PATIENT, "PG_SDMA_TRACE_ENTRIES": "16"})
    assert (
        ranks.run(without_kernels, timeout=60)
        == [
            [
                {"inner: no Triton on rank 1": 1},
                {"inner: memory that cannot be shared, or no kernel": 1},
                {"inner: PREMUL_SUM by a tensor on the device": 1},
            ]
        ]
        * 2
    )
