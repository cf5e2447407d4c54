"""The time that a rank's host spends in collectives during steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pg_sdma import flight_record

# That FSDP2 calls: under their first name where torch has it.
COLLECTIVES = {
    "all-gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce-scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
}


def name_of(collective: str) -> str:
    """What torch.distributed calls one of COLLECTIVES, as FSDP2 does."""
    return next(name for name in COLLECTIVES[collective] if hasattr(dist, name))


@dataclass
class Host:
    """Of one rank. Times are microseconds."""

    calls: dict[str, list[float]] = field(default_factory=dict)
    """Of COLLECTIVES -> in each call, whoever carries it."""
    cpu: dict[str, list[float]] = field(default_factory=dict)
    """The same, of the CPU: what the calling thread ran, without what it slept or was kept from."""
    agreeing: list[float] = field(default_factory=list)
    """In calls that went direct, until the ranks had agreed on that."""
    enqueueing: list[float] = field(default_factory=list)
    """In those, from there on, where all ranks had come."""
    enqueueing_late: list[float] = field(default_factory=list)
    """The same of the others, which go in order of arrival."""
    allocations: int = 0
    """Of device memory by the driver, for torch's allocator."""

    def lines(self) -> list[str]:
        """What is printed of it."""
        parts = {
            **self.calls,
            **{f"{collective}, CPU time": times for collective, times in self.cpu.items()},
            "agreeing": self.agreeing,
            "enqueueing": self.enqueueing,
            "enqueueing in order of arrival": self.enqueueing_late,
        }
        lines = [
            f"{name}: {len(times)} calls, median {statistics.median(times):.0f} us, "
            f"mean {statistics.mean(times):.0f} us, longest {max(times):.0f} us"
            for name, times in parts.items()
            if times
        ]
        return [*lines, f"{self.allocations} allocations by the driver"]

    def cpu_ms(self) -> float:
        """Milliseconds of CPU time in all calls together."""
        return sum(sum(times) for times in self.cpu.values()) / 1e3


@contextmanager
def observed() -> Iterator[Host]:
    """Fills a Host with what happens in the block.

    Of agreeing and enqueueing there are only the calls that the flight record still has
    (PG_SDMA_TRACE_ENTRIES).
    """
    host = Host()
    began, allocated = time.time_ns(), _allocations()
    with _timed(host):
        yield host
    host.allocations = _allocations() - allocated
    for lane in flight_record()["lanes"]:
        for entry in lane["entries"]:
            if entry["route"] == "direct" and entry["started_ns"] >= began:
                host.agreeing.append((entry["decided_ns"] - entry["started_ns"]) / 1e3)
                times = host.enqueueing_late if entry["reason"] else host.enqueueing
                times.append((entry["issued_ns"] - entry["decided_ns"]) / 1e3)


def _allocations() -> int:
    # Empty before CUDA is in use.
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0))


@contextmanager
def _timed(host: Host) -> Iterator[None]:
    before = {}
    for collective in COLLECTIVES:
        name = name_of(collective)
        before[name] = getattr(dist, name)
        wall, cpu = host.calls.setdefault(collective, []), host.cpu.setdefault(collective, [])
        setattr(dist, name, _noting(before[name], wall, cpu))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _noting(
    function: Callable[..., Any], wall: list[float], cpu: list[float]
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        # Of this thread: a backward's calls come from autograd's, and others run beside it.
        began, ran = time.perf_counter_ns(), time.thread_time_ns()
        try:
            return function(*arguments, **named)
        finally:
            cpu.append((time.thread_time_ns() - ran) / 1e3)
            wall.append((time.perf_counter_ns() - began) / 1e3)

    return call
