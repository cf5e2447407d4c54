"""All-gathers on GPUs, and the other collectives beside them, give what the inner's group gives."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gathers import run_cases
from groups import PATIENT, GpuRanks, calls_by_route, level
from rows import ROWS, Gathered, Raised
from test_table import assert_same, run

from pg_sdma import flight_record

pytestmark = pytest.mark.gpu

SEED = 1

# gloo has no sends of CUDA tensors; NCCL's wait for the peer's call, which the rows make too late.
POINT_TO_POINT = re.compile("send|recv|point_to_point")
# gloo by itself crashes on coalesced all-gathers of CUDA tensors (pytorch issue 152645). Functional
# collectives and DTensor make them, too: ours are compared with gloo's on the CPU.
COALESCED = re.compile(
    "functional_.*all_gather|functional_autograd-reduce_scatter|dtensor"
    "|coalescing_manager.*all_gather|all_gather_coalesced"
)
# NCCL and gloo refuse different ones of these; ours raises at all of them.
BAD_ARGUMENTS = re.compile("all_gather_with_a_wrong|all_gather_into_(tensor_of_)?a_transpose")
# The row returns a CUDA allocator, which cannot be sent to this process.
NOT_SENT = re.compile("backend_property-mem_allocator")
# NCCL's shrink_group replaces the default group that the other rows use.
ENDS_THE_GROUP = re.compile("shrink_group")

ON_GPU = {"PG_SDMA_TEST_DEVICE": "cuda"}


def assert_as_the_inner(gpu_ranks: GpuRanks, size: int, name: str, ours: list[Any]) -> None:
    inner = gpu_ranks.inner(size)
    if inner == "gloo" and COALESCED.match(name):
        inners = gpu_ranks(size, "cpu:gloo").run(run, name)
    else:
        inners = gpu_ranks(size, f"cuda:{inner}", env=ON_GPU).run(run, name)
    if isinstance(ours[0], Gathered) and isinstance(inners[0], Raised):
        inners = [Gathered(own.input, [peer.input for peer in ours]) for own in ours]
    assert_same(ours, inners)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ROWS)
def test_row(gpu_ranks: GpuRanks, name: str, size: int) -> None:
    inner = gpu_ranks.inner(size)
    if POINT_TO_POINT.search(name):
        pytest.skip("no sends between these ranks' GPUs without grouping them")
    if inner == "nccl" and ENDS_THE_GROUP.match(name):
        pytest.skip("replaces the group that the other rows use")
    if NOT_SENT.match(name):
        pytest.skip("its result cannot be sent between processes")
    ours = gpu_ranks(size, "cuda:sdma", env=ON_GPU | PATIENT).run(run, name)
    if BAD_ARGUMENTS.match(name):
        assert all(isinstance(result, Raised) for result in ours)
        return
    assert_as_the_inner(gpu_ranks, size, name, ours)


@pytest.mark.parametrize("name", [name for name in ROWS if COALESCED.match(name)])
def test_row_left_to_the_inner(gpu_ranks: GpuRanks, name: str) -> None:
    ours = gpu_ranks(2, "cuda:sdma", env=ON_GPU | {"PG_SDMA": "off"}).run(run, name)
    assert_as_the_inner(gpu_ranks, 2, name, ours)


@pytest.mark.parametrize("size", [2, 4])
def test_random_gathers(gpu_ranks: GpuRanks, cases: int, size: int) -> None:
    ranks = gpu_ranks(size, env=PATIENT)
    for routes in ranks.run(run_cases, SEED, cases, timeout=60 + cases / 20):
        assert routes["direct"] > sum(routes.values()) / 2
        assert "inner: late" not in routes


def test_random_gathers_with_a_device_id(gpu_ranks: GpuRanks, cases: int) -> None:
    if gpu_ranks.share(2):
        pytest.skip("a device_id concerns NCCL, which refuses ranks that share a GPU")
    for routes in gpu_ranks(2, env=PATIENT, bind=True).run(run_cases, SEED + 1, cases // 10):
        assert routes["direct"] > sum(routes.values()) / 2


@pytest.mark.parametrize(("size", "late"), [(2, "inner"), (2, "direct"), (4, "direct")])
def test_random_gathers_of_late_ranks(
    gpu_ranks: GpuRanks, cases: int, size: int, late: str
) -> None:
    ranks = gpu_ranks(size, env={"PG_SDMA_LATE": late})
    for routes in ranks.run(run_cases, SEED, cases // 5, True, timeout=180):
        # Lists go to the inner either way.
        assert routes["inner: late"] > 0
        assert routes["direct"] > (sum(routes.values()) / 2 if late == "direct" else 0)


def leave_the_group_to_a_late_rank() -> tuple[bool, dict[str, int], str]:
    rank = dist.get_rank()
    group = dist.new_group()
    own = torch.full((1 << 20,), rank, dtype=torch.uint8, device="cuda")
    output = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
    dist.all_gather_into_tensor(output, own, group)  # which votes
    output.fill_(255)
    torch.cuda.synchronize()
    level()
    if rank == 1:
        time.sleep(1)
    dist.all_gather_into_tensor(output, own, group)
    routes = calls_by_route(group)
    [lane] = [
        x for x in flight_record()["lanes"] if x["group"] == group.group_name and x["entries"]
    ]
    dist.destroy_process_group(group)
    return (
        bool(output.view(2, -1).eq(torch.arange(2, device="cuda")[:, None]).all()),
        routes,
        lane["entries"][-1]["reason"],
    )


def test_a_rank_may_leave_its_group_before_a_late_one_comes(gpu_ranks: GpuRanks) -> None:
    for right, routes, reason in gpu_ranks(2).run(leave_the_group_to_a_late_rank):
        assert right
        assert reason == "in order of arrival"
        assert routes == {"direct": 2}


@pytest.mark.parametrize("bind", [False, True])
def test_random_gathers_of_one_rank(gpu_ranks: GpuRanks, cases: int, bind: bool) -> None:
    gpu_ranks(1, bind=bind).run(run_cases, SEED, cases // 10)


def gather_small_and_large() -> Counter[str]:
    world = dist.get_world_size()
    for shard in (1 << 10, 16 << 20):
        own = torch.full((shard,), dist.get_rank(), dtype=torch.uint8, device="cuda")
        output = torch.empty(world * shard, dtype=torch.uint8, device="cuda")
        dist.all_gather_into_tensor(output, own)
        assert output.view(world, shard).eq(torch.arange(world, device="cuda")[:, None]).all()
    return calls_by_route()


def test_small_gathers_are_left_to_the_inner(gpu_ranks: GpuRanks) -> None:
    by_default = PATIENT | {"PG_SDMA_MIN_BYTES": ""}
    for routes in gpu_ranks(2, env=by_default).run(gather_small_and_large):
        assert routes == {"direct": 1, "inner: below 4194304 bytes (PG_SDMA_MIN_BYTES)": 1}
