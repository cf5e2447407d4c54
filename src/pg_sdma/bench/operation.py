"""What distinguishes one measured collective from another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pg_sdma.bench.buffers import Buffers, Case, differing


@dataclass(frozen=True)
class Operation:
    """A collective that has a tensor of all ranks' shards, and one of a shard."""

    name: str
    whole: str  # which of the two is the larger: "output" or "input"
    shard: str
    redop: str  # as nccl-tests names it
    call: Callable[[Buffers, dist.ProcessGroup], None]
    # Of a checked call and its tensor of this number: the known bytes that this rank gives, and
    # those that it then has to get, of any dtype.
    given: Callable[[Case, int, torch.device], Tensor]
    expected: Callable[[Case, int, torch.device], Tensor]
    # Variables without which the measured backend would leave it to the inner.
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def noun(self) -> str:
        """As people write it: "all-gather"."""
        return self.name.replace("_", "-")

    def go_direct(self) -> None:
        """Has groups that are made from here on carry it themselves, as far as they can.

        Of every size, unless the user has set a bound.
        """
        os.environ.setdefault("PG_SDMA_MIN_BYTES", "0")
        os.environ.update(self.environment)

    def inputs(self, buffers: Buffers) -> list[Tensor]:
        return buffers.whole if self.whole == "input" else buffers.shards

    def outputs(self, buffers: Buffers) -> list[Tensor]:
        return buffers.shards if self.whole == "input" else buffers.whole

    def apart(self, buffers: Buffers, group: dist.ProcessGroup) -> None:
        """What `call` does in one call, in one for each tensor."""
        for whole, shard in zip(buffers.whole, buffers.shards, strict=True):
            self.call(Buffers([whole], [shard]), group)

    def make_known(self, case: Case, tensor: int, given: Tensor, output: Tensor) -> Tensor:
        """Fills in what is given, and an output that is wrong everywhere; returns the right one.

        In place the own part of the output is what is given.
        """
        right = self.expected(case, tensor, output.device).view(torch.uint8)
        output.view(torch.uint8).copy_(~right)
        given.view(torch.uint8).copy_(self.given(case, tensor, given.device).view(torch.uint8))
        return right.view(case.dtype)

    def count_wrong(self, case: Case, buffers: Buffers, group: dist.ProcessGroup) -> int:
        """Makes a call of known inputs; counts the elements of its outputs that are wrong then."""
        inputs, outputs = self.inputs(buffers), self.outputs(buffers)
        expected = [
            self.make_known(case, t, given, output)
            for t, (given, output) in enumerate(zip(inputs, outputs, strict=True))
        ]
        self.call(buffers, group)
        return sum(differing(*pair) for pair in zip(outputs, expected, strict=True))
