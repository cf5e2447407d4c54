"""Device memory: none of our own, and what is freed comes back although the peers had it open."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from groups import PATIENT, GpuRanks, level

pytestmark = pytest.mark.gpu

MIB = 1 << 20
BLOCK = 512 * MIB
# Of a device, for each rank on it: what the driver takes for streams and for code at first use.
SLACK = 32 * MIB
PATIENCE = 10.0  # seconds; the groups' threads look every fifth of one

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def free_memory() -> int:
    return torch.cuda.mem_get_info()[0]


def empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def settle() -> int:
    """Frees all that is not in use, on every rank. Returns the device's free memory after that."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    level()
    free = free_memory()
    level()
    return free


def wait_for_memory(expected: int) -> None:
    """Until so much of the device is free, but for the slack. Touches no group meanwhile."""
    end = time.monotonic() + PATIENCE
    while (free := free_memory()) < expected - SLACK:
        if time.monotonic() > end:
            missing = (expected - free) / MIB
            raise AssertionError(f"{missing:.0f} MiB have not come back in {PATIENCE} s")
        time.sleep(0.01)


def warm_up() -> None:
    """First gathers, which load the device's code for their sizes and make its engine."""
    for size in (MIB, BLOCK):
        dist.all_gather_into_tensor(empty(dist.get_world_size() * size), empty(size).zero_())


def free_what_peers_have_open() -> None:
    warm_up()
    before = settle()
    for _ in range(3):
        own, output = empty(BLOCK).zero_(), empty(dist.get_world_size() * BLOCK)
        dist.all_gather_into_tensor(output, own)
        del own, output
        settle()
    wait_for_memory(before)
    level()


def gather_many_sizes() -> int:
    """Returns by how much the device's free memory went down."""
    rank, world = dist.get_rank(), dist.get_world_size()
    warm_up()
    output = empty(world * BLOCK)
    before = settle()
    group = dist.new_group(backend="cuda:sdma")
    for shard in (1, 4 << 10, MIB, 16 * MIB, BLOCK):
        for _ in range(3):
            own = output.narrow(0, rank * shard, shard)
            dist.all_gather_into_tensor(output[: world * shard], own, group)
    return before - settle()


def run_out_of_memory() -> int:
    """Returns how often rank 0 had to try, until its peer had closed what torch had freed."""
    warm_up()
    before = settle()
    opened = dist.get_world_size() * BLOCK  # by peers, which push into it
    own, output = empty(BLOCK), empty(opened)
    dist.all_gather_into_tensor(output, own)
    del own
    if dist.get_rank() != 0:
        del output
        settle()
        level()
        return 0
    settle()
    wait_for_memory(before - opened)
    ballast = empty(free_memory() - BLOCK // 2)
    del output  # torch keeps its memory, for tensors that fit into it
    attempts, end = 1, time.monotonic() + PATIENCE
    while not allocates(opened + BLOCK // 4):
        assert time.monotonic() < end, f"still out of memory after {PATIENCE} s"
        attempts += 1
        time.sleep(0.01)
    del ballast
    torch.cuda.empty_cache()
    level()
    return attempts


def allocates(size: int) -> bool:
    try:
        empty(size)
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.parametrize("env", [{}, EXPANDABLE], ids=["default", "expandable"])
@pytest.mark.parametrize("function", [free_what_peers_have_open, run_out_of_memory])
def test_freed_memory_comes_back(
    gpu_ranks: GpuRanks, function: Callable[[], object], env: dict[str, str]
) -> None:
    print(function.__name__, gpu_ranks(2, env=env | PATIENT).run(function, timeout=60))


def test_gathers_take_no_device_memory(gpu_ranks: GpuRanks) -> None:
    on_a_device = 2 if gpu_ranks.share(2) else 1
    for taken in gpu_ranks(2, env=PATIENT).run(gather_many_sizes):
        assert taken < SLACK * on_a_device
