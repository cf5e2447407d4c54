"""What tells one measured collective from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from pg_sdma.bench.buffers import Buffers, Case


@dataclass(frozen=True)
class Operation:
    """A collective that has a tensor of all ranks' shards, and one of a shard."""

    name: str
    whole: str  # which of the two is the larger: "output" or "input"
    shard: str
    redop: str  # as nccl-tests names it
    call: Callable[[Buffers, dist.ProcessGroup], None]
    # Makes a call with known inputs, its outputs wrong before; returns the elements wrong after it.
    count_wrong: Callable[[Case, Buffers, dist.ProcessGroup], int]
    # Variables without which the measured backend would leave it to the inner.
    environment: Mapping[str, str] = field(default_factory=dict)

    def apart(self, buffers: Buffers, group: dist.ProcessGroup) -> None:
        """What `call` does in one call, in one for each tensor."""
        for whole, shard in zip(buffers.whole, buffers.shards, strict=True):
            self.call(Buffers([whole], [shard]), group)
