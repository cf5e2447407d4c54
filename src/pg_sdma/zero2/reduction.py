"""Carries one unit's gradient after another to the shards, beside the backward that makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pg_sdma.zero2.rounding import Key, accumulate

# Since torch 2.13 `reduce_scatter_tensor` warns that it is deprecated.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Buffer:
    """Room for the gradient of one unit at a time; zero whenever a unit takes it."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.zeros(numel, dtype=dtype, device=device)
        self.holder: object = None  # the unit whose gradients are arriving


@dataclass(frozen=True)
class Reduction:
    """A unit's gradient (n * size,), to be averaged over the group into this rank's shard (n,)."""

    gradient: Tensor
    shard: Tensor
    overwrite: bool
    key: Key
    group: dist.ProcessGroup

    def reduce_scatter(self, async_op: bool) -> dist.Work | None:
        """In place: this rank's part of the gradient becomes the mean over the ranks."""
        # Before the sum, as DDP does: the sum of what has a finite mean may not be finite.
        if self.group.size() > 1:
            self.gradient.mul_(1 / self.group.size())
        work: dist.Work | None = _reduce_scatter(
            self.gradient[self._first :][: self.shard.numel()],
            self.gradient,
            op=dist.ReduceOp.SUM,
            group=self.group,
            async_op=async_op,
        )
        return work

    def accumulate(self) -> None:
        """Adds the mean over the group to the shard, and zeroes the gradient."""
        accumulate(self.shard, self.gradient, self._first, 1.0, self.overwrite, self.key)

    @property
    def _first(self) -> int:
        return self.group.rank() * self.shard.numel()


class Reducer(Protocol):
    """Decides when what was launched is carried out. Launches have the same order on all ranks."""

    def arriving(self, buffer: Buffer) -> None:
        """Before each gradient is added into the buffer, in the thread and stream that add it."""

    def launch(self, buffer: Buffer, reduction: Reduction) -> None:
        """Once all gradients are in the buffer. Returns without waiting for peers."""

    def finish(self) -> None:
        """Everything launched is in the shards for what the caller does next: on its current
        stream, or on the host where there are no streams."""


class HostReducer(Reducer):
    """For CPU tensors: reduce-scatters as asynchronous operations of the group, waited for when
    their buffer is needed again, or at the end."""

    def __init__(self) -> None:
        self._running: dict[Buffer, tuple[dist.Work | None, Reduction]] = {}

    def arriving(self, buffer: Buffer) -> None:
        # What was launched earlier is over earlier, and a shard's first micro-step has to be added
        # before its second.
        while buffer in self._running:
            oldest = next(iter(self._running))
            work, reduction = self._running.pop(oldest)
            if work is not None:
                work.wait()
            reduction.accumulate()

    def launch(self, buffer: Buffer, reduction: Reduction) -> None:
        self._running[buffer] = reduction.reduce_scatter(async_op=True), reduction

    def finish(self) -> None:
        for buffer in list(self._running):
            self.arriving(buffer)


class StreamReducer(Reducer):
    """For CUDA tensors: everything on one communication stream, ordered by events alone. The host
    waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._zeroed: dict[Buffer, torch.cuda.Event] = {}
        self._writers: dict[Buffer, set[torch.cuda.Stream]] = {}

    def arriving(self, buffer: Buffer) -> None:
        current = torch.cuda.current_stream(self._device)
        writers = self._writers.setdefault(buffer, set())
        if current not in writers:
            writers.add(current)
            if buffer in self._zeroed:
                current.wait_event(self._zeroed[buffer])

    def launch(self, buffer: Buffer, reduction: Reduction) -> None:
        for stream in self._writers.pop(buffer):
            self._stream.wait_stream(stream)
        with torch.cuda.stream(self._stream):
            reduction.reduce_scatter(async_op=False)
            reduction.accumulate()
        self._zeroed.setdefault(buffer, torch.cuda.Event()).record(self._stream)

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def reducer_for(device: torch.device) -> Reducer:
    return StreamReducer(device) if device.type == "cuda" else HostReducer()
