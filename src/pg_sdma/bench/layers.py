"""`pg-sdma bench overlap`, second half: the forward of a model sharded as ZeRO-3 shards it.

Matrix products only, no attention. The weights of layer l + 1 are gathered in place while layer l
computes, into one of two buffers in turn. A contender without an in-place form gathers into memory
that it allocates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pg_sdma.bench.buffers import differing
from pg_sdma.bench.contenders import Calls
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
    "gpt-70b": Model(8192, ((8192, 24576), (8192, 8192), (8192, 32768), (32768, 8192))),
    # qkv with 8 key-value heads of 128, out, gate and up, down
    "llama-70b": Model(8192, ((8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192))),
}


class Forward:
    """The layers' products on the current stream, their gathers on a stream of high priority."""

    def __init__(self, world: World, model: Model, layers: int, seq: int) -> None:
        self._world = world
        self._model = model
        self._layers = layers
        device, dtype = world.device, torch.bfloat16
        self._count = -(-model.layer_numel // world.size)
        self._shards = [self._shard(world.rank, i) for i in range(min(layers, DISTINCT_SHARDS))]
        # What is multiplied by: without gathers these, and then what was gathered last.
        self._ungathered = [
            torch.zeros(self._count * world.size, device=device, dtype=dtype) for _ in range(2)
        ]
        self._weights = list(self._ungathered)
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
        return self._ungathered[0].nbytes

    def step(self, gathers: Calls | None, compute: bool) -> None:
        """Enqueues one forward; without `gathers`, of two buffers in turn, nothing is gathered."""
        current = torch.cuda.current_stream()
        if gathers is None:
            self._weights = list(self._ungathered)
        else:
            self._gather(0, gathers)
        for layer in range(self._layers):
            if gathers is not None:
                if layer + 1 < self._layers:
                    self._gather(layer + 1, gathers)
                current.wait_event(self._gathered[layer % 2])
            if compute:
                for matrix in _views(self._weights[layer % 2], self._model.matrices):
                    rows, columns = matrix.shape
                    torch.mm(self._inputs[rows], matrix, out=self._outputs[columns])
            self._free[layer % 2].record()

    def _gather(self, layer: int, gathers: Calls) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[layer % 2])
            own = gathers.own[layer % 2]
            own.copy_(self._shards[layer % len(self._shards)])  # FSDP's copy-in
            self._weights[layer % 2] = gathers.call(layer % 2)
            self._gathered[layer % 2].record()

    def count_wrong(self, gathers: Calls) -> int | None:
        """Elements of this rank's last two layers that are not their owners', after one step.

        None where the contender moves other bytes.
        """
        if gathers.operation is None:
            return None
        for i in range(2):
            gathers.call(i).fill_(float("nan"))
        torch.cuda.synchronize()
        self._world.barrier()
        self.step(gathers, compute=True)
        torch.cuda.synchronize()
        wrong = 0
        for layer in range(max(0, self._layers - 2), self._layers):
            gathered = self._weights[layer % 2].view(self._world.size, self._count)
            for rank, found in enumerate(gathered):
                wrong += differing(found, self._shard(rank, layer % len(self._shards)))
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
    """One contender on one model. Seconds a step, free running, as the host sees them."""

    model: str
    seq: int
    layers: int
    layer_bytes: int
    contender: str
    gemms_alone: float
    gathers_alone: float
    both: float
    wrong: int | None  # elements over all ranks; None: it moves other bytes

    @property
    def hidden(self) -> float:
        """The part of the gathers' time alone that vanishes beside the products."""
        return (self.gemms_alone + self.gathers_alone - self.both) / self.gathers_alone

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"hidden": self.hidden}


HEADING = (
    "#     model   seq  layers   layer (B)       contender  GEMMs alone  gathers alone  step (ms)"
    "  exposed  hidden  #wrong"
)
MEANING = """\
# layer: bytes of one layer's weights over all ranks, bf16, gathered under the layer before
# times: ms a step of steps enqueued back to back, mean over the ranks, median over the rounds
# exposed: step - GEMMs alone, in ms, FSDP's copy of the own shard included
# hidden: (GEMMs alone + gathers alone - step) / gathers alone"""


def line(row: Step) -> str:
    return (
        f"{row.model:>11}{row.seq:>6}{row.layers:>8}{row.layer_bytes:>12}{row.contender:>16}"
        f"{row.gemms_alone * 1e3:>13.2f}{row.gathers_alone * 1e3:>15.2f}{row.both * 1e3:>11.2f}"
        f"{(row.both - row.gemms_alone) * 1e3:>9.2f}{row.hidden:>8.1%}"
        f"{'-' if row.wrong is None else row.wrong:>8}"
    )


def measure(
    world: World,
    gathers: Mapping[str, Calls],
    model: str,
    layers: int,
    seq: int,
    steps: int,
    rounds: int,
) -> list[Step]:
    """One row a contender: products alone, gathers alone and both, in turn for `rounds` rounds."""
    forward = Forward(world, MODELS[model], layers, seq)
    cases: list[Callable[[], None]] = [lambda: forward.step(None, True)]
    for made in gathers.values():
        cases += [partial(forward.step, made, False), partial(forward.step, made, True)]
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
    rows = []
    for i, (name, made) in enumerate(gathers.items()):
        wrong = forward.count_wrong(made)
        rows.append(
            Step(
                model=model,
                seq=seq,
                layers=layers,
                layer_bytes=forward.layer_bytes,
                contender=name,
                gemms_alone=gemms,
                gathers_alone=others[2 * i],
                both=others[2 * i + 1],
                wrong=None if wrong is None else world.total(wrong),
            )
        )
    return rows
