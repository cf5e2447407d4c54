"""`pg-sdma trace`: what the flight records of a broken group say."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

from pg_sdma.trace import FlightRecord, Lane, read_flight_record, to_torch


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "trace",
        help="read flight records",
        description="Prints what each rank's flight record (PG_SDMA_TRACE_FILE) says of groups "
        "that broke, and of collectives that did not end.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="one a rank")
    parser.add_argument(
        "--torch",
        type=Path,
        metavar="DIR",
        help="also write the records as torch's own, for `torchfrtrace DIR`",
    )
    parser.set_defaults(parser=parser, command=command)


def command(options: argparse.Namespace) -> int:
    try:
        records = [read_flight_record(path) for path in options.files]
    except (OSError, ValueError) as error:
        print(f"pg-sdma trace: {error}")
        return 1
    for record in sorted(records, key=lambda record: record["rank"]):
        print("\n".join(describe(record)))
    if options.torch is not None:
        options.torch.mkdir(parents=True, exist_ok=True)
        for record in records:
            path = options.torch / f"sdma_{record['rank']}"
            path.write_bytes(pickle.dumps(to_torch(record)))
    return 0


def describe(record: FlightRecord) -> list[str]:
    """The lines that are printed of one rank's record."""
    lines = [f"rank {record['rank']} (process {record['pid']})"]
    for lane in record["lanes"]:
        lines.append(f"  group {lane['group']} on {lane['device']}, rank {lane['rank']} of it")
        if lane["fault"]:
            lines.append(f"    fault: {lane['fault']}")
        lines += [f"    {line}" for line in _unfinished(lane)]
        for rank in lane["ranks"]:
            fate = " ended" * rank["ended"] + " departed" * rank["departed"]
            last = f", {rank['others']} others (last {rank['other']})" if rank["others"] else ""
            lines.append(
                f"    rank {rank['rank']}: called {rank['called']}, started {rank['started']}, "
                f"finished {rank['finished']}{last}{fate}"
            )
    return lines


def _unfinished(lane: Lane) -> list[str]:
    return [
        f"{entry['state']}: {entry['operation']} (collective {entry['id']}, "
        f"operation {entry['number'] or '-'}) of {entry['output_elements']} {entry['dtype']}"
        for entry in lane["entries"]
        if entry["state"] in ("scheduled", "started", "enqueued", "failed")
    ]
