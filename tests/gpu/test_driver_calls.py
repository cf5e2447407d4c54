"""What all-gathers run on the device, by the profiler: copies from the peers, and nothing else.

With a GPU for each rank the profiler tells copies between devices (PtoP) from those on one (DtoD),
which are kernels however they are made. Ranks that share a GPU show the same calls as DtoD.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from groups import PATIENT, GpuRanks, level
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

ON_THE_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Work(NamedTuple):
    category: str
    kind: str  # the first two words of its name: "Memcpy PtoP"
    bytes: int


def work_of(call: Callable[[], object]) -> Counter[Work]:
    """What the device does for the second of two equal calls: the first opens the peers' memory."""
    call()
    torch.cuda.synchronize()
    level()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return Counter(
        Work(event["cat"], " ".join(event["name"].split()[:2]), event["args"].get("bytes", 0))
        for event in events
        if event.get("cat") in ON_THE_DEVICE
    )


def gather(shard: int, in_place: bool) -> Counter[Work]:
    rank, world = dist.get_rank(), dist.get_world_size()
    output = torch.zeros(world * shard, dtype=torch.uint8, device="cuda")
    own = output.narrow(0, rank * shard, shard) if in_place else torch.zeros_like(output[:shard])
    return work_of(lambda: dist.all_gather_into_tensor(output, own))


def gather_coalesced(shards: list[int]) -> Counter[Work]:
    rank, world = dist.get_rank(), dist.get_world_size()
    outputs = [torch.zeros(world * n, dtype=torch.uint8, device="cuda") for n in shards]

    def call() -> None:
        with dist._coalescing_manager():
            for output, n in zip(outputs, shards, strict=True):
                dist.all_gather_into_tensor(output, output.narrow(0, rank * n, n))

    return work_of(call)


def copies(gpu_ranks: GpuRanks, size: int, shards: list[int]) -> Counter[Work]:
    """One copy of each shard from each peer."""
    kind = "Memcpy DtoD" if gpu_ranks.share(size) else "Memcpy PtoP"
    return Counter(Work("gpu_memcpy", kind, n) for n in shards for _ in range(size - 1))


@pytest.mark.parametrize("shard", [4 << 10, 1 << 20, 16 << 20])
def test_in_place(gpu_ranks: GpuRanks, shard: int) -> None:
    for work in gpu_ranks(2, env=PATIENT).run(gather, shard, True):
        assert work == copies(gpu_ranks, 2, [shard])


def test_out_of_place_copies_the_own_shard_too(gpu_ranks: GpuRanks) -> None:
    own = Work("gpu_memcpy", "Memcpy DtoD", 1 << 20)
    for work in gpu_ranks(2, env=PATIENT).run(gather, 1 << 20, False):
        assert work == copies(gpu_ranks, 2, [1 << 20]) + Counter([own])


def test_coalesced(gpu_ranks: GpuRanks) -> None:
    shards = [1 << 20, 2 << 20, 3 << 20]
    for work in gpu_ranks(2, env=PATIENT).run(gather_coalesced, shards):
        # The profiler may tell a batch of copies to a peer as one of all their bytes.
        whole = copies(gpu_ranks, 2, [sum(shards)])
        assert work in (copies(gpu_ranks, 2, shards), whole)
