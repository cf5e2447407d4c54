"""Options that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

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


def add_common(parser: argparse.ArgumentParser) -> None:
    """--ranks, --backend, --vs and --json."""
    parser.add_argument(
        "--ranks",
        type=at_least(2),
        help="processes to start; without it one a GPU, two on CPU. Not under torchrun",
    )
    parser.add_argument(
        "--backend",
        default="sdma",
        help="what is measured; 'inner' is what sdma wraps (%(default)s)",
    )
    parser.add_argument(
        "--vs",
        default="inner",
        metavar="BACKEND",
        help="what it is compared with, or 'none'; inner with inner shows the noise (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
