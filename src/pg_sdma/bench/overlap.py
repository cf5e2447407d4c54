"""`pg-sdma bench overlap`, first half: all-gathers beside a chain of matrix products.

A copy that starves "hides" as well, so the products' slowdown always stands beside the hidden part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pg_sdma.bench.all_gather import gather
from pg_sdma.bench.buffers import Arena, Case, make_buffers
from pg_sdma.bench.launch import World
from pg_sdma.bench.measure import Call, Gate, behind_gate

# The chain outlasts the gathers, also where they take longer beside it.
CHAIN_PER_GATHERS = 1.5


@dataclass(frozen=True)
class Timeline:
    """Ends of products and gathers, in seconds on the device since both streams started."""

    gemms: list[float]
    gathers: list[float]

    @property
    def end(self) -> float:
        return max([*self.gemms, *self.gathers])


def inside(ends: Sequence[float], window_end: float) -> list[float]:
    """Lengths of the intervals between 0 and `ends` that lie before `window_end` as a whole."""
    return [b - a for a, b in pairwise([0.0, *ends]) if b <= window_end]


@dataclass(frozen=True)
class Overlap:
    """One backend at one size. Seconds; each the mean over the ranks, then the median of rounds."""

    backend: str
    size: int  # bytes of one all-gather's output
    gathers: int  # back to back in one round
    gemms: int
    gemms_alone: float  # of the whole chain
    gathers_alone: float  # of all gathers of a round
    both: float  # of the longer of the two, side by side
    gemm_alone: float  # of one product
    gemm_beside: float  # of those that ended before the last gather did
    gather_alone: float  # of one gather
    gather_beside: float  # of those that ended before the last product did
    wall: float  # of both, from the host's first call to the device's end

    @property
    def gemm_slowdown(self) -> float:
        return self.gemm_beside / self.gemm_alone - 1

    @property
    def hidden(self) -> float:
        """The part of the gathers' time alone that vanishes beside the products."""
        return (self.gemms_alone + self.gathers_alone - self.both) / self.gathers_alone

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"gemm_slowdown": self.gemm_slowdown, "hidden": self.hidden}


HEADING = (
    "#   size (B)  backend  gather alone  beside (us)  GEMM alone  beside (ms)  slower"
    "    both (ms)  hidden  wall (ms)"
)
MEANING = """\
# gather: one all-gather, in place, bf16; size is its output. GEMM: one product of {n}^3, bf16
# alone and beside: on the device behind a held stream, so the host's cost is left out
# both: chain and gathers side by side, to the later end; wall: the same with the host's cost
# hidden: (chain alone + gathers alone - both) / gathers alone
# times: the mean over the ranks of each round's median, of that the median over the rounds"""


def line(row: Overlap) -> str:
    return (
        f"{row.size:>12}{row.backend:>9}{row.gather_alone * 1e6:>14.1f}"
        f"{row.gather_beside * 1e6:>13.1f}{row.gemm_alone * 1e3:>12.3f}"
        f"{row.gemm_beside * 1e3:>13.3f}{row.gemm_slowdown:>8.1%}{row.both * 1e3:>13.3f}"
        f"{row.hidden:>8.1%}{row.wall * 1e3:>11.3f}"
    )


