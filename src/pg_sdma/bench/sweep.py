"""One operation, from small sizes to large, over one backend or two in turn."""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from pg_sdma.bench import table
from pg_sdma.bench.buffers import ALIGNMENT, DTYPES, Arena, Case, make_buffers
from pg_sdma.bench.launch import APART, UsageError, World, measured_backends
from pg_sdma.bench.measure import Call, Gate, time_calls
from pg_sdma.bench.operation import Operation
from pg_sdma.bench.peak import measure_peak
from pg_sdma.bench.plot import WORDS, crossover, draw
from pg_sdma.bench.progress import progress
from pg_sdma.bench.routes import direct_since, route_since
from pg_sdma.stats import stats

# More than the caches hold of the machines that this runs on.
ROTATED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Bench:
    """What all rows share."""

    world: World
    operation: Operation
    groups: list[dist.ProcessGroup]  # the measured one and, if any, the one to compare with
    whole: Arena
    shards: Arena
    gate: Gate | None  # None on CPU
    options: Namespace

    def row(self, size: int, in_place: bool) -> table.Row:
        """Times both groups' calls of `size` bytes or a little less, then checks them."""
        operation, options, group = self.operation, self.options, self.groups[0]
        ranks = tuple(dist.get_process_group_ranks(group))
        dtype = DTYPES[options.dtype]
        case = Case(
            dtype=dtype,
            count=size // (len(ranks) * options.coalesced * dtype.itemsize),
            tensors=options.coalesced,
            in_place=in_place,
            ranks=ranks,
            rank=dist.get_rank(group),
        )
        buffers = make_buffers(case, self.whole, self.shards, 2 * options.n)

        def call(kind: int) -> Call:
            # Half a turn apart: what one backend has just touched is not the other's next.
            shift = kind * len(buffers) // 2
            make = operation.apart if kind == 1 and options.vs == APART else operation.call
            return lambda i: make(buffers[(i + shift) % len(buffers)], self.groups[kind])

        calls = [call(kind) for kind in range(len(self.groups))]
        before = stats(group)
        times = time_calls(calls, self.world, options.n, options.w, self.gate)
        after = stats(group)
        wrong: list[int] = []
        if options.check:
            found = (operation.count_wrong(case, buffers[0], g) for g in self.groups)
            wrong = [self.world.total(count) for count in found]
        return table.Row(
            size=case.size,
            count=case.count,
            type=options.dtype,
            redop=operation.redop,
            place="in" if in_place else "out",
            ranks=len(ranks),
            times=times[0],
            vs=times[1] if len(times) > 1 else None,
            wrong=wrong[0] if wrong else None,
            vs_wrong=wrong[1] if len(wrong) > 1 else None,
            route=route_since(before, after),
            direct=direct_since(before, after),
        )


def set_up(
    world: World, options: Namespace, operation: Operation, groups: list[dist.ProcessGroup]
) -> Bench:
    """Memory for the calls of `groups`, up to the largest size of `options`."""
    members = world.size // options.groups
    largest = sizes_of(options, world.size)[-1] + ALIGNMENT
    room = max(largest, min(ROTATED_BYTES, 2 * options.n * largest))
    return Bench(
        world=world,
        operation=operation,
        groups=groups,
        whole=Arena(room, world.device),
        shards=Arena(room // members + ALIGNMENT, world.device),
        gate=Gate(world.device) if world.device.type == "cuda" else None,
        options=options,
    )


def sizes_of(options: Namespace, ranks: int) -> list[int]:
    """The sizes to measure, from the least that gives each tensor of each rank an element.

    Raises UsageError where there is none, or the ranks do not divide into the groups.
    """
    if ranks % options.groups or ranks == options.groups:
        raise UsageError(f"{ranks} ranks do not make {options.groups} groups of two or more")
    least = ranks // options.groups * options.coalesced * DTYPES[options.dtype].itemsize
    begin = max(least, options.begin)
    if options.end < begin:
        raise UsageError(f"-e {options.end} is below the smallest size, {begin} bytes")
    return table.sizes(begin, options.end, options.factor)


def run(world: World, options: Namespace, operation: Operation) -> None:
    """Measures every size; rank 0 prints the table and writes what the options ask for.

    Raises SystemExit(1) on every rank where an element was wrong.
    """
    operation.go_direct()
    names = measured_backends(options)
    members = world.size // options.groups
    sizes = sizes_of(options, world.size)
    groups = [world.group(name.partition(",")[0], options.groups) for name in names]
    bench = set_up(world, options, operation, groups)
    shown = table.columns(world.device.type, names, operation)
    facts: dict[str, object] = {
        "operation": operation.name,
        "size_of": operation.whole,
        "backend": names[0],
        "vs": names[1] if len(names) > 1 else None,
        **world.facts(),
        "groups": options.groups,
        "coalesced": options.coalesced,
        "dtype": options.dtype,
        "iterations": options.n,
        "warmup": options.w,
    }
    with progress(world.rank == 0, len(sizes) * len(options.places)) as (say, advance):
        say("# " + ", ".join(f"{key} {value}" for key, value in facts.items()))
        for text in (*table.explanation(shown), *table.heading(shown)):
            say(text)
        rows = []
        for size in sizes:
            for place in options.places:
                rows.append(bench.row(size, place == "in"))
                say(table.line(rows[-1], shown))
                advance()
        peak = measure_peak(world, rows[-1].size, members, bench.gate, options.n, operation.whole)
        say(f"# {peak.sentence(names[0], rows)}")
        for text in summary(rows, names):
            say(f"# {text}")
        wrong = sum((row.wrong or 0) + (row.vs_wrong or 0) for row in rows)
        say(f"# {wrong} elements were wrong" if options.check else "# outputs were not checked")
    if world.rank == 0:
        found = {"peak": asdict(peak) | {"shares": peak.shares(rows)}}
        write(facts | found | {"rows": [row.as_json() for row in rows]}, options)
    if wrong:
        raise SystemExit(1)


def summary(rows: Sequence[table.Row], names: Sequence[str]) -> list[str]:
    """What all rows come to: nccl-tests' mean of the bandwidths, and who is faster from where."""
    mean = statistics.fmean(row.busbw for row in rows)
    found = [f"Avg bus bandwidth: {mean:.2f} GB/s"]
    for place, words in WORDS.items():
        of_place = [{"size": row.size, "ratio": row.ratio} for row in rows if row.place == place]
        if len(names) < 2 or not of_place:
            continue
        size = crossover(of_place)
        from_where = "at the largest size" if size is None else f"from {size} bytes on"
        slower = "slower" if size is None else "never slower"
        found.append(f"{words}, {names[0]} is {slower} than {names[1]} {from_where}")
    return found


def write(result: dict[str, object], options: Namespace) -> None:
    """The files that the options ask for."""
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        draw(result, options.plot)
