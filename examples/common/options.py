"""The command line that the example trainers share."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch

from common.gpt import PRESETS, GPTConfig
from pg_sdma.settings import read_settings

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COMPARE = "train over inner, then over sdma, and compare"


def training_parser(description: str, compare: str = COMPARE) -> argparse.ArgumentParser:
    """A parser with every option that does not depend on how the model is sharded.

    `compare` says what the trainer does with --compare.
    """
    parser = argparse.ArgumentParser(description=description)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--preset", choices=PRESETS, default="demo", help="sizes where none is given (%(default)s)"
    )
    model.add_argument("--hidden", type=positive, help="hidden size")
    model.add_argument("--layers", type=positive, help="transformer blocks")
    model.add_argument("--heads", type=positive, help="attention heads")
    model.add_argument("--seq", type=positive, help="sequence length in bytes")

    training = parser.add_argument_group("training")
    training.add_argument(
        "--data", type=Path, help="text file, or folder of text files (Python's standard library)"
    )
    training.add_argument(
        "--batch", type=positive, default=4, help="sequences a step on each rank (%(default)s)"
    )
    training.add_argument(
        "--steps",
        type=positive,
        default=200,
        help="steps, those before --resume too (%(default)s)",
    )
    training.add_argument(
        "--lr", type=float, help="AdamW's learning rate, constant (0.128 / hidden size)"
    )
    training.add_argument(
        "--seed", type=int, default=0, help="of weights and batches (%(default)s)"
    )
    training.add_argument(
        "--param-dtype",
        choices=DTYPES,
        default="bf16",
        help="in which parameters are gathered and used; AdamW updates fp32 ones (%(default)s)",
    )
    training.add_argument(
        "--deterministic",
        action="store_true",
        help="deterministic kernels on GPU; those on CPU always are",
    )

    report = parser.add_argument_group("measurement and report")
    report.add_argument(
        "--warmup", type=int, default=10, help="first steps left out of the times (%(default)s)"
    )
    report.add_argument(
        "--sync-every-step", action="store_true", help="drain the device before every step"
    )
    report.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder of the report (%(default)s)"
    )
    add_process_group_options(parser, compare)
    return parser


def add_process_group_options(parser: argparse.ArgumentParser, compare: str = COMPARE) -> None:
    """Adds the options that say on which device and over which process group a run trains.

    `compare` says what the trainer does with --compare.
    """
    group = parser.add_argument_group("process group")
    group.add_argument(
        "--device", choices=("cpu", "cuda"), default=_default_device(), help="(%(default)s)"
    )
    group.add_argument(
        "--transport",
        choices=("sdma", "inner"),
        default="sdma",
        help="pg_sdma, or the backend that it wraps, plain (%(default)s)",
    )
    group.add_argument(
        "--inner-backend",
        metavar="NAME",
        help="the backend that sdma wraps and is compared with (nccl on GPU, gloo on CPU)",
    )
    group.add_argument("--compare", action="store_true", help=compare)


def parse_training(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses, and exits with a usage message for what argparse alone would let pass."""
    options = parser.parse_args(argv)
    if not 0 <= options.warmup < options.steps:
        parser.error(f"--warmup {options.warmup} leaves none of {options.steps} steps to measure")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if options.inner_backend:
        os.environ["PG_SDMA_INNER"] = f"{options.device}={options.inner_backend}"
    return options


def model_config(options: argparse.Namespace) -> GPTConfig:
    """The preset's sizes, each replaced by the option of its name where that was given."""
    preset = PRESETS[options.preset]
    return replace(
        preset,
        hidden=options.hidden or preset.hidden,
        layers=options.layers or preset.layers,
        heads=options.heads or preset.heads,
        seq=options.seq or preset.seq,
    )


def learning_rate(options: argparse.Namespace) -> float:
    """The rate given, or one that suits the width: wider models bear less, about in proportion."""
    return options.lr or 0.128 / model_config(options).hidden


def backend_string(transport: str, device: str) -> str:
    """The one thing by which a program with pg_sdma differs from the same program without it."""
    backend = "sdma" if transport == "sdma" else read_settings().inner_backend(device)
    return f"cpu:{backend}" if device == "cpu" else f"cpu:gloo,cuda:{backend}"


def positive(text: str) -> int:
    """argparse's type of a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
