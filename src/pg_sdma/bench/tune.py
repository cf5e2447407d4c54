"""`pg-sdma tune`: from which size on the direct route is no slower than the inner, on this machine.

All sizes go direct while they are measured. A size is good enough if the direct route carries most
calls and takes at most `TOLERANCE` longer than the inner, in place and out of place.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

from pg_sdma import tuning
from pg_sdma.bench import all_gather, reduce_scatter, sweep, table
from pg_sdma.bench.launch import World, measured_backends
from pg_sdma.bench.operation import Operation
from pg_sdma.bench.progress import progress
from pg_sdma.settings import read_settings

TOLERANCE = 0.03
# Some calls may be late and go to the inner, as they may in a program: their time counts too.
LEAST_DIRECT = 0.75
COALESCED = 16  # tensors, of the bound for the mean
ENVIRONMENT = {
    "PG_SDMA": "on",
    "PG_SDMA_MIN_BYTES": "0",
    "PG_SDMA_TUNING": tuning.OFF,
    "PG_SDMA_STRICT": "0",
}


@dataclass(frozen=True)
class Part:
    """One of the bounds, and how it is measured."""

    name: str  # of tuning.BOUNDS
    operation: Operation
    coalesced: int


def parts(device: str, ops: Sequence[str]) -> list[Part]:
    """What is measured for calls of `ops` (PG_SDMA_OPS) on `device`.

    Reduce-scatters of CPU tensors have the all-gathers' bound.
    """
    found = []
    if "all_gather" in ops:
        found.append(Part("all_gather", all_gather.OPERATION, 1))
        found.append(Part("coalesced", all_gather.OPERATION, COALESCED))
    if "reduce_scatter" in ops and device == "cuda":
        found.append(Part("reduce_scatter", reduce_scatter.OPERATION, 1))
    return found


def bound_of(rows: Sequence[table.Row], coalesced: int) -> int | str | None:
    """What tuning.bound makes of rows by growing size, in bytes (of the mean tensor)."""
    by_size = [(size, list(same)) for size, same in groupby(rows, lambda row: row.size)]
    return tuning.bound([(size // coalesced, all(map(good, same))) for size, same in by_size])


def good(row: table.Row) -> bool:
    """Whether calls like this one should go direct."""
    direct = row.direct is not None and row.direct >= LEAST_DIRECT
    return direct and row.ratio is not None and row.ratio >= 1 / (1 + TOLERANCE)


def options_of(options: Namespace, part: Part) -> Namespace:
    """The options of `pg-sdma bench` that stand for `part`."""
    return Namespace(
        **vars(options)
        | {
            "coalesced": part.coalesced,
            "groups": 1,
            "check": 1,
            "begin": min(options.begin * part.coalesced, options.end),
        }
    )


def run(world: World, options: Namespace) -> None:
    """Measures, and on rank 0 writes the tuning file, unless `options.dry_run`.

    Raises SystemExit(1) on every rank where an element was wrong, nothing went direct, or a bound
    lies below the sizes measured: then nothing is written.
    """
    settings = read_settings()
    os.environ.update(ENVIRONMENT)
    names = measured_backends(options)
    groups = [world.group(name) for name in names]
    bounds: dict[str, int | str] = {}
    rows_of: dict[str, list[table.Row]] = {}
    todo = parts(options.device, settings.ops)
    steps = 2 * sum(len(sweep.sizes_of(options_of(options, part), world.size)) for part in todo)
    with progress(world.rank == 0, steps) as (say, advance):
        say("# " + ", ".join(f"{key} {value}" for key, value in world.facts().items()))
        for part in todo:
            shown = table.columns(world.device.type, names, part.operation)
            say(f"# {part.name}" + f", {COALESCED} tensors a call" * (part.coalesced > 1))
            for text in table.heading(shown):
                say(text)
            rows = rows_of.setdefault(part.name, [])
            for row in _rows(world, options_of(options, part), part.operation, groups):
                rows.append(row)
                say(table.line(row, shown))
                advance()
            bound = bound_of(rows, part.coalesced)
            if bound is not None:
                bounds[part.name] = bound
        why_not = _objection([row for rows in rows_of.values() for row in rows])
        unknown = [name for name in rows_of if name not in bounds]
        if unknown and not why_not:
            why_not = (
                f"nothing is written: of {' and '.join(unknown)} the smallest size is good "
                f"already, so the bound lies below it: give a smaller -b than {options.begin}"
            )
        for text in [why_not] if why_not else in_words(bounds):
            say(f"# {text}")
        if world.rank == 0:
            made = datetime.now(timezone.utc).isoformat(timespec="seconds")
            entry = tuning.entry_here(settings, options.device, world.size, bounds, made)
            _write(options, entry, rows_of, why_not, say)
    if why_not:
        raise SystemExit(1)


def _rows(
    world: World, options: Namespace, operation: Operation, groups: list[Any]
) -> Iterator[table.Row]:
    bench = sweep.set_up(world, options, operation, groups)
    for size in sweep.sizes_of(options, world.size):
        for place in ("out", "in"):
            yield bench.row(size, place == "in")


def _objection(rows: Sequence[table.Row]) -> str:
    """Why the rows are no base for bounds; empty where they are. The same on all ranks."""
    if wrong := sum((row.wrong or 0) + (row.vs_wrong or 0) for row in rows):
        return f"nothing is written: {wrong} elements were wrong"
    if not any(row.direct for row in rows):
        return f"nothing is written: no call went direct ({rows[-1].route if rows else 'none'})"
    return ""


def in_words(bounds: Mapping[str, int | str]) -> list[str]:
    """What bounds mean, a sentence each."""
    named = {
        "all_gather": ("all-gathers", "of output"),
        "coalesced": ("coalesced all-gathers", "in the mean of the outputs"),
        "reduce_scatter": ("reduce-scatters", "of input"),
    }
    sentences = []
    for name, bound in bounds.items():
        what, of = named[name]
        # What a coalesced call has in all has to reach the other bound, too.
        whole = bounds.get("all_gather", 0) if name == "coalesced" else 0
        if bound == tuning.NEVER:
            text = "go to the inner backend: it was faster up to the largest size measured"
        elif whole == tuning.NEVER:
            text = "go to the inner backend, as all-gathers do"
        elif bound == 0 and whole == 0:
            text = "of any size go direct"
        else:
            parts = [f"{bound} bytes {of}"] * (bound != 0) + [f"{whole} bytes in all"] * (
                whole != 0
            )
            text = f"go direct from {' and '.join(parts)} on"
        sentences.append(f"{what} {text}")
    return sentences


def _write(
    options: Namespace,
    entry: tuning.Entry,
    rows_of: dict[str, list[table.Row]],
    why_not: str,
    say: Any,
) -> None:
    if not why_not and not options.dry_run:
        tuning.write(options.file, entry)
        given = "" if options.file == options.read_file else f" with PG_SDMA_TUNING={options.file}"
        say(
            f"# written to {options.file}, which groups of {entry.ranks} ranks on "
            f"{entry.device} read when they are made{given}"
        )
    if options.json:
        rows = {name: [row.as_json() for row in rows] for name, rows in rows_of.items()}
        result = {"entry": vars(entry), "why_not": why_not, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
