"""`pg-sdma bench rivals`."""

from __future__ import annotations

import argparse
from pathlib import Path

from pg_sdma.bench import rivals, sweep
from pg_sdma.bench.launch import run_ranks
from pg_sdma.cli.common import add_contenders, add_device, add_ranks, add_sizes


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "rivals",
        help="all-gathers of sdma, of NCCL in two ways, of torch, and a plain copy, in turn",
        description="All-gathers of several contenders in turn, as a Markdown table. Who cannot "
        "run here is named with the reason, and the others go on. On GPUs the profiler then tells "
        "what ran on the device, so that nobody is measured by another's way.",
    )
    parser.set_defaults(parser=parser, command=command, groups=1, coalesced=1)
    add_device(parser)
    add_ranks(parser)
    add_contenders(parser)
    add_sizes(parser, begin="4K", end="1G")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="write rank 0's chrome trace here"
    )


def command(options: argparse.Namespace) -> int:
    return run_ranks(rivals.run, options, sweep.sizes_of)
