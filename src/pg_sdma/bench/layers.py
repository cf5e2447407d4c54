"""`pg-sdma bench overlap`, second half: the forward of a model sharded as ZeRO-3 shards it.

Matrix products alone, no attention: the weights of layer l + 1 are gathered in place while layer l
computes, into one of two buffers in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pg_sdma.bench.all_gather import all_gather
from pg_sdma.bench.launch import World

DISTINCT_SHARDS = 3  # no multiple of the two buffers, so that a gather left out shows


@dataclass(frozen=True)
class Model:
    """The weight matrices of one layer, each (in, out)."""

    hidden: int
    matrices: tuple[tuple[int, int], ...]

    @property
    def layer_numel(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices)


MODELS = {
    # qkv, out, up, down
    "gpt-7b": Model(4096, ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))),
    # qkv with 8 key-value heads of 128, out, gate and up, down
    "llama-70b": Model(8192, ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192))),
}


class Forward:
    """The layers' products on the current stream, their gathers on a stream of high priority."""

    def __init__(self, world: World, model: Model, layers: int, seq: int) -> None:
        self._world = world
        self._layers = layers
        device, dtype = world.device, torch.bfloat16
        self._count = -(-model.layer_numel // world.size)
        self._shards = [self._shard(world.rank, i) for i in range(min(layers, DISTINCT_SHARDS))]
        self._weights = torch.zeros(2, self._count * world.size, device=device, dtype=dtype)
        self._matrices = [_views(weights, model.matrices) for weights in self._weights]
        self._inputs = {
            rows: torch.randn(seq, rows, device=device, dtype=dtype)
            for rows in {rows for rows, _ in model.matrices}
        }
        self._outputs = {
            columns: torch.empty(seq, columns, device=device, dtype=dtype)
            for columns in {columns for _, columns in model.matrices}
        }
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._gathered = [torch.cuda.Event() for _ in self._weights]
        self._free = [torch.cuda.Event() for _ in self._weights]

    @property
    def layer_bytes(self) -> int:
        """Bytes of the weights of a layer, over all ranks."""
        return self._weights[0].nbytes

    def step(self, group: dist.ProcessGroup | None, compute: bool) -> None:
        """Enqueues one forward; without a `group` nothing is gathered."""
        current = torch.cuda.current_stream()
        if group is not None:
            self._gather(0, group)
        for layer in range(self._layers):
            if group is not None:
                if layer + 1 < self._layers:
                    self._gather(layer + 1, group)
                current.wait_event(self._gathered[layer % 2])
            if compute:
                for matrix in self._matrices[layer % 2]:
                    rows, columns = matrix.shape
                    torch.mm(self._inputs[rows], matrix, out=self._outputs[columns])
            self._free[layer % 2].record()

    def _gather(self, layer: int, group: dist.ProcessGroup) -> None:
        weights = self._weights[layer % 2]
        own = weights.narrow(0, self._world.rank * self._count, self._count)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[layer % 2])
            own.copy_(self._shards[layer % len(self._shards)])  # FSDP's copy-in
            all_gather(weights, own, group=group)
            self._gathered[layer % 2].record()

    def count_wrong(self, group: dist.ProcessGroup) -> int:
        """Elements of this rank's last two layers that are not their owners', after one step."""
        self._weights.fill_(float("nan"))
        torch.cuda.synchronize()
        self._world.barrier()
        self.step(group, compute=True)
        torch.cuda.synchronize()
        wrong = 0
        for layer in range(max(0, self._layers - 2), self._layers):
            gathered = self._weights[layer % 2].view(self._world.size, self._count)
            for rank, found in enumerate(gathered):
                expected = self._shard(rank, layer % len(self._shards))
                wrong += int((found.view(torch.int16) != expected.view(torch.int16)).sum())
        return wrong

    def _shard(self, rank: int, index: int) -> Tensor:
        device = self._world.device
        generator = torch.Generator(device).manual_seed(1000 * index + rank)
        return torch.randn(self._count, generator=generator, device=device, dtype=torch.bfloat16)


def _views(weights: Tensor, matrices: Sequence[tuple[int, int]]) -> list[Tensor]:
    views, start = [], 0
    for rows, columns in matrices:
        views.append(weights.narrow(0, start, rows * columns).view(rows, columns))
        start += rows * columns
    return views


@dataclass(frozen=True)
class Step:
    """One backend on one model. Seconds a step, free running, as the host sees them."""

    model: str
    seq: int
    layers: int
    layer_bytes: int
    backend: str
    gemms_alone: float
    gathers_alone: float
    both: float
    wrong: int

    @property
    def hidden(self) -> float:
        """The part of the gathers' time alone that vanishes beside the products."""
        return (self.gemms_alone + self.gathers_alone - self.both) / self.gathers_alone

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"hidden": self.hidden}


HEADING = (
    "#     model   seq  layers   layer (B)  backend  GEMMs alone  gathers alone  step (ms)"
    "  exposed  hidden  #wrong"
)
MEANING = """\
# layer: bytes of one layer's weights over all ranks, bf16, gathered in place under the layer before
# times: ms a step of steps enqueued back to back, mean over the ranks, median over the rounds
# exposed: step - GEMMs alone, in ms, FSDP's copy of the own shard included
# hidden: (GEMMs alone + gathers alone - step) / gathers alone"""


def line(row: Step) -> str:
    return (
        f"{row.model:>11}{row.seq:>6}{row.layers:>8}{row.layer_bytes:>12}{row.backend:>9}"
        f"{row.gemms_alone * 1e3:>13.2f}{row.gathers_alone * 1e3:>15.2f}{row.both * 1e3:>11.2f}"
        f"{(row.both - row.gemms_alone) * 1e3:>9.2f}{row.hidden:>8.1%}{row.wrong:>8}"
    )


def measure(
    world: World,
    groups: Sequence[dist.ProcessGroup],
    names: Sequence[str],
    model: str,
    layers: int,
    seq: int,
    steps: int,
    rounds: int,
) -> list[Step]:
    """One row a backend: products alone, gathers alone and both, in turn for `rounds` rounds."""
    forward = Forward(world, MODELS[model], layers, seq)
    cases: list[Callable[[], None]] = [lambda: forward.step(None, True)]
    for group in groups:
        cases += [_step(forward, group, False), _step(forward, group, True)]
    samples: list[list[float]] = [[] for _ in cases]
    for turn in range(-1, rounds):  # the first round warms up
        for case, seconds in zip(cases, samples, strict=True):
            torch.cuda.synchronize()
            world.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                case()
            torch.cuda.synchronize()
            if turn >= 0:
                seconds.append((time.perf_counter() - began) / steps)
    gemms, *others = (world.median_of_means(seconds) for seconds in samples)
    return [
        Step(
            model=model,
            seq=seq,
            layers=layers,
            layer_bytes=forward.layer_bytes,
            backend=name,
            gemms_alone=gemms,
            gathers_alone=others[2 * i],
            both=others[2 * i + 1],
            wrong=world.total(forward.count_wrong(groups[i])),
        )
        for i, name in enumerate(names)
    ]


def _step(forward: Forward, group: dist.ProcessGroup, compute: bool) -> Callable[[], None]:
    return lambda: forward.step(group, compute)
