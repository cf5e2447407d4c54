"""`pg-sdma bench overlap`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from pg_sdma.bench import beside
from pg_sdma.bench.field import CONTENDERS_OF, OPERATIONS
from pg_sdma.bench.launch import UsageError, run_ranks
from pg_sdma.bench.layers import MODELS
from pg_sdma.cli.common import add_contenders, add_ranks, at_least, comma_list, size

# By operation: the models' forward gathers, and nothing else.
DEFAULT_MODELS = {"all_gather": ("gpt-7b", "gpt-70b"), "reduce_scatter": ()}


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "overlap",
        help="all-gathers, or reduce-scatters, beside matrix products, on GPUs",
        description="All-gathers, or reduce-scatters, beside a chain of matrix products; with "
        "all-gathers also the forward of a model sharded as ZeRO-3 shards it. Needs two GPUs or "
        "more.",
    )
    parser.set_defaults(parser=parser, command=command, device="cuda")
    add_ranks(parser, on_cpu=False)
    parser.add_argument(
        "--operation",
        choices=OPERATIONS,
        default="all_gather",
        help="what runs beside the chain; reduce-scatters sum bf16, and are let go direct "
        "(%(default)s)",
    )
    add_contenders(parser, None, "all that do the operation")
    parser.add_argument(
        "--sizes",
        type=comma_list(size),
        default="64M,256M",
        help="bytes of an all-gather's output, or a reduce-scatter's input, beside the chain "
        "(%(default)s)",
    )
    parser.add_argument(
        "--gemm", type=at_least(64), default=8192, help="n of the n^3 products (%(default)s)"
    )
    parser.add_argument(
        "--gathers",
        type=at_least(2),
        default=16,
        help="calls of the operation, back to back in a round (%(default)s)",
    )
    parser.add_argument("--rounds", type=at_least(1), default=7, help="(%(default)s)")
    parser.add_argument(
        "--models",
        type=_models,
        help=f"of {', '.join(MODELS)}, or none; with all-gathers only "
        f"({','.join(DEFAULT_MODELS['all_gather'])})",
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
        help="write rank 0's chrome trace of the calls here and print what ran on its device",
    )


def _models(text: str) -> list[str]:
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(MODELS)}")
    return names


def complete(options: argparse.Namespace) -> None:
    """Sets what was not given as the operation wants it.

    Raises UsageError where something was given that does not go with the operation.
    """
    able, operation = CONTENDERS_OF[options.operation], OPERATIONS[options.operation]
    if options.contenders is None:
        options.contenders = list(able)
    for name in options.contenders:
        if name not in able:
            raise UsageError(
                f"--contenders: {name} does no {operation.noun}s: give some of {', '.join(able)}"
            )
    if options.models is None:
        options.models = list(DEFAULT_MODELS[options.operation])
    elif options.models and not DEFAULT_MODELS[options.operation]:
        raise UsageError(
            f"--models: a model's forward has no {operation.noun}s: leave it out, or give "
            "--operation all_gather"
        )


def command(options: argparse.Namespace) -> int:
    complete(options)
    if not torch.cuda.is_available():
        raise UsageError("overlap is measured on GPUs, and torch sees none here")
    return run_ranks(beside.run, options)
