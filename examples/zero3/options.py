"""The command line of train_zero3.py. It also takes the spellings of DeepSpeed and its examples."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from common.options import add_process_group_options, parse_training, positive
from zero3.models import MODELS, ModelConfig

CONFIG = Path(__file__).parents[1] / "ds_config_zero3.json"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of a run; exits with a usage message where they contradict themselves."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT or Qwen3 with DeepSpeed ZeRO-3, 2 or 1.",
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", "--model-name", "--model_name", choices=MODELS, default="gpt-demo",
        help="shape; the weights are random (%(default)s)",
    )  # fmt: skip
    model.add_argument(
        "--layers", "--num-layers", "--num_layers", type=positive, help="in place of the model's"
    )
    model.add_argument(
        "--seq", "--seq-length", "--seq_length", type=positive, metavar="BYTES",
        help="sequence length, in place of the model's",
    )  # fmt: skip

    training = parser.add_argument_group("training")
    training.add_argument(
        "--data", type=Path, help="text file, or folder of text files (Python's standard library)"
    )
    training.add_argument(
        "--batch", "--batch-size", "--batch_size", type=positive,
        help="sequences a step on each rank, in place of the configuration's",
    )  # fmt: skip
    training.add_argument(
        "--steps", "--num-steps", "--num_steps", "--train-steps", "--train_steps",
        type=positive, default=100, help="steps, the warm-up's too (%(default)s)",
    )  # fmt: skip
    training.add_argument("--lr", type=float, help="in place of the configuration's")
    training.add_argument(
        "--seed", type=int, default=0, help="of weights and batches (%(default)s)"
    )
    training.add_argument(
        "--deterministic",
        action="store_true",
        help="deterministic kernels on GPU; those on CPU always are",
    )

    zero = parser.add_argument_group("DeepSpeed")
    zero.add_argument(
        "--ds-config", "--ds_config", "--deepspeed_config", type=Path, default=CONFIG,
        metavar="JSON", help="DeepSpeed's configuration (examples/ds_config_zero3.json)",
    )  # fmt: skip
    zero.add_argument(
        "--stage", type=int, choices=(1, 2, 3), help="of ZeRO, in place of the configuration's"
    )
    zero.add_argument(
        "--hpz", type=positive, metavar="RANKS",
        help="hpZ: ranks that hold a second copy of the parameters between them (none)",
    )  # fmt: skip
    zero.add_argument(
        "--deepspeed", action="store_true", help="no effect: that is what its launcher's users give"
    )
    zero.add_argument("--local_rank", "--local-rank", type=int, help="no effect: LOCAL_RANK counts")

    add_process_group_options(parser)

    report = parser.add_argument_group("measurement and report")
    report.add_argument(
        "--warmup", "--warmup-steps", "--warmup_steps", type=int, default=10,
        help="first steps left out of the times (%(default)s)",
    )  # fmt: skip
    report.add_argument(
        "--sync-every-step", action="store_true", help="drain the device before every step"
    )
    report.add_argument(
        "--out", type=Path, default=Path("out/zero3"), help="folder of the report (%(default)s)"
    )
    options = parse_training(parser, argv)
    if options.hpz and (options.stage or 3) != 3:
        parser.error(f"--hpz is a part of stage 3: not with --stage {options.stage}")
    return options


def model_config(options: argparse.Namespace) -> ModelConfig:
    """The model's sizes, each replaced by the option of its name where that was given."""
    config = MODELS[options.model]
    return replace(config, layers=options.layers or config.layers, seq=options.seq or config.seq)
