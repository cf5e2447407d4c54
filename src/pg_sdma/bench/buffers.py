"""The tensors of measured collectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
# What torch's allocators align to, so that a slot looks like a tensor of its own.
ALIGNMENT = 512


@dataclass(frozen=True)
class Case:
    """Collectives on `tensors` tensors at once, each of `count` elements a shard."""

    dtype: torch.dtype
    count: int
    tensors: int
    in_place: bool
    ranks: tuple[int, ...]  # of the group, as the world numbers them
    rank: int  # this one's place among them

    @property
    def shard_bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Bytes of all shards of all tensors: a gather's outputs, a reduce-scatter's inputs."""
        return self.shard_bytes * len(self.ranks) * self.tensors


class Arena:
    """Memory that calls take their tensors from in turn, so that caches are not measured."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)

    @classmethod
    def over(cls, memory: Tensor) -> Arena:
        """An arena in memory that is there already, a 1-D tensor of uint8."""
        arena = cls.__new__(cls)
        arena._memory = memory
        return arena

    def slots(self, size: int, wanted: int) -> list[Tensor]:
        """As many 1-D uint8 tensors of `size` bytes as fit, `wanted` at most."""
        stride = -(-size // ALIGNMENT) * ALIGNMENT
        fit = max(1, min(wanted, len(self._memory) // stride))
        return [self._memory[i * stride : i * stride + size] for i in range(fit)]


@dataclass(frozen=True)
class Buffers:
    """The tensors of one call: whole ones of (ranks * count,), shards of (count,).

    A gather's outputs are whole, a reduce-scatter's inputs are. In place a shard is this rank's
    part of the whole.
    """

    whole: list[Tensor]
    shards: list[Tensor]


def make_buffers(case: Case, whole: Arena, shards: Arena, wanted: int) -> list[Buffers]:
    """Buffers for up to `wanted` calls in turn; fewer where the arenas hold no more."""
    width = case.shard_bytes * len(case.ranks)
    groups = whole.slots(width * case.tensors, wanted)
    own = shards.slots(case.shard_bytes * case.tensors, wanted)
    made = []
    for i, group in enumerate(groups):
        parts = list(group.view(case.dtype).chunk(case.tensors))
        if case.in_place:
            mine = [p.narrow(0, case.rank * case.count, case.count) for p in parts]
        else:
            mine = list(own[i % len(own)].view(case.dtype).chunk(case.tensors))
        made.append(Buffers(parts, mine))
    return made


def differing(found: Tensor, expected: Tensor) -> int:
    """Elements of two tensors of one dtype that differ in a bit. A NaN is no reason to differ."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    return int((found.view(width) != expected.view(width)).sum())
