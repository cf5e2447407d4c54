"""The training loop: runs the steps, times them on the device, collects figures for a report."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from common.progress import progress
from common.text import ByteBatches
from pg_sdma import fast_path_share

RUN_AHEAD = 2  # steps by which the host may lead the device


@dataclass(frozen=True)
class Run:
    """One training run as all ranks saw it."""

    transport: str  # or what else tells it from the run that it is compared with
    backend: str
    first_step: int
    losses: list[float]  # nats a byte, mean over the ranks, one a step
    ms_per_step: float  # median over the measured steps, each as long as on its slowest rank
    tokens_per_s: float  # of all ranks together
    peak_memory_bytes: int | None  # of torch's allocator, on the fullest device; None on CPU
    fast_path_share: float | None  # of what may go direct; None where nothing did


class StepClock:
    """Marks the ends of steps on the device's own timeline: CUDA events, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def wait(self, index: int) -> None:
        """Blocks the host until the device has passed mark `index`; below 0 there is none."""
        if self._cuda and index >= 0:
            self._events[index].synchronize()

    def milliseconds(self) -> list[float]:
        """From each mark to the next, once the device has passed them all."""
        if self._cuda:
            self._events[-1].synchronize()
            return [a.elapsed_time(b) for a, b in pairwise(self._events)]
        return [(b - a) * 1e3 for a, b in pairwise(self._times)]


def run_steps(
    step: Callable[[Tensor, Tensor], Tensor],
    batches: ByteBatches,
    device: torch.device,
    *,
    transport: str,
    backend: str,
    steps: range,
    warmup: int = 0,
    sync_every_step: bool = False,
    after_step: Callable[[int], None] = lambda done: None,
) -> Run:
    """Runs `step(inputs, targets)`, which returns this rank's loss, for every step of the range.

    `after_step(n)` is called when n steps are done, counted from the start of the training. Raises
    FloatingPointError where a loss is not finite.
    """
    cuda = device.type == "cuda"
    # Losses are copied out behind their step, so that reading one never drains the device.
    losses = torch.zeros(len(steps), pin_memory=cuda)
    clock = StepClock(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with progress(f"{transport} ({backend})", steps) as advance:
        clock.mark()
        for i, number in enumerate(steps):
            clock.wait(i + 1 - RUN_AHEAD)
            if sync_every_step and cuda:
                torch.cuda.synchronize(device)
            inputs, targets = batches(number)
            loss = step(inputs.to(device), targets.to(device))
            losses[i].copy_(loss.detach(), non_blocking=True)
            clock.mark()
            after_step(number + 1)
            finished = i - RUN_AHEAD if cuda else i
            advance(losses[finished].item() if finished >= 0 else math.nan)
        times = clock.milliseconds()
    share = math.nan if transport == "inner" else fast_path_share()
    mean = losses.to(device, torch.float64)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    if not mean.isfinite().all():
        first = steps[int((~mean.isfinite()).nonzero()[0])]
        raise FloatingPointError(f"the loss of step {first} over {backend} is not finite")
    peak = torch.cuda.max_memory_allocated(device) if cuda else 0
    measured = times[warmup:] or times[-1:]  # a resumed run may be shorter than the warm-up
    slowest = torch.tensor([*measured, peak], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    ms_per_step = statistics.median(slowest[:-1].tolist())
    tokens = batches.batch * batches.seq * batches.world_size
    return Run(
        transport=transport,
        backend=backend,
        first_step=steps.start,
        losses=mean.tolist(),
        ms_per_step=ms_per_step,
        tokens_per_s=tokens / ms_per_step * 1e3,
        peak_memory_bytes=int(slowest[-1]) if cuda else None,
        fast_path_share=None if math.isnan(share) else share,
    )
