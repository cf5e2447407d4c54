"""A picture of bandwidth and time against size, for both backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURED, COMPARED, PEAK = "#b30000", "#4a7fb5", "#2e7d32"
DASHES = {"out": "-", "in": "--"}
WORDS = {"out": "out of place", "in": "in place"}


@dataclass(frozen=True)
class Panel:
    """One of the pictures: a value of the measured backend, and of the one compared with."""

    title: str
    measured: str  # the rows' keys; a dot goes one level down
    compared: str
    scale: float
    logarithmic: bool = True


BANDWIDTH = Panel("bus bandwidth (GB/s)", "busbw", "vs_busbw", 1, logarithmic=False)
LATENCY = Panel("time of a call (us)", "seconds", "vs_seconds", 1e6)
ON_DEVICE = Panel("time of a call on the device (us)", "seconds", "vs_seconds", 1e6)
WITH_HOST = Panel("time of a call, the host's cost in it (us)", "times.wall", "vs.wall", 1e6)


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


def peak_busbw(result: Mapping[str, Any]) -> float | None:
    """The bus bandwidth (GB/s) of a gather that took as long as the plain copy; None: no copy."""
    peak, ranks = result["peak"], result["rows"][-1]["ranks"]
    if peak["seconds"] is None:
        return None
    return peak["size"] * (ranks - 1) / ranks / peak["seconds"] / 1e9


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws what a benchmark's --json holds, in the format that the path's ending names."""
    from matplotlib.figure import Figure

    has_wall = all(row["times"]["wall"] is not None for row in result["rows"])
    panels = (BANDWIDTH, ON_DEVICE, WITH_HOST) if has_wall else (BANDWIDTH, LATENCY)
    figure = Figure(figsize=(5.5 * len(panels), 5), layout="constrained")
    coalesced = f", {result['coalesced']} tensors a call" if result["coalesced"] > 1 else ""
    figure.suptitle(
        f"{result['operation']}, {result['ranks']} ranks on {result['device_name']}, "
        f"{result['dtype']}{coalesced}, torch {result['torch']}",
        fontsize=11,
    )
    every_axes = figure.subplots(1, len(panels))
    for panel, axes in zip(panels, every_axes, strict=True):
        for place in DASHES:
            rows = [row for row in result["rows"] if row["place"] == place]
            if rows:
                _curves(axes, result, rows, place, panel)
                _mark_crossover(axes, rows, place)
        _dress(axes, panel, f"{result['size_of']} over all ranks")
    if (peak := peak_busbw(result)) is not None:
        label = f"a plain copy of {_bytes(result['peak']['size'])} in the same run"
        every_axes[0].axhline(peak, color=PEAK, linestyle=":", label=label)
    handles = {
        label: h for h, label in zip(*every_axes[0].get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=len(panels) + 1,
        fontsize=9,
        frameon=False,
    )
    figure.savefig(path, dpi=150)


def _curves(
    axes: Axes,
    result: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    place: str,
    panel: Panel,
) -> None:
    sizes = [row["size"] for row in rows]
    for backend, key, colour in (
        (result["backend"], panel.measured, MEASURED),
        (result["vs"], panel.compared, COMPARED),
    ):
        if backend is not None:
            values = [_value(row, key) * panel.scale for row in rows]
            label = f"{backend}, {WORDS[place]}"
            axes.plot(sizes, values, DASHES[place], color=colour, marker=".", label=label)


def _value(row: Mapping[str, Any], key: str) -> float:
    value: Any = row
    for part in key.split("."):
        value = value[part]
    return float(value)


def _mark_crossover(axes: Axes, rows: Sequence[Mapping[str, Any]], place: str) -> None:
    if (size := crossover(rows)) is not None:
        label = f"never slower from here ({WORDS[place]})"
        axes.axvline(size, color="grey", linestyle=DASHES[place], linewidth=0.8, label=label)


def _dress(axes: Axes, panel: Panel, across: str) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_title(panel.title, fontsize=10)
    axes.set_xscale("log", base=2)
    if panel.logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(across)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _bytes(size)))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
