"""What ran on the device during all-gathers, from torch's profiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pg_sdma.bench.launch import World

ON_DEVICE = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "set"}


@dataclass(frozen=True)
class Activity:
    """All runs of one kernel, or copies of one kind, in one phase."""

    phase: str
    kind: str  # "kernel", "copy" or "set"
    name: str
    calls: int
    microseconds: float


def record(world: World, phases: Mapping[str, Callable[[], object]], path: Path) -> list[Activity]:
    """Runs the phases one after the other under the profiler; rank 0 writes its trace to `path`.

    Each phase starts and ends with an idle device. Returns the first rank's activities, and none
    on the others.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for name, run in phases.items():
            torch.cuda.synchronize()
            world.barrier()
            with record_function(name):
                run()
                torch.cuda.synchronize()
    if world.rank != 0:
        return []
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [activity for name in phases for activity in activities(events, name)]


def activities(events: Iterable[Mapping[str, Any]], phase: str) -> list[Activity]:
    """What ran on the device in `phase`, the longest first, from a chrome trace's events."""
    events = list(events)
    found: dict[tuple[str, str], list[float]] = {}
    for window in events:
        if window.get("cat") != "user_annotation" or window["name"] != phase:
            continue
        end = window["ts"] + window["dur"]
        for event in events:
            kind = ON_DEVICE.get(event.get("cat", ""))
            if kind and window["ts"] <= event["ts"] < end:
                found.setdefault((kind, event["name"]), []).append(event["dur"])
    rows = [Activity(phase, *key, len(runs), sum(runs)) for key, runs in found.items()]
    return sorted(rows, key=lambda row: -row.microseconds)


HEADING = "# on the device of rank 0: kind, calls, time (us), name"


def lines(rows: Iterable[Activity], name_width: int = 100) -> list[str]:
    """A line an activity, below a line for each phase."""
    shown: list[str] = []
    phase = None
    for row in rows:
        if row.phase != phase:
            phase = row.phase
            shown.append(f"# {phase}:")
        shown.append(
            f"{row.kind:>8}{row.calls:>7}{row.microseconds:>12.1f}  {row.name[:name_width]}"
        )
    return shown
