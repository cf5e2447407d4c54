"""The tensors of measured all-gathers, and whether what arrives in them is right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
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

# Since torch 2.13 `all_gather_into_tensor` warns that it is deprecated.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class Case:
    """All-gathers of `tensors` tensors at once, each of `count` elements a rank."""

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
        """Bytes of all outputs of one rank."""
        return self.shard_bytes * len(self.ranks) * self.tensors


class Arena:
    """Memory that calls take their tensors from in turn, so that caches are not measured."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)

    def slots(self, size: int, wanted: int) -> list[Tensor]:
        """As many 1-D uint8 tensors of `size` bytes as fit, `wanted` at most."""
        stride = -(-size // ALIGNMENT) * ALIGNMENT
        fit = max(1, min(wanted, len(self._memory) // stride))
        return [self._memory[i * stride : i * stride + size] for i in range(fit)]


@dataclass(frozen=True)
class Buffers:
    """The tensors of one call: outputs of (ranks * count,), inputs of (count,)."""

    outputs: list[Tensor]
    inputs: list[Tensor]


def make_buffers(case: Case, outputs: Arena, inputs: Arena, wanted: int) -> list[Buffers]:
    """Buffers for up to `wanted` calls in turn; fewer where the arenas hold no more."""
    width = case.shard_bytes * len(case.ranks)
    groups = outputs.slots(width * case.tensors, wanted)
    own = inputs.slots(case.shard_bytes * case.tensors, wanted)
    made = []
    for i, group in enumerate(groups):
        out = list(group.view(case.dtype).chunk(case.tensors))
        if case.in_place:
            mine = [o.narrow(0, case.rank * case.count, case.count) for o in out]
        else:
            mine = list(own[i % len(own)].view(case.dtype).chunk(case.tensors))
        made.append(Buffers(out, mine))
    return made


def gather(buffers: Buffers, group: dist.ProcessGroup) -> None:
    if len(buffers.outputs) == 1:
        all_gather(buffers.outputs[0], buffers.inputs[0], group=group)
        return
    with dist._coalescing_manager(group=group):
        for output, own in zip(buffers.outputs, buffers.inputs, strict=True):
            all_gather(output, own, group=group)


def count_wrong(case: Case, buffers: Buffers, group: dist.ProcessGroup) -> int:
    """Gathers known bytes into outputs that are wrong everywhere; counts elements still wrong."""
    expected = [
        torch.cat([_shard(case, t, rank, output.device) for rank in case.ranks])
        for t, output in enumerate(buffers.outputs)
    ]
    start = case.rank * case.shard_bytes
    for output, own, bits in zip(buffers.outputs, buffers.inputs, expected, strict=True):
        output.view(torch.uint8).copy_(~bits)
        own.view(torch.uint8).copy_(bits[start : start + case.shard_bytes])
    gather(buffers, group)
    # Integers of the same width: a NaN is no reason to differ.
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[case.dtype.itemsize]
    return sum(
        int((output.view(width) != bits.view(width)).sum())
        for output, bits in zip(buffers.outputs, expected, strict=True)
    )


def _shard(case: Case, tensor: int, rank: int, device: torch.device) -> Tensor:
    """The bytes that `rank` gives, the same on whichever rank they are made."""
    generator = torch.Generator(device).manual_seed(tensor * 65536 + rank)
    words = -(-case.shard_bytes // 8)
    bits = torch.randint(
        -(2**63), 2**63 - 1, (words,), dtype=torch.int64, device=device, generator=generator
    )
    return bits.view(torch.uint8)[: case.shard_bytes]
