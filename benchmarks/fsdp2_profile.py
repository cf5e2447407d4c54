"""What a GPU and its host did during steps, from torch's profiler."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 3
OPERATORS = "c10d::"
KINDS = {
    "reduce-scatter": ("reducescatter", "reduce_scatter"),
    "sum of a direct reduce-scatter": ("_sum_slices",),
    "all-gather kernel": ("allgather",),
    "peer copy": ("ptop",),
    "GEMM": ("gemm", "cutlass", "nvjet"),
    "attention": ("flash", "fmha"),
    "optimizer": ("multi_tensor",),
    "copy": ("memcpy", "memset"),
}


def kind_of(name: str) -> str:
    """The kind of a kernel or copy, by its name."""
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(w in lower for w in words)), "other")


@dataclass(frozen=True)
class Breakdown:
    """Of one rank, a step."""

    device_ms: dict[str, float]  # kind -> kernels and copies; they overlap
    handshakes_us: list[float]  # host's time in direct calls before they are enqueued, of all steps
    calls_us: dict[
        str, list[float]
    ]  # operator of c10d -> the host's time in each call, of all steps

    def lines(self) -> list[str]:
        """What is printed of it."""
        found = sorted(self.device_ms.items(), key=lambda item: -item[1])
        lines = ["device, ms a step: " + ", ".join(f"{kind} {ms:.1f}" for kind, ms in found)]
        if self.handshakes_us:
            waits = self.handshakes_us
            lines.append(
                f"handshakes, with the profiler's cost: {len(waits) / STEPS:.0f} a step, median "
                f"{statistics.median(waits):.0f} us, longest {max(waits):.0f} us, "
                f"{sum(waits) / STEPS / 1e3:.2f} ms a step"
            )
        if self.calls_us:
            calls = (
                f"{name} {len(times) / STEPS:.0f} of median {statistics.median(times):.0f} us, "
                f"{sum(times) / STEPS / 1e3:.2f} ms in all"
                for name, times in sorted(self.calls_us.items())
            )
            lines.append(f"host in calls a step, with the profiler's cost: {'; '.join(calls)}")
        return lines


def breakdown(run: Callable[[int], object]) -> Breakdown:
    """Profiles `run(steps)` twice: the device alone, then the host, which costs it time."""
    device_ms: Counter[str] = Counter()
    if torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run(STEPS)
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                device_ms[kind_of(event.name)] += event.time_range.elapsed_us() / STEPS / 1e3
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run(STEPS)
    events = profiler.events()
    return Breakdown(dict(device_ms), handshakes(events), calls(events))


def handshakes(events: Iterable[Any]) -> list[float]:
    """Microseconds from the start of each direct collective's call to where it is enqueued.

    `events` are the profiler's. The backend records a range "sdma::... direct" once the ranks have
    agreed; the operation that it lies in is the call. A range on a worker thread lies in none.
    """
    return [
        event.time_range.start - event.cpu_parent.time_range.start
        for event in events
        if event.name.startswith("sdma::") and event.cpu_parent is not None
    ]


def calls(events: Iterable[Any]) -> dict[str, list[float]]:
    """Microseconds of the host in each collective's call, by its operator, whoever carries it."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.name.startswith(OPERATORS):
            times[event.name.removeprefix(OPERATORS)].append(event.time_range.elapsed_us())
    return dict(times)
