"""Bandwidth and time against size, both backends, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURED, COMPARED = "#b30000", "#4a7fb5"
DASHES = {"out": "-", "in": "--"}
WORDS = {"out": "out of place", "in": "in place"}


def crossover(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The smallest size (bytes) from which on the measured backend is never slower; None: never.

    `rows` are one place's, by growing size.
    """
    found = None
    for row in reversed(rows):
        if row["ratio"] is None or row["ratio"] < 1:
            break
        found = row["size"]
    return found


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws what a benchmark's --json holds, in the format that the path's ending names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(
        f"{result['operation']}, {result['ranks']} ranks on {result['device_name']}, "
        f"{result['dtype']}, torch {result['torch']}",
        fontsize=11,
    )
    bandwidth, latency = figure.subplots(1, 2)
    for place in DASHES:
        rows = [row for row in result["rows"] if row["place"] == place]
        if rows:
            _curves(bandwidth, result, rows, place, "busbw", "vs_busbw", 1)
            _curves(latency, result, rows, place, "seconds", "vs_seconds", 1e6)
            if (size := crossover(rows)) is not None:
                _mark(latency, f"never slower from here ({WORDS[place]})", size, place)
                _mark(bandwidth, "", size, place)
    bandwidth.set_ylabel("bus bandwidth (GB/s)")
    latency.set_ylabel("time of a call (us)")
    latency.set_yscale("log")
    for axes in (bandwidth, latency):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"{result['size_of']} over all ranks (bytes)")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    latency.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _curves(
    axes: Axes,
    result: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    place: str,
    measured: str,
    compared: str,
    scale: float,
) -> None:
    sizes = [row["size"] for row in rows]
    for backend, key, colour in (
        (result["backend"], measured, MEASURED),
        (result["vs"], compared, COMPARED),
    ):
        if backend is not None:
            values = [row[key] * scale for row in rows]
            label = f"{backend}, {WORDS[place]}"
            axes.plot(sizes, values, DASHES[place], color=colour, marker=".", label=label)


def _mark(axes: Axes, label: str, size: int, place: str) -> None:
    axes.axvline(size, color="grey", linestyle=DASHES[place], linewidth=0.8, label=label)
