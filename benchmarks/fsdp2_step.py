"""Times FSDP2 steps over NCCL and over sdma, in turn and in one run, and says what the GPU did.

    torchrun --standalone --nproc-per-node 2 benchmarks/fsdp2_step.py --rounds 2 --profile

Each round trains the same model from the same seed over each backend. "free" steps let the host
lead the device by two steps; "sync" steps start from an idle device, so that the host's time and
the ranks' host skew lie on the critical path. Batches lie on the device before the clock starts.
The profile sums kernel and copy time a step on rank 0, over three steps of their own. Options not
listed here are those of examples/train_fsdp2.py.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import pg_sdma
import train_fsdp2
from common.options import backend_string, learning_rate
from common.session import Launch
from common.text import ByteBatches, load_text

SHAPE = (
    "--device cuda --hidden 4096 --layers 16 --heads 32 --seq 2048 --batch 1 --steps 30 --warmup 6"
)
KINDS = {
    "reduce-scatter": ("reducescatter",),
    "all-gather kernel": ("allgather",),
    "peer copy": ("ptop",),
    "GEMM": ("gemm", "cutlass", "nvjet"),
    "attention": ("flash", "fmha"),
    "optimizer": ("multi_tensor",),
    "copy": ("memcpy", "memset"),
}


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(w in lower for w in words)), "other")


class Trainer:
    """One model and its batches on this rank's device."""

    def __init__(self, launch: Launch, options: argparse.Namespace) -> None:
        self.device = launch.device
        self.training = train_fsdp2.Training(
            train_fsdp2.build(options, launch.device), learning_rate(options)
        )
        batches = ByteBatches(
            load_text(options.data),
            batch=options.batch,
            seq=self.training.model.config.seq,
            seed=options.seed,
            rank=launch.rank,
            world_size=launch.world_size,
        )
        self.batches = [tuple(part.to(launch.device) for part in batches(i)) for i in range(4)]

    def run(self, steps: int, *, sync: bool) -> tuple[float, float]:
        """Median milliseconds a step on the device, and in the host's call of a step."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        host = []
        marks[0].record()
        for i in range(steps):
            if sync:
                torch.cuda.synchronize(self.device)
            elif i >= 2:
                marks[i - 1].synchronize()
            start = time.perf_counter()
            self.training.step(*self.batches[i % len(self.batches)])
            host.append(time.perf_counter() - start)
            marks[i + 1].record()
        torch.cuda.synchronize(self.device)
        device = [a.elapsed_time(b) for a, b in pairwise(marks)]
        return statistics.median(device), statistics.median(host) * 1e3

    def breakdown(self, steps: int = 3) -> Counter[str]:
        """Milliseconds a step of kernels and copies, by kind; they overlap."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.run(steps, sync=False)
        spent: Counter[str] = Counter()
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                spent[kind_of(event.name)] += event.time_range.elapsed_us() / steps / 1e3
        return spent


def measure(launch: Launch, options: argparse.Namespace, transport: str) -> dict[str, float]:
    backend = backend_string(transport, "cuda")
    with launch.process_group(backend):
        trainer = Trainer(launch, options)
        trainer.run(options.warmup, sync=False)
        result = {}
        for name in ("free", "sync"):
            step, host = trainer.run(options.steps, sync=name == "sync")
            slowest = torch.tensor([step, host], device=launch.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            result[name], result[f"{name} host"] = slowest.tolist()
        if launch.rank == 0 and transport == "sdma":
            print(f"    direct share of the bytes: {pg_sdma.fast_path_share():.3f}")
        if options.profile:
            spent = trainer.breakdown()
            if launch.rank == 0:
                text = ", ".join(f"{kind} {ms:.1f}" for kind, ms in spent.most_common())
                print(f"    {transport}, ms a step: {text}", flush=True)
        del trainer
        gc.collect()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    own, rest = parser.parse_known_args()
    options = train_fsdp2.parse([*SHAPE.split(), *rest])
    options.rounds, options.profile = own.rounds, own.profile
    launch = Launch("cuda")
    for number in range(options.rounds):
        rows = {transport: measure(launch, options, transport) for transport in ("inner", "sdma")}
        if launch.rank == 0:
            print(f"round {number}: ms a step, device (host), on the slower rank")
            for name in ("free", "sync"):
                a, b = rows["inner"], rows["sdma"]
                print(
                    f"    {name}: inner {a[name]:.1f} ({a[name + ' host']:.1f})"
                    f"  sdma {b[name]:.1f} ({b[name + ' host']:.1f})"
                    f"  sdma is {(a[name] / b[name] - 1) * 100:+.1f} % faster",
                    flush=True,
                )


if __name__ == "__main__":
    main()
