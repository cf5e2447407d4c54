"""The command line `pg-sdma`: one file a subcommand."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pg_sdma.bench.launch import UsageError
from pg_sdma.cli import bench_overlap, bench_rivals, bench_sweep, info, model, trace, tune
from pg_sdma.settings import read_settings


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="pg-sdma", description="All-gathers over GPU copy engines: what runs here, how fast."
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    info.add(commands)
    tune.add(commands)
    model.add(commands)
    trace.add(commands)
    bench = commands.add_parser("bench", help="measure collectives")
    operations = bench.add_subparsers(metavar="WHAT", required=True)
    bench_sweep.add(operations)
    bench_overlap.add(operations)
    bench_rivals.add(operations)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv`; returns the exit status."""
    arguments = parser()
    options = arguments.parse_args(argv)
    # Of the subcommand: what is wrong is told with its usage. The ranks are given the rest.
    of_command: argparse.ArgumentParser = options.__dict__.pop("parser")
    try:
        read_settings()
    except ValueError as error:
        arguments.error(str(error))
    try:
        return options.command(options)
    except UsageError as error:
        of_command.error(str(error))
