"""Times calls that all ranks make together, several kinds of call in turn.

Rounds of the kinds alternate, so that a noisy moment of the machine hits all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from pg_sdma.bench.launch import World

# Makes one call; the argument numbers the calls, so that each can have buffers of its own.
Call = Callable[[int], object]
T = TypeVar("T")

# Few enough that a held stream's queue takes them all: about 1000 entries fit behind a held
# stream, and a call enqueues a few for each peer.
CALLS_PER_ROUND = 10
SHORTEST_GATE, LONGEST_GATE = 1e-3, 0.5  # seconds


@dataclass(frozen=True)
class Times:
    """Seconds a call: the median over the calls of the mean over the ranks."""

    time: float | None  # CPU: of the call. GPU: on the device; None where it cannot be told apart.
    wall: float | None  # GPU only: calls and a synchronise, as the host sees them


class Gate:
    """Keeps a stream busy while the host enqueues behind it, so that the host's cost drops out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = SHORTEST_GATE
        cycles = 10_000_000
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        for mark in marks:  # the first interval includes loading the kernel
            torch.cuda._sleep(cycles)
            mark.record()
        marks[-1].synchronize()
        self._cycles_per_second = cycles / (marks[1].elapsed_time(marks[2]) * 1e-3)

    def hold(self) -> None:
        """Keeps the current stream busy for `seconds`."""
        torch.cuda._sleep(int(self.seconds * self._cycles_per_second))


def behind_gate(gate: Gate, world: World, enqueue: Callable[[], T]) -> T | None:
    """Runs `enqueue()` while the current stream is held on every rank, and waits for the device.

    Holds the stream longer, and enqueues again, until no rank's stream went on before its host was
    done. None where LONGEST_GATE was too short: the calls wait for the device themselves.
    """
    while True:
        torch.cuda.synchronize(gate.device)
        world.barrier()
        gate.hold()
        opened = torch.cuda.Event()
        opened.record()
        began = time.perf_counter()
        result = enqueue()
        took = time.perf_counter() - began
        early = opened.query()
        torch.cuda.synchronize(gate.device)
        held, needed = gate.seconds, 2 * world.largest(took)
        gate.seconds = min(max(SHORTEST_GATE, needed), LONGEST_GATE)
        if not world.total(early):
            return result
        if held == LONGEST_GATE:
            return None
        gate.seconds = min(max(gate.seconds, 2 * held), LONGEST_GATE)


def time_calls(
    calls: Sequence[Call], world: World, iterations: int, warmup: int, gate: Gate | None
) -> list[Times]:
    """Times `iterations` calls of each kind or, behind a `gate`, the next multiple of a round.

    `warmup` is 1 or more: a group's first call sets it up, for seconds maybe.
    """
    for i in range(warmup):
        for call in calls:
            call(i)
    if gate is None:
        return _time_on_host(calls, world, iterations)
    return _time_on_device(calls, world, iterations, gate)


def _time_on_host(calls: Sequence[Call], world: World, iterations: int) -> list[Times]:
    """Times calls back to back, a round of one kind after a round of another.

    As on a device, the first call of a round is not counted: it takes up the ranks' different
    starts, which are longer than a small all-gather.
    """
    samples: list[list[float]] = [[] for _ in calls]
    for first in range(0, iterations, CALLS_PER_ROUND):
        numbers = range(first, min(first + CALLS_PER_ROUND, iterations))
        for kind in _in_turn(calls, first // CALLS_PER_ROUND):
            world.barrier()
            calls[kind](numbers[0])
            for i in numbers:
                began = time.perf_counter()
                calls[kind](i)
                samples[kind].append(time.perf_counter() - began)
    return [Times(world.median_of_means(s), None) for s in samples]


def _time_on_device(
    calls: Sequence[Call], world: World, iterations: int, gate: Gate
) -> list[Times]:
    on_device: list[list[float] | None] = [[] for _ in calls]
    wall: list[list[float]] = [[] for _ in calls]
    for first in range(0, iterations, CALLS_PER_ROUND):
        numbers = range(first, first + CALLS_PER_ROUND)
        for kind in _in_turn(calls, first // CALLS_PER_ROUND):
            call = calls[kind]
            if (samples := on_device[kind]) is not None:
                intervals = device_intervals(call, numbers, world, gate)
                on_device[kind] = None if intervals is None else samples + intervals
            torch.cuda.synchronize(gate.device)
            world.barrier()
            began = time.perf_counter()
            for i in numbers:
                call(i)
            torch.cuda.synchronize(gate.device)
            wall[kind].append((time.perf_counter() - began) / len(numbers))
    return [
        Times(None if d is None else world.median_of_means(d), world.median_of_means(w))
        for d, w in zip(on_device, wall, strict=True)
    ]


def device_intervals(
    call: Call, numbers: Sequence[int], world: World, gate: Gate
) -> list[float] | None:
    """Seconds on the device of each of the calls, made back to back on the current stream.

    A further call goes ahead and is not counted: it takes up the ranks' different starts.
    """

    def enqueue() -> list[torch.cuda.Event]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(numbers) + 1)]
        for i, mark in zip((numbers[0], *numbers), marks, strict=True):
            call(i)
            mark.record()
        return marks

    marks = behind_gate(gate, world, enqueue)
    if marks is None:
        return None
    return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]


def own_stream(world: World) -> AbstractContextManager[object]:
    """A context in which the current stream is not the default one; on CPU nothing.

    The default stream does not take NCCL's copies in batches.
    """
    if world.device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(world.device))


def _in_turn(calls: Sequence[Call], turn: int) -> list[int]:
    """The kinds in an order that changes from turn to turn."""
    order = list(range(len(calls)))
    return order if turn % 2 == 0 else order[::-1]
