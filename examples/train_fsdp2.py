"""Trains a byte-level GPT with FSDP2, over pg_sdma or over the backend that it wraps.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py --compare

Runs on any machine; on CPU unless torch sees a GPU. The two runs differ only in the string that
`init_process_group` is given.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common.gpt import GPT
from common.loop import Run, run_steps
from common.options import (
    DTYPES,
    learning_rate,
    model_config,
    parse_training,
    training_parser,
)
from common.session import Launch
from common.text import ByteBatches, load_text
from common.trainer import run_trainer


class Training(Stateful):
    """Model, optimizer and the number of steps done: what a checkpoint holds."""

    def __init__(self, model: GPT, learning_rate: float) -> None:
        self.model = model
        # By default it is hundreds of small kernels a step, a large part of a GPU's time.
        on_gpu = next(model.parameters()).is_cuda
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=on_gpu)
        self.done = 0

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One optimizer step on int64 (batch, seq) tensors; returns this rank's loss."""
        loss = self.model(inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.done = state["done"]


def build(options: argparse.Namespace, device: torch.device) -> GPT:
    """The model, sharded over the default group. No rank ever holds all of it."""
    with torch.device("meta"):
        model = GPT(model_config(options))
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[options.param_dtype], reduce_dtype=torch.float32
    )
    for block in model.blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=options.reshard_after_forward,
        )
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.initialise(options.seed)
    return model


def newest_checkpoint(folder: Path) -> Path:
    """The folder itself if it is a checkpoint, else the one in it with the most steps.

    Raises FileNotFoundError where there is neither. An interrupted save does not count: the
    metadata is written last.
    """
    if (folder / ".metadata").exists():
        return folder
    complete = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    if not complete:
        raise FileNotFoundError(f"no checkpoint in {folder}: --resume takes what --save wrote")
    return complete[-1]


def train(launch: Launch, options: argparse.Namespace, transport: str, backend: str) -> Run:
    """One run from the seed, or from the checkpoint, to the last step."""
    training = Training(build(options, launch.device), learning_rate(options))
    if options.resume:
        dcp.load({"training": training}, checkpoint_id=newest_checkpoint(options.resume))
    if training.done >= options.steps:
        raise SystemExit(f"the checkpoint has {training.done} steps: give a larger --steps")

    def after_step(done: int) -> None:
        training.done = done
        due = options.save_every and done % options.save_every == 0
        if options.save and (due or done == options.steps):
            dcp.save({"training": training}, checkpoint_id=options.save / f"step-{done:06}")

    batches = ByteBatches(
        load_text(options.data),
        batch=options.batch,
        seq=training.model.config.seq,
        seed=options.seed,
        rank=launch.rank,
        world_size=launch.world_size,
    )
    return run_steps(
        training.step,
        batches,
        launch.device,
        transport=transport,
        backend=backend,
        steps=range(training.done, options.steps),
        warmup=options.warmup,
        sync_every_step=options.sync_every_step,
        after_step=after_step,
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with a usage message where it contradicts itself."""
    parser = training_parser("Train a byte-level GPT with FSDP2.")
    fsdp = parser.add_argument_group("FSDP2")
    fsdp.add_argument(
        "--reshard-after-forward",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ZeRO-3; without it parameters stay gathered until backward is done",
    )
    fsdp.add_argument("--save", type=Path, help="folder for checkpoints, one written at the end")
    fsdp.add_argument("--save-every", type=int, help="steps between further checkpoints")
    fsdp.add_argument(
        "--resume", type=Path, help="go on from a checkpoint, or the newest in a folder"
    )
    options = parse_training(parser, argv)
    if options.compare and options.save:
        parser.error("--compare trains twice and would write every checkpoint twice: drop --save")
    if options.save_every and not options.save:
        parser.error("--save-every needs --save")
    return options


def main() -> None:
    options = parse()
    name = "FSDP2" if options.reshard_after_forward else "FSDP2 (ZeRO-2)"
    run_trainer(name, options, train)


if __name__ == "__main__":
    main()
