"""A verdict from many short rounds of fsdp2_step.py, for machines on which one round says little.

A host's speed can swing by more between two minutes than contestants differ. Steps of one round
follow each other within seconds. So each contestant is compared with the baseline round by round.
The median of these pairs is then judged by their spread.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp2_contestants import FLOOR, baseline
from fsdp2_table import GONE, MODES, Result, percent, rows, share_gone


@dataclass(frozen=True)
class Pairs:
    """One contestant in one mode. Times are medians over the rounds, in ms a step."""

    step: float  # on the device of the slower rank
    cpu: float  # of rank 0's CPUs, in collectives' calls
    saved: float  # median, over the pairs, of the part of the baseline's time that is saved
    quartiles: tuple[float, float]  # of the same, the lower first
    gone: float | None  # share of the communication's cost, by the medians; None: not known

    @property
    def spread(self) -> float:
        """Between the quartiles."""
        low, high = self.quartiles
        return high - low

    @property
    def slower(self) -> bool:
        """Than the baseline, by more than the pairs' spread."""
        return -self.saved > self.spread


def compare(results: Sequence[Result], first: str, steps: int) -> dict[str, dict[str, Pairs]]:
    """Contestant -> mode -> its pairs with `first`, over two rounds or more of one shape.

    `steps` were timed in each round and mode.
    """
    by_name: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.round):
        by_name.setdefault(result.contestant, []).append(result)
    times = {
        name: {mode: [result.step[mode] for result in of] for mode in MODES}
        for name, of in by_name.items()
    }
    found: dict[str, dict[str, Pairs]] = {}
    for name, of in by_name.items():
        for mode in MODES:
            base, own = times[first][mode], times[name][mode]
            saved = [1 - b / a for a, b in zip(base, own, strict=True)]
            low, median, high = statistics.quantiles(saved, n=4, method="inclusive")
            step = statistics.median(own)
            floor = statistics.median(times[FLOOR][mode]) if FLOOR in times else None
            found.setdefault(name, {})[mode] = Pairs(
                step=step,
                cpu=statistics.median(result.calls[mode].cpu_ms() / steps for result in of),
                saved=median,
                quartiles=(low, high),
                gone=share_gone(statistics.median(base), step, floor),
            )
    return found


def summary(
    pairs: Mapping[str, Mapping[str, Pairs]], backends: Mapping[str, str], rounds: int
) -> list[str]:
    """A Markdown table, a row a mode and contestant. `backends` has each contestant's name."""
    first = baseline(list(backends))
    against = f"time saved against {backends[first]}, median of {rounds} pairs"
    lines = [["host", "over", "ms a step", against, "quartiles", GONE, "CPU ms a step in calls"]]
    for mode, words in MODES.items():
        for name, backend in backends.items():
            own = pairs[name][mode]
            compared = ["-", "-", "-"]
            if name != first:
                compared = [
                    percent(own.saved),
                    " to ".join(percent(quartile) for quartile in own.quartiles),
                    percent(own.gone) if name != FLOOR else "-",
                ]
            lines.append([words, backend, f"{own.step:.1f}", *compared, f"{own.cpu:.2f}"])
    return rows(lines)


def losers(pairs: Mapping[str, Mapping[str, Pairs]], backends: Mapping[str, str]) -> list[str]:
    """A line for each contestant and mode that is slower than the baseline beyond the spread."""
    first = baseline(list(backends))
    return [
        f"{backends[name]} {MODES[mode]} and is {-own.saved:.1%} slower than {backends[first]}: "
        f"more than the pairs' spread of {own.spread:.1%}"
        for name, by_mode in pairs.items()
        if name not in (first, FLOOR)
        for mode, own in by_mode.items()
        if own.slower
    ]
