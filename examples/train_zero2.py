"""Trains a byte-level GPT with ZeRO-2, and with plain DDP to compare.

    torchrun --standalone --nproc-per-node 2 examples/train_zero2.py --compare

Runs on any machine; on CPU unless torch sees a GPU.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common.gpt import GPT
from common.loop import Run, run_steps
from common.options import (
    DTYPES,
    backend_string,
    learning_rate,
    model_config,
    parse_training,
    training_parser,
)
from common.report import MIB, require_extras, write_report
from common.session import Launch, deterministic_kernels
from common.text import ByteBatches, load_text
from pg_sdma.zero2 import AdamW, Zero2, gradient_bytes


class Training(Protocol):
    """What a step is made of."""

    def micro_step(self, inputs: Tensor, targets: Tensor, weight: float, last: bool) -> Tensor:
        """Adds a micro-batch's gradients, times `weight`; returns its loss times `weight`."""

    def update(self) -> None:
        """Clips, steps, and drops the gradients."""


class Zero2Training(Training):
    """Parameters and gradients in --param-dtype, fp32 copies of the own parameters."""

    def __init__(self, model: GPT, options: argparse.Namespace) -> None:
        self.model = model.to(DTYPES[options.param_dtype])
        self.zero = Zero2(
            self.model,
            self.model.blocks,
            shard_dtype=DTYPES[options.shard_dtype],
            buffers=options.buffers,
            seed=options.seed,
        )
        self.optimizer = AdamW(self.zero, lr=learning_rate(options))
        self.max_norm = options.max_norm

    def micro_step(self, inputs: Tensor, targets: Tensor, weight: float, last: bool) -> Tensor:
        loss = self.model(inputs, targets) * weight
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.zero.clip_grad_norm_(self.max_norm)
        self.optimizer.step()


class DdpTraining(Training):
    """fp32 parameters and gradients, computing in --param-dtype."""

    def __init__(self, model: GPT, options: argparse.Namespace) -> None:
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate(options))
        self.max_norm = options.max_norm
        self.autocast = partial(
            torch.autocast,
            options.device,
            dtype=torch.bfloat16,
            enabled=options.param_dtype == "bf16",
        )

    def micro_step(self, inputs: Tensor, targets: Tensor, weight: float, last: bool) -> Tensor:
        with nullcontext() if last else self.ddp.no_sync():
            with self.autocast():
                loss = self.ddp(inputs, targets) * weight
            loss.backward()
        return loss.detach()

    def update(self) -> None:
        clip_grad_norm_(self.ddp.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


METHODS = {"ddp": DdpTraining, "zero2": Zero2Training}


def step(training: Training, micro_steps: int, inputs: Tensor, targets: Tensor) -> Tensor:
    """One optimizer step on int64 (batch, seq) tensors; returns this rank's mean loss."""
    parts = list(zip(inputs.chunk(micro_steps), targets.chunk(micro_steps), strict=True))
    losses = [
        training.micro_step(*part, weight=1 / micro_steps, last=part is parts[-1]) for part in parts
    ]
    training.update()
    return torch.stack(losses).sum()


def train(launch: Launch, options: argparse.Namespace, method: str, backend: str) -> Run:
    """One run of `method` from the seed to the last step, over the default group."""
    with launch.device:
        model = GPT(model_config(options))
    model.initialise(options.seed)
    batches = ByteBatches(
        load_text(options.data),
        batch=options.batch,
        seq=model.config.seq,
        seed=options.seed,
        rank=launch.rank,
        world_size=launch.world_size,
    )
    training = METHODS[method](model, options)
    if isinstance(training, Zero2Training):
        options.gradient_bytes = training.zero.gradient_bytes
    return run_steps(
        partial(step, training, options.micro_steps),
        batches,
        launch.device,
        transport=method,
        backend=backend,
        steps=range(options.steps),
        warmup=options.warmup,
        sync_every_step=options.sync_every_step,
    )


def gradient_formula(model: GPT, options: argparse.Namespace, world_size: int) -> int:
    """Bytes of gradients that a rank should have; the model may be on the meta device."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return gradient_bytes(
        blocks,
        model.parameter_count() - sum(blocks),
        world_size,
        buffers=options.buffers,
        dtype=DTYPES[options.param_dtype],
        shard_dtype=DTYPES[options.shard_dtype],
    )


def report(runs: list[Run], options: argparse.Namespace, launch: Launch) -> None:
    """Writes result.json, and of a comparison loss.png; prints what they hold."""
    config = model_config(options)
    with torch.device("meta"):
        model = GPT(config)
    setup = {
        "trainer": "ZeRO-2 and DDP" if options.compare else "ZeRO-2",
        "model": asdict(config),
        "parameters": model.parameter_count(),
        "param_dtype": options.param_dtype,
        "shard_dtype": options.shard_dtype,
        "ranks": launch.world_size,
        "batch_per_rank": options.batch,
        "micro_steps": options.micro_steps,
        "device_name": launch.device_name,
        "sync_every_step": options.sync_every_step,
        "gradient_bytes_measured": options.gradient_bytes,
        "gradient_bytes_formula": gradient_formula(model, options, launch.world_size),
        "gradient_bytes_whole": model.parameter_count() * DTYPES[options.param_dtype].itemsize,
    }
    write_report(runs, setup, options.out)
    print(
        f"gradients of a rank: {setup['gradient_bytes_measured'] / MIB:.2f} MiB, by the formula "
        f"{setup['gradient_bytes_formula'] / MIB:.2f}, unsharded "
        f"{setup['gradient_bytes_whole'] / MIB:.2f}"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with a usage message where it contradicts itself."""
    parser = training_parser(
        "Train a byte-level GPT with ZeRO-2.", compare="train with plain DDP first, and compare"
    )
    zero2 = parser.add_argument_group("ZeRO-2")
    zero2.add_argument(
        "--micro-steps", type=int, default=4, help="parts of a step's batch (%(default)s)"
    )
    zero2.add_argument(
        "--shard-dtype", choices=DTYPES, default="bf16", help="of gradient shards (%(default)s)"
    )
    zero2.add_argument(
        "--buffers", type=int, default=2, help="blocks' gradients kept at a time (%(default)s)"
    )
    zero2.add_argument(
        "--max-norm", type=float, default=1.0, help="gradients are clipped to it (%(default)s)"
    )
    parser.set_defaults(out=Path("out/zero2"))
    options = parse_training(parser, argv)
    if options.micro_steps < 1 or options.batch % options.micro_steps:
        parser.error(f"--batch {options.batch} is no multiple of {options.micro_steps} micro-steps")
    return options


def main() -> None:
    options = parse()
    if options.compare:
        require_extras()
    launch = Launch(options.device)
    backend = backend_string(options.transport, options.device)
    runs = []
    for method in ("ddp", "zero2") if options.compare else ("zero2",):
        with launch.process_group(backend), deterministic_kernels(options.deterministic):
            runs.append(train(launch, options, method, backend))
    if launch.rank == 0:
        report(runs, options, launch)


if __name__ == "__main__":
    main()
