"""`pg-sdma info`: the machine, the settings, and the route that all-gathers take here."""

from __future__ import annotations

import argparse
import json

import torch.distributed as dist

from pg_sdma import info
from pg_sdma.bench.launch import UsageError
from pg_sdma.cli.common import at_least


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "info",
        help="what runs here, and why not something faster",
        description="The machine, the settings, and the route that an all-gather takes here: two "
        "CPU ranks, and a rank a GPU where there are several, make a group and gather for two "
        "seconds.",
        epilog="Exit status: 0 where the direct route works here, for GPU tensors where torch sees "
        "a GPU and else for CPU tensors; 1 where it does not, and the reason is printed.",
    )
    parser.set_defaults(command=command)
    parser.add_argument(
        "--ranks",
        type=at_least(2),
        help="CPU ranks of the self-test (2); with GPUs, at most one a GPU",
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="length of the self-test (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def command(options: argparse.Namespace) -> int:
    if dist.is_torchelastic_launched():
        raise UsageError("info starts the ranks of its self-test itself: run it without torchrun")
    found = info.report(options.ranks, options.seconds)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, text in info.lines(found):
            print(f"{name:<16}{text}")
    return 0 if found["direct_works"] else 1