class Products:
    """A chain of n x n x n products in bf16 on the current stream."""

    def __init__(self, n: int, device: torch.device) -> None:
        self._left, self._right = (
            torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        self._out = torch.empty_like(self._left)

    def __call__(self) -> None:
        torch.mm(self._left, self._right, out=self._out)


class SideBySide:
    """Products on the current stream, gathers on one of high priority, as FSDP has them."""

    def __init__(self, world: World, gate: Gate, product: Callable[[], None]) -> None:
        self._world = world
        self._gate = gate
        self._product = product
        self._stream = torch.cuda.Stream(world.device, priority=-1)

    def enqueue(
        self, call: Call, gathers: int, gemms: int
    ) -> tuple[torch.cuda.Event, list[torch.cuda.Event], list[torch.cuda.Event]]:
        """Enqueues both; returns the events of the start, of the products and of the gathers."""
        compute = torch.cuda.current_stream()
        start, *marks = (torch.cuda.Event(enable_timing=True) for _ in range(1 + gathers + gemms))
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            call(0)  # takes up the ranks' different starts
            start.record()
        compute.wait_event(start)
        for mark in marks[gathers:]:
            self._product()
            mark.record()
        with torch.cuda.stream(self._stream):
            for i, mark in enumerate(marks[:gathers]):
                call(i)
                mark.record()
        compute.wait_stream(self._stream)
        return start, marks[gathers:], marks[:gathers]

    def timeline(self, call: Call, gathers: int, gemms: int) -> Timeline:
        """Runs both once. Raises RuntimeError where the calls block the host on the device."""
        events = behind_gate(self._gate, self._world, lambda: self.enqueue(call, gathers, gemms))
        if events is None:
            raise RuntimeError(
                "an all-gather blocked the host until the device was done, so nothing can run "
                "beside it: compare with a backend that runs on streams"
            )
        start, products, gathered = events
        return Timeline(
            [start.elapsed_time(mark) * 1e-3 for mark in products],
            [start.elapsed_time(mark) * 1e-3 for mark in gathered],
        )

    def wall(self, call: Call, gathers: int, gemms: int) -> float:
        """Seconds from the first call on the host to the end on the device."""
        torch.cuda.synchronize()
        self._world.barrier()
        began = time.perf_counter()
        self.enqueue(call, gathers, gemms)
        torch.cuda.synchronize()
        return time.perf_counter() - began


def gather_calls(
    size: int, groups: Sequence[dist.ProcessGroup], world: World, buffers: int
) -> list[Call]:
    """For each group a call that gathers about `size` bytes of bf16 in place, buffers in turn."""
    dtype = torch.bfloat16
    ranks = tuple(range(world.size))
    case = Case(dtype, size // (world.size * dtype.itemsize), 1, True, ranks, world.rank)
    arena = Arena((case.size + 512) * buffers, world.device)
    made = make_buffers(case, arena, arena, buffers)

    def call(group: dist.ProcessGroup) -> Call:
        return lambda i: gather(made[i % len(made)], group)

    return [call(group) for group in groups]


def measure(
    side: SideBySide,
    calls: Sequence[Call],
    names: Sequence[str],
    size: int,
    world: World,
    gathers: int,
    rounds: int,
) -> list[Overlap]:
    """One row a backend. The chain's length follows from the slowest backend, for all alike."""
    for call in calls:
        side.wall(call, 2, 2)  # a group's first call sets it up, for seconds maybe
    slowest = max(world.largest(side.timeline(call, gathers, 0).end) for call in calls)
    product = world.largest(median(inside(side.timeline(calls[0], 0, 4).gemms, math.inf)))
    gemms = max(2, math.ceil(CHAIN_PER_GATHERS * slowest / product))

    samples: list[dict[str, list[float]]] = [{} for _ in calls]
    for turn in range(rounds):
        order = list(range(len(calls)))
        for kind in order if turn % 2 == 0 else order[::-1]:
            call = calls[kind]
            chain = side.timeline(call, 0, gemms)
            alone = side.timeline(call, gathers, 0)
            both = side.timeline(call, gathers, gemms)
            for key, value in (
                ("gemms_alone", chain.end),
                ("gathers_alone", alone.end),
                ("both", both.end),
                ("gemm_alone", median(inside(chain.gemms, math.inf))),
                ("gemm_beside", median(_or_first(both.gemms, both.gathers[-1]))),
                ("gather_alone", median(inside(alone.gathers, math.inf))),
                ("gather_beside", median(_or_first(both.gathers, both.gemms[-1]))),
                ("wall", side.wall(call, gathers, gemms)),
            ):
                samples[kind].setdefault(key, []).append(value)
    return [
        Overlap(name, size, gathers, gemms, **{k: world.median_of_means(v) for k, v in s.items()})
        for name, s in zip(names, samples, strict=True)
    ]


def _or_first(ends: Sequence[float], window_end: float) -> list[float]:
    """The intervals inside the window; the first, which began in it, where none ended in it."""
    return inside(ends, window_end) or inside(ends[:1], math.inf)
