"""The results of fsdp2_step.py as text: a table a shape, and notes on one result."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp2_contestants import FLOOR, baseline
from fsdp2_host import Host

from pg_sdma.stats import RouteCounts, direct_share

MODES = {"free": "runs ahead of the device", "sync": "synchronises before every step"}
GONE = "share of the communication's cost that is gone"


@dataclass(frozen=True)
class Result:
    """One contestant in one round, of the slower rank; what follows `host` is rank 0's."""

    contestant: str
    round: int
    step: dict[str, float]  # mode -> ms on the device
    host: dict[str, float]  # mode -> ms in the host's call
    routes: dict[str, RouteCounts]  # mode -> what went which way
    calls: dict[str, Host]  # mode -> what the host did for collectives
    loss: dict[str, float]  # mode -> of the last step
    device_ms: dict[str, float] | None  # kind of kernels and copies -> a step


def rows(lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; the first line is its heading."""
    heading, *body = (f"| {' | '.join(cells)} |" for cells in lines)
    return [heading, f"|{' --- |' * len(lines[0])}", *body]


def share_gone(base: float, step: float, floor: float | None) -> float | None:
    """The part of `base - floor`, which communication costs the baseline, that `step` is without.

    None where there is no floor, or where the baseline does not lie above it.
    """
    if floor is None or base <= floor:
        return None
    return (base - step) / (base - floor)


def percent(share: float | None) -> str:
    """With its sign; "-" for None."""
    return "-" if share is None else f"{share:+.1%}"


def table(results: Sequence[Result], backends: Mapping[str, str]) -> list[str]:
    """A Markdown table of one shape's results, a row a round and mode.

    `backends` has the heading of each contestant. Those after the baseline are compared with it,
    and, where the floor is among them, with that.
    """
    first = baseline(list(backends))
    others = [name for name in backends if name != first]
    titles = ["round", "host", backends[first]]
    for name in others:
        titles += [backends[name], "time saved"]
        titles += [GONE] if FLOOR in others and name != FLOOR else []
    lines = [titles]
    for number in sorted({result.round for result in results}):
        found = {r.contestant: r for r in results if r.round == number}
        for mode, words in MODES.items():
            base = found[first].step[mode]
            floor = found[FLOOR].step[mode] if FLOOR in others else None
            cells = [str(number), words, f"{base:.1f} ms"]
            for name in others:
                step = found[name].step[mode]
                cells += [f"{step:.1f} ms", percent(1 - step / base)]
                if FLOOR in others and name != FLOOR:
                    cells.append(percent(share_gone(base, step, floor)))
            lines.append(cells)
    return rows(lines)


def notes(result: Result) -> list[str]:
    """The host's time, the routes and the device's time of one result, a line each."""
    head = f"round {result.round}, {result.contestant}"
    lines = []
    for mode in MODES:
        lines.append(f"{head}, {mode}: host {result.host[mode]:.1f} ms a step")
        for operation, by_route in result.routes[mode].items():
            calls = ", ".join(f"{count['calls']} {route}" for route, count in by_route.items())
            share = direct_share({operation: by_route})
            lines.append(f"{head}, {mode}: {operation} {share:.1%} of bytes direct; calls: {calls}")
        lines += [f"{head}, {mode}: host, {line}" for line in result.calls[mode].lines()]
    if result.device_ms:
        found = sorted(result.device_ms.items(), key=lambda item: -item[1])
        kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in found)
        lines.append(f"{head}, free: device, ms a step: {kinds}")
    return lines


def not_finite(results: Sequence[Result]) -> list[str]:
    """A line for each contestant whose times are of steps with NaN: GPUs may be faster at those."""
    counted = Counter(
        result.contestant
        for result in results
        for loss in result.loss.values()
        if not math.isfinite(loss)
    )
    return [
        f"{name}: the last loss was not finite {count} times, and its times may be too short"
        for name, count in counted.items()
    ]
