"""`pg-sdma bench rivals`: all-gathers of every contender, in turn and in one run."""

from __future__ import annotations

import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pg_sdma.bench import all_gather, sweep, trace
from pg_sdma.bench.buffers import DTYPES, Case
from pg_sdma.bench.contenders import Calls, room_for
from pg_sdma.bench.field import Field, close, ready, set_ups
from pg_sdma.bench.field import field as field_of
from pg_sdma.bench.launch import World
from pg_sdma.bench.measure import Call, Gate, Times, own_stream, time_calls
from pg_sdma.bench.progress import progress
from pg_sdma.bench.routes import route_since
from pg_sdma.stats import stats

MEANING = """\
size: bytes of the output of one rank. place: in, the input lies in the output.
time: us of a call on the device, behind a held stream, so the host's cost is left out; on CPU, of
the call. wall: us of a call as the host sees it, calls and a synchronise by their number.
x: a contender's time or wall over that of the first: above 1 it is slower.
All are timed in turn; each figure is the mean over the ranks of each call, of that the median."""


@dataclass(frozen=True)
class Row:
    """One size in one place. Keys are contenders' names; who is missing was not measured."""

    size: int
    count: int
    place: str
    times: dict[str, Times]
    wrong: dict[str, int | None]  # elements over all ranks; None: other bytes, not checked
    route: str  # of the first contender
    failed: dict[str, str] = field(default_factory=dict)  # name -> why, at this size


def run(world: World, options: Namespace) -> None:
    """Measures every size and place; rank 0 prints a Markdown table and what ran on its device.

    Raises SystemExit(1) on every rank where an element was wrong or no contender can run.
    """
    all_gather.OPERATION.go_direct()
    sizes = sweep.sizes_of(options, world.size)
    room = room_for(sizes[-1], world.size, min(sweep.ROTATED_BYTES, 2 * options.n * sizes[-1]))
    with own_stream(world):
        found = field_of(world, set_ups(options.contenders, world, room))
        facts = world.facts() | {
            "environment": related_environment(os.environ),
            "operation": "all_gather",
            "contenders": [contender.name for contender in found.contenders],
            "absent": dict(found.absent),
            "dtype": options.dtype,
            "iterations": options.n,
            "warmup": options.w,
        }
        if world.rank == 0:
            print("\n".join(opening(facts, found.absent)), flush=True)
        if not found.contenders:
            raise SystemExit(1)
        bench = Bench(world, found, options)
        rows = measured(bench, sizes)
        result = facts | {"rows": [asdict(row) for row in rows]}
        write(world, options, result)
        if world.device.type == "cuda":
            activities = bench.profile(rows, options.trace)
            write(world, options, result | {"device_activities": [asdict(a) for a in activities]})
            if world.rank == 0:
                print("\n".join(on_device(activities, bench.names)), flush=True)
        close(world, found.contenders)
    if any(count for row in rows for count in row.wrong.values()):
        raise SystemExit(1)


def related_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set and decide how a contender gathers."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(("PG_SDMA", "NCCL_", "TORCH_NCCL_", "TORCH_SYMM", "NVSHMEM_", "CUDA_"))
    }


def measured(bench: Bench, sizes: Sequence[int]) -> list[Row]:
    """A row a size and place; rank 0 prints them."""
    rows: list[Row] = []
    with progress(bench.world.rank == 0, 2 * len(sizes)) as (say, advance):
        for text in heading(bench.names):
            say(text)
        for size in sizes:
            for place in ("in", "out"):
                rows.append(bench.row(size, place))
                say(line(rows[-1], bench.names))
                advance()
        for text in remarks(rows):
            say(text)
    return rows


def write(world: World, options: Namespace, result: dict[str, object]) -> None:
    """The file that the options ask for."""
    if world.rank == 0 and options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


