"""What an all-gather costs beyond its bare driver calls, on the host and on the device.

    python benchmarks/gpu/enqueue.py

Ranks that share a GPU do so through an MPS daemon that is started for them. The first table is the
host's time of a synchronous in-place call, all ranks calling at once. The second table is the
device's time of such calls, beside that of the same driver calls on the same memory. They lie
behind a stream that is held back, so the host's time is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))

import mps
from bare import BareGathers

from pg_sdma import flight_record, stats
from pg_sdma.bench.launch import World, run_ranks
from pg_sdma.bench.measure import Gate, Times, own_stream, time_calls
from pg_sdma.bench.table import sizes

SMALLEST, LARGEST = 4 << 10, 64 << 20  # bytes of output
ROUND = 20  # calls between two synchronisations


def host_times(world: World, group: dist.ProcessGroup, arena: torch.Tensor) -> None:
    """Prints the host's microseconds of the smallest gather."""
    output = arena[:SMALLEST]
    own = output.chunk(world.size)[world.rank]
    backend = group._get_backend(world.device)
    options = AllgatherOptions()
    options.asyncOp = False

    def from_python() -> None:
        dist.all_gather_into_tensor(output, own, group)

    def from_cpp() -> None:
        backend._allgather_base(output, own, options)

    python = median_microseconds(world, from_python)
    cpp = median_microseconds(world, from_cpp)
    agreeing, enqueueing = medians_of_record(world, group)
    if world.rank == 0:
        print(f"{python:8.1f} us  dist.all_gather_into_tensor")
        print(f"{cpp:8.1f} us  of it the backend's C++ call")
        print(f"{agreeing:8.1f} us    of it publishing and the handshake")
        print(f"{enqueueing:8.1f} us    of it enqueueing\n")


def median_microseconds(world: World, call: Callable[[], None], rounds: int = 50) -> float:
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        world.barrier()
        call()  # after it the ranks are level
        for _ in range(ROUND):
            began = time.perf_counter()
            call()
            samples.append(time.perf_counter() - began)
    return world.median_of_means(samples) * 1e6


def medians_of_record(world: World, group: dist.ProcessGroup) -> tuple[float, float]:
    """Microseconds of the last calls of `group`, by its flight record.

    From a call's start until the ranks have agreed, and from there until it is enqueued.
    """
    lanes = flight_record()["lanes"]
    [lane] = [lane for lane in lanes if lane["group"] == group.group_name and lane["entries"]]
    entries = [entry for entry in lane["entries"] if entry["route"] == "direct"]
    agreeing = world.median_of_means([e["decided_ns"] - e["started_ns"] for e in entries])
    enqueueing = world.median_of_means([e["issued_ns"] - e["decided_ns"] for e in entries])
    return agreeing / 1e3, enqueueing / 1e3


def device_times(
    world: World, group: dist.ProcessGroup, arena: torch.Tensor, iterations: int
) -> None:
    """Prints a line a size."""
    bare = BareGathers(world, arena)
    arena.fill_(world.rank)
    bare.of(LARGEST // world.size)(0)
    assert all(x.eq(rank).all() for rank, x in enumerate(arena.chunk(world.size))), "bare is wrong"
    gate = Gate(world.device)
    if world.rank == 0:
        print("   output       sdma       bare     ratio       wall")
        print("      (B)       (us)       (us)                 (us)")
    for size in sizes(SMALLEST, LARGEST, 4):
        output = arena[:size]
        shards = output.chunk(world.size)

        def ours(
            _: int, output: torch.Tensor = output, own: torch.Tensor = shards[world.rank]
        ) -> None:
            dist.all_gather_into_tensor(output, own, group)

        calls = [ours, bare.of(len(shards[0]))]
        sdma, driver = time_calls(calls, world, iterations, warmup=5, gate=gate)
        if world.rank == 0:
            print(row(size, sdma, driver), flush=True)
    if world.rank == 0:
        print("sdma, bare: a call on the device; '-' where the host had to wait for the device")
        print("wall: sdma, a call as the host sees it: calls and a synchronise, by their number")
    bare.counters.close()


def row(size: int, sdma: Times, bare: Times) -> str:
    def cell(seconds: float | None) -> str:
        return f"{'-' if seconds is None else format(seconds * 1e6, '.2f'):>11}"

    ratio = "-" if sdma.time is None or bare.time is None else f"{sdma.time / bare.time:.2f}"
    return f"{size:9}{cell(sdma.time)}{cell(bare.time)}{ratio:>10}{cell(sdma.wall)}"


def measure(world: World, options: argparse.Namespace) -> None:
    arena = torch.zeros(LARGEST, dtype=torch.uint8, device=world.device)
    group = world.group("sdma")
    dist.all_gather_into_tensor(arena, arena.chunk(world.size)[world.rank], group)
    if world.rank == 0:
        gpus = min(torch.cuda.device_count(), world.size)
        print(f"{world.size} ranks on {gpus} x {world.device_name}, torch {torch.__version__}\n")
    # Not on the default stream, which takes no batches of copies; frameworks gather on others.
    with own_stream(world):
        host_times(world, group, arena)
        device_times(world, group, arena, options.iterations)
    if world.rank == 0:
        print("routes:", stats(group))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100, help="calls of each size")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    options.device = "cuda"
    os.environ.update(PG_SDMA_MIN_BYTES="0", PG_SDMA_PATIENCE_MS="1000")
    with contextlib.ExitStack() as until_the_end:
        if 0 < torch.cuda.device_count() < options.ranks:
            os.environ.update(until_the_end.enter_context(mps.daemon()))
            os.environ.update(PG_SDMA_ALLOW_SAME_DEVICE="1", PG_SDMA_INNER="cuda=gloo")
        return run_ranks(measure, options)


if __name__ == "__main__":
    sys.exit(main())
