"""`pg-sdma bench all_gather` and `pg-sdma bench reduce_scatter`."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from pg_sdma.bench import all_gather, reduce_scatter, sweep
from pg_sdma.bench.launch import APART, Body, UsageError, run_ranks
from pg_sdma.bench.operation import Operation
from pg_sdma.cli.common import add_backends, add_device, add_ranks, add_sizes, at_least


def add(commands: argparse._SubParsersAction) -> None:
    _add(commands, all_gather.OPERATION, all_gather.run)
    _add(commands, reduce_scatter.OPERATION, reduce_scatter.run)


def _add(commands: argparse._SubParsersAction, operation: Operation, body: Body) -> None:
    parser = commands.add_parser(
        operation.name,
        help="time and bandwidth against size, in the columns of nccl-tests",
        description="Time and bandwidth against size, in the columns of nccl-tests. A size is "
        f"that of the {operation.whole} on one rank. Unless PG_SDMA_MIN_BYTES is set, sdma carries "
        "every size itself.",
    )
    parser.set_defaults(parser=parser, command=command, body=body)
    add_device(parser)
    add_ranks(parser)
    add_backends(parser)
    add_sizes(parser, begin="1K", end="64M")
    parser.add_argument(
        "-c",
        "--check",
        type=int,
        nargs="?",
        const=1,
        choices=(0, 1),
        default=1,
        help="count wrong elements after each size, in outputs that are wrong everywhere before "
        "the call, or do not (%(default)s)",
    )
    places = parser.add_mutually_exclusive_group()
    for place, name in (("in", "--in-place"), ("out", "--out-of-place")):
        places.add_argument(
            name,
            dest="places",
            action="store_const",
            const=(place,),
            default=("out", "in"),
            help="one of the two alone; otherwise both",
        )
    parser.add_argument(
        "--coalesced",
        type=at_least(1),
        default=1,
        metavar="K",
        help="tensors in one call (%(default)s); --vs apart compares with a call for each",
    )
    parser.add_argument(
        "--groups",
        type=at_least(1),
        default=1,
        help="equal groups that call at the same time (%(default)s)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves here")


def command(options: argparse.Namespace) -> int:
    if options.plot and find_spec("matplotlib") is None:
        raise UsageError("--plot draws with matplotlib: pip install 'pg-sdma[bench]'")
    if options.vs == APART and options.coalesced == 1:
        raise UsageError("--vs apart makes a call for each tensor of --coalesced K: give that too")
    return run_ranks(options.body, options, sweep.sizes_of)
