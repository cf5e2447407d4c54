"""Options that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from pg_sdma.bench.buffers import DTYPES
from pg_sdma.bench.field import CONTENDERS
from pg_sdma.bench.table import parse_size

T = TypeVar("T")


def size(text: str) -> int:
    """Bytes, as argparse wants a type: ValueError's message shown to the user."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: integers from `least`."""

    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer from {least}")
        return int(text)

    return integer


def comma_list(item: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A type for argparse: items with commas between them."""
    return lambda text: [item(part) for part in text.split(",")]


def add_ranks(parser: argparse.ArgumentParser, on_cpu: bool = True) -> None:
    """--ranks and --json. `on_cpu`: whether it runs there, too."""
    parser.add_argument(
        "--ranks",
        type=at_least(2),
        help=f"processes to start; without it one a GPU{', two on CPU' * on_cpu}. "
        "Not under torchrun",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help="(%(default)s)")


def add_backends(parser: argparse.ArgumentParser) -> None:
    """--backend and --vs."""
    parser.add_argument(
        "--backend",
        default="sdma",
        help="what is measured; 'inner' is what sdma wraps (%(default)s)",
    )
    parser.add_argument(
        "--vs",
        default="inner",
        metavar="BACKEND",
        help="what it is compared with: a backend, 'inner', 'none', or 'apart': the measured "
        "backend with a call for each tensor. Inner with inner shows the noise (%(default)s)",
    )


def add_contenders(
    parser: argparse.ArgumentParser,
    default: str | None = ",".join(CONTENDERS),
    default_shown: str = "%(default)s",
) -> None:
    """--contenders.

    Without `default` the option may be None, and `default_shown` tells the user what that means.
    """
    parser.add_argument(
        "--contenders",
        type=comma_list(_contender),
        default=default,
        help="who takes part: sdma; inner, the backend that it wraps; NCCL's zero-CTA policy; "
        f"torch's _low_contention_all_gather; a plain copy from the next GPU ({default_shown})",
    )


def _contender(text: str) -> str:
    if text not in CONTENDERS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(CONTENDERS)}")
    return text


def add_sizes(
    parser: argparse.ArgumentParser, begin: str, end: str | None, end_default: str = "%(default)s"
) -> None:
    """-b, -e, -f, -n, -w and -d, as nccl-tests has them.

    Without `end` the option may be None, and `end_default` tells the user what that means.
    """
    parser.add_argument(
        "-b", "--begin", type=size, default=begin, help="smallest size in bytes (%(default)s)"
    )
    parser.add_argument(
        "-e", "--end", type=size, default=end, help=f"largest size in bytes ({end_default})"
    )
    parser.add_argument(
        "-f", "--factor", type=at_least(2), default=4, help="from size to size (%(default)s)"
    )
    parser.add_argument(
        "-n", type=at_least(1), default=20, help="calls that are timed (%(default)s)"
    )
    parser.add_argument("-w", type=at_least(1), default=5, help="calls before them (%(default)s)")
    parser.add_argument(
        "-d", "--dtype", choices=DTYPES, default="float", help="of the elements (%(default)s)"
    )
