"""`pg-sdma bench overlap`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from pg_sdma.bench import beside
from pg_sdma.bench.launch import UsageError, run_ranks
from pg_sdma.bench.layers import MODELS
from pg_sdma.cli.common import add_contenders, add_ranks, at_least, comma_list, size


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "overlap",
        help="all-gathers beside matrix products, on GPUs",
        description="All-gathers beside a chain of matrix products, and the forward of a model "
        "sharded as ZeRO-3 shards it. Needs two GPUs or more.",
    )
    parser.set_defaults(command=command, device="cuda")
    add_ranks(parser)
    add_contenders(parser)
    parser.add_argument(
        "--sizes",
        type=comma_list(size),
        default="64M,256M",
        help="outputs of the gathers beside the chain, in bytes (%(default)s)",
    )
    parser.add_argument(
        "--gemm", type=at_least(64), default=8192, help="n of the n^3 products (%(default)s)"
    )
    parser.add_argument(
        "--gathers", type=at_least(2), default=16, help="back to back in a round (%(default)s)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=7, help="(%(default)s)")
    parser.add_argument(
        "--models",
        type=_models,
        default="gpt-7b,gpt-70b",
        help=f"of {', '.join(MODELS)}, or none (%(default)s)",
    )
    parser.add_argument(
        "--layers", type=at_least(2), default=24, help="of each model (%(default)s)"
    )
    parser.add_argument(
        "--seq", type=comma_list(at_least(1)), default="2048", help="tokens a step (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=at_least(1), default=5, help="of a model in a round (%(default)s)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write rank 0's chrome trace of gathers here and print what ran on its device",
    )


def _models(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(MODELS)}")
    return names


def command(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise UsageError("overlap is measured on GPUs, and torch sees none here")
    return run_ranks(beside.run, options)
