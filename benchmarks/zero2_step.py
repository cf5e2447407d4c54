"""What a step costs with plain DDP, with FSDP2 that keeps parameters, and with ZeRO-2.

    torchrun --standalone --nproc-per-node 2 benchmarks/zero2_step.py

Trains a GPT in fp32 on CPU with each in turn, several times. Prints for each the medians of a
step's CPU time and wall time on rank 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from common.gpt import GPT, GPTConfig
from pg_sdma.zero2 import AdamW, Zero2

Times = tuple[list[float], list[float]]
Step = tuple[nn.Module, Callable[[bool], Any], Callable[[], None]]
"""The module to call, what a micro-step runs within (given whether it is the last), the update."""


def ddp(model: GPT) -> Step:
    module = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(module.parameters())

    def update() -> None:
        clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return module, lambda last: nullcontext() if last else module.no_sync(), update


def fsdp2(model: GPT) -> Step:
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def update() -> None:
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, lambda last: nullcontext(), update


def zero2(shard_dtype: torch.dtype) -> Callable[[GPT], Step]:
    def make(model: GPT) -> Step:
        zero = Zero2(model, model.blocks, shard_dtype=shard_dtype)
        optimizer = AdamW(zero)

        def update() -> None:
            zero.clip_grad_norm_(1.0)
            optimizer.step()

        return model, lambda last: nullcontext(), update

    return make


METHODS: dict[str, Callable[[GPT], Step]] = {
    "DDP": ddp,
    "FSDP2, reshard_after_forward=False": fsdp2,
    "ZeRO-2, fp32 shards": zero2(torch.float32),
    "ZeRO-2, bf16 shards": zero2(torch.bfloat16),
}


def measure(method: str, options: argparse.Namespace) -> Times:
    """CPU and wall milliseconds of each step."""
    model = GPT(GPTConfig(hidden=options.hidden, layers=options.layers, heads=4, seq=options.seq))
    model.initialise(0)
    module, within, update = METHODS[method](model)
    cpu, wall = [], []
    for _ in range(options.warmup + options.steps):
        inputs = torch.randint(256, (options.micro_steps, options.batch, options.seq))
        dist.barrier()
        start = time.process_time(), time.perf_counter()
        for index, part in enumerate(inputs):
            with within(index == options.micro_steps - 1):
                (module(part, part) / options.micro_steps).backward()
        update()
        cpu.append(1e3 * (time.process_time() - start[0]))
        wall.append(1e3 * (time.perf_counter() - start[1]))
    return cpu[options.warmup :], wall[options.warmup :]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares steps of DDP, FSDP2 and ZeRO-2 on CPU.")
    for name, default in {
        "hidden": 256,
        "layers": 6,
        "seq": 128,
        "batch": 2,
        "micro-steps": 4,
        "steps": 6,
        "warmup": 2,
        "rounds": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    parser.add_argument("--backend", default="cpu:sdma", help="of the group (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    found: dict[str, list[Times]] = {m: [] for m in METHODS}
    for _ in range(options.rounds):
        for method in METHODS:
            found[method].append(measure(method, options))
    if dist.get_rank() == 0:
        print("| | CPU ms a step | wall ms a step |")
        print("| --- | --- | --- |")
        for method, runs in found.items():
            cpu, wall = (statistics.median(t for run in runs for t in run[i]) for i in (0, 1))
            print(f"| {method} | {cpu:.0f} | {wall:.0f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
