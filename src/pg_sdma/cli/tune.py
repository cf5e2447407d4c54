"""`pg-sdma tune`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pg_sdma import tuning
from pg_sdma.bench import sweep, tune
from pg_sdma.bench.launch import UsageError, run_ranks
from pg_sdma.cli.common import add_device, add_ranks, add_sizes
from pg_sdma.settings import read_settings

LARGEST = {"cpu": 16 << 20, "cuda": 256 << 20}


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure from which size on to go direct here, and have groups do so",
        description="Measures from which size on calls over the direct route are no slower than "
        "over the inner backend, for this machine (by its host name), device and number of ranks, "
        "and writes the bounds to a file that groups read when they are made. PG_SDMA_MIN_BYTES, "
        "where it is set, wins over the file. Run it once for each number of ranks that your "
        "groups have, and again after an update of torch, the driver or pg_sdma.",
    )
    parser.set_defaults(parser=parser, command=command, backend="sdma", vs="inner")
    add_device(parser)
    add_ranks(parser)
    add_sizes(parser, begin="4K", end=None, end_default="16M for cpu, 256M for cuda")
    parser.add_argument(
        "--file",
        type=Path,
        help="the tuning file; the default is PG_SDMA_TUNING, or else "
        "pg_sdma/tuning.json under $XDG_CONFIG_HOME or ~/.config",
    )
    parser.add_argument("--dry-run", action="store_true", help="measure, and write no tuning file")


def command(options: argparse.Namespace) -> int:
    settings = read_settings()
    options.end = options.end or LARGEST[options.device]
    options.read_file = tuning.path_of(settings)  # by the groups of this environment
    options.file = options.file or options.read_file
    if options.file is None and not options.dry_run:
        raise UsageError("no tuning file is in use here (PG_SDMA_TUNING=off?): give --file")
    if not options.dry_run:
        _check_writable(options.file, "--file")
    if options.json:
        _check_writable(options.json, "--json")
    if not tune.parts(options.device, settings.ops):
        raise UsageError(f"PG_SDMA_OPS={','.join(settings.ops)} leaves nothing to tune on CPU")
    return run_ranks(tune.run, options, check)


def _check_writable(file: Path, option: str) -> None:
    """Raises UsageError where `file` could not be written after all the measuring."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error}") from None
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise UsageError(f"{file} cannot be written: give another {option}")


def check(options: argparse.Namespace, ranks: int) -> None:
    """Raises UsageError where there are no sizes to measure."""
    if options.begin > options.end:
        raise UsageError(f"-b {options.begin} is above -e {options.end}")
    for part in tune.parts(options.device, read_settings().ops):
        sweep.sizes_of(tune.options_of(options, part), ranks)