class Bench:
    """The contenders, and what all rows share."""

    def __init__(self, world: World, found: Field, options: Namespace) -> None:
        self.world = world
        self._contenders = found.contenders
        self._options = options
        self._gate = Gate(world.device) if world.device.type == "cuda" else None

    @property
    def names(self) -> list[str]:
        return [contender.name for contender in self._contenders]

    def row(self, size: int, place: str) -> Row:
        """Checks, then times, who has this place."""
        case = self._case(size, place)
        failed: dict[str, str] = {}
        wrong: dict[str, int | None] = {}
        calls: dict[str, Call] = {}
        for contender in self._contenders:
            if place not in contender.places:
                continue
            made, why = ready(self.world, contender, case, 2 * self._options.n)
            if made is None:
                failed[contender.name] = why
            else:
                calls[contender.name] = made.calls.call
                wrong[contender.name] = made.wrong
        first = self._contenders[0].group
        before = stats(first) if first is not None else {}
        times = time_calls(
            list(calls.values()), self.world, self._options.n, self._options.w, self._gate
        )
        route = route_since(before, stats(first)) if first is not None else "-"
        return Row(
            case.size,
            case.count,
            place,
            dict(zip(calls, times, strict=True)),
            wrong,
            route,
            failed,
        )

    def profile(self, rows: Sequence[Row], path: Path | None) -> list[trace.Activity]:
        """What one call of each contender runs on the device of rank 0, at every size and place."""
        phases: dict[str, Callable[[], object]] = {}
        for row in rows:
            case = self._case(row.size, row.place)
            for contender in self._contenders:
                if contender.name in row.times:
                    phases[phase(contender.name, row)] = _first(contender.prepare(case, 1))
        with tempfile.TemporaryDirectory() as folder:
            return trace.record(self.world, phases, path or Path(folder) / "trace.json")

    def _case(self, size: int, place: str) -> Case:
        world, dtype = self.world, DTYPES[self._options.dtype]
        count = size // (world.size * dtype.itemsize)
        return Case(dtype, count, 1, place == "in", tuple(range(world.size)), world.rank)


def _first(calls: Calls) -> Callable[[], object]:
    return lambda: calls.call(0)


def phase(name: str, row: Row) -> str:
    """The profiler's name for one call."""
    return f"{name}, {row.size} B, {row.place if row.place == 'in' else 'out of'} place"


def opening(facts: Mapping[str, object], absent: Mapping[str, str]) -> list[str]:
    """What stands above the table."""
    lines = [f"{key}: {value}" for key, value in facts.items() if key != "absent"]
    lines += [f"not measured: {name}: {why}" for name, why in absent.items()]
    return [*lines, "", MEANING, ""]


def heading(names: Sequence[str]) -> list[str]:
    """The first two lines of the Markdown table."""
    titles = ["size (B)", "place"]
    for i, name in enumerate(names):
        titles += [f"{name}, time (us)", *(["x"] if i else []), "wall (us)", *(["x"] if i else [])]
    titles.append("route")
    return [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]


def line(row: Row, names: Sequence[str]) -> str:
    """A line of the Markdown table."""
    cells = [str(row.size), row.place]
    base = row.times.get(names[0])
    for i, name in enumerate(names):
        times = row.times.get(name)
        for what in ("time", "wall"):
            value = getattr(times, what) if times else None
            cells.append("-" if value is None else f"{value * 1e6:.1f}")
            if i:
                of = getattr(base, what) if base else None
                cells.append("-" if value is None or of is None else f"{value / of:.2f}")
    cells.append(row.route)
    return f"| {' | '.join(cells)} |"


def remarks(rows: Sequence[Row]) -> list[str]:
    """What was wrong, or could not be measured at one size."""
    lines = []
    for row in rows:
        for name, why in row.failed.items():
            lines.append(f"not measured: {phase(name, row)}: {why}")
        for name, count in row.wrong.items():
            if count:
                lines.append(f"WRONG: {phase(name, row)}: {count} elements")
    checked = sorted({n for row in rows for n, count in row.wrong.items() if count is not None})
    total = sum(count or 0 for row in rows for count in row.wrong.values())
    lines.append(f"{total} elements were wrong, of {', '.join(checked)} at every size")
    return lines


def on_device(activities: Sequence[trace.Activity], names: Sequence[str]) -> list[str]:
    """For each contender the kernels and copies of one call, and at how many sizes they ran."""
    lines = (
        ["", "on the device of rank 0, of one call at each size and place:"] if activities else []
    )
    for name in names:
        mine = [a for a in activities if a.phase.startswith(f"{name}, ")]
        phases: dict[tuple[str, str], set[str]] = {}
        for activity in mine:
            phases.setdefault((activity.kind, activity.name), set()).add(activity.phase)
        if mine and not any(kind == "kernel" for kind, _ in phases):
            lines.append(f"  {name}: no kernel at any size")
        for (kind, what), where in sorted(phases.items()):
            lines.append(f"  {name}: {kind} {what[:90]}, in {len(where)} calls")
    return lines
