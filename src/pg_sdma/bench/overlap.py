"""`pg-sdma bench overlap`, first half: a collective beside a chain of matrix products.

"Gather" here means a call of the measured collective, an all-gather or a reduce-scatter. A copy
that makes no progress is also "hidden", so the products' slowdown always stands beside the hidden
part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from pg_sdma.bench.buffers import Case
from pg_sdma.bench.contenders import Contender
from pg_sdma.bench.field import agreed
from pg_sdma.bench.launch import World
from pg_sdma.bench.measure import Call, Gate, behind_gate
from pg_sdma.bench.operation import Operation

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
    """One contender at one size. Seconds; the mean over the ranks, then the median of rounds."""

    contender: str
    size: int  # bytes of one all-gather's output, or of one reduce-scatter's input
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


MEANING = """\
# {noun}: one of bf16, redop {redop}, in place if the contender has that; size is its {whole}
# peer copy: as many bytes from the next GPU, no handshake, no sum: the least that GEMMs can feel
# GEMM: one product of {n}^3, bf16
# alone and beside: on the device behind a held stream, so the host's cost is left out
# both: chain and {noun}s side by side, to the later end; wall: the same with the host's cost
# hidden: (chain alone + {noun}s alone - both) / {noun}s alone
# times: the mean over the ranks of each round's median, of that the median over the rounds"""


def meaning(operation: Operation, n: int) -> str:
    """What the table's columns are, of products of n x n x n."""
    return MEANING.format(noun=operation.noun, redop=operation.redop, whole=operation.whole, n=n)


def heading(operation: Operation) -> str:
    return (
        f"#   size (B)       contender{_alone_title(operation)}  beside (us)  GEMM alone"
        "  beside (ms)  slower    both (ms)  hidden  wall (ms)"
    )


def _alone_title(operation: Operation) -> str:
    return f"  {operation.noun} alone"


def line(row: Overlap, operation: Operation) -> str:
    width = len(_alone_title(operation))
    return (
        f"{row.size:>12}{row.contender:>16}{row.gather_alone * 1e6:>{width}.1f}"
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
                "a call blocked the host until the device was done, so nothing can run beside it: "
                "compare with a backend that runs on streams, or, where a stream's queue was full, "
                "give fewer --gathers"
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


def case_for(world: World, contender: Contender, numel: int) -> Case:
    """Of at least `numel` elements of bf16 in all shards: in place, if the contender has that."""
    ranks = tuple(range(world.size))
    in_place = "in" in contender.places
    return Case(torch.bfloat16, -(-numel // world.size), 1, in_place, ranks, world.rank)


def lasting(
    side: SideBySide, world: World, calls: Mapping[str, Call], gathers: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of a round of each contender alone, and why of those that cannot be measured."""
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        seconds, why = agreed(world, partial(_alone, side, call, gathers))
        if seconds is None:
            failed[name] = why
        else:
            found[name] = world.largest(seconds)
    return found, failed


def _alone(side: SideBySide, call: Call, gathers: int) -> float:
    side.wall(call, 2, 2)  # a group's first call sets it up, for seconds maybe
    return side.timeline(call, gathers, 0).end


def measure(
    side: SideBySide,
    calls: Mapping[str, Call],
    size: int,
    world: World,
    gathers: int,
    rounds: int,
) -> tuple[list[Overlap], dict[str, str]]:
    """One row a contender, and why of those that cannot be measured.

    The chain's length follows from the slowest contender, for all alike.
    """
    alone_seconds, failed = lasting(side, world, calls, gathers)
    if not alone_seconds:
        return [], failed
    names = list(alone_seconds)
    chain_alone = side.timeline(calls[names[0]], 0, 4).gemms
    product = world.largest(median(inside(chain_alone, math.inf)))
    gemms = max(2, math.ceil(CHAIN_PER_GATHERS * max(alone_seconds.values()) / product))

    samples: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else names[::-1]:
            call = calls[name]
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
                samples[name].setdefault(key, []).append(value)
    rows = [
        Overlap(name, size, gathers, gemms, **{k: world.median_of_means(v) for k, v in s.items()})
        for name, s in samples.items()
    ]
    return rows, failed


def _or_first(ends: Sequence[float], window_end: float) -> list[float]:
    """The intervals inside the window; the first, which began in it, where none ended in it."""
    return inside(ends, window_end) or inside(ends[:1], math.inf)
