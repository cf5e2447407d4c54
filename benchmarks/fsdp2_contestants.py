"""The process groups over which one FSDP2 model trains in turn, or none at all.

FSDP2 takes its collectives from objects that can be replaced between steps
(FSDPModule.set_custom_all_gather and set_custom_reduce_scatter). So one model serves all
contestants: only the group that carries the call changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fsdp2_host import name_of
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from common.options import backend_string

FLOOR = "none"


@dataclass(frozen=True)
class Contestant:
    """What a run trains over: `transport` as examples/common/options.py has it, and settings."""

    transport: str
    environment: Mapping[str, str]


CONTESTANTS = {
    "inner": Contestant("inner", {}),
    "sdma": Contestant("sdma", {"PG_SDMA_OPS": "all_gather"}),
    "sdma-late": Contestant("sdma", {"PG_SDMA_OPS": "all_gather", "PG_SDMA_LATE": "inner"}),
    "sdma+rs": Contestant(
        "sdma",
        {
            "PG_SDMA_OPS": "all_gather,reduce_scatter",
            "PG_SDMA_LANDING_BYTES": os.environ.get("PG_SDMA_LANDING_BYTES", str(512 << 20)),
        },
    ),
    FLOOR: Contestant("inner", {}),  # for its warm-up
}


def baseline(names: Sequence[str]) -> str:
    """The contestant that the others are compared with: the first that communicates."""
    return next(name for name in names if name != FLOOR)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Has `values` in os.environ for the length of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def process_groups(names: Sequence[str], device: torch.device) -> dict[str, dist.ProcessGroup]:
    """A group of all ranks for each contestant, connected. Contestants that differ in nothing
    share one."""
    made: dict[tuple[object, ...], dist.ProcessGroup] = {}
    groups = {}
    for name in names:
        contestant = CONTESTANTS[name]
        key = (contestant.transport, *sorted(contestant.environment.items()))
        if key not in made:
            with environment(contestant.environment):
                made[key] = dist.new_group(
                    backend=backend_string(contestant.transport, device.type)
                )
            dist.all_reduce(torch.zeros(1, device=device), group=made[key])
        groups[name] = made[key]
    return groups


class _Allocated:
    """Buffers as FSDP2 takes them by default."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gathers(_Allocated):
    """FSDP2's all-gathers, over `group` in place of the mesh's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        # By its name at each call: observed() replaces the function for a while.
        gather = getattr(dist, name_of("all-gather"))
        return gather(output_tensor, input_tensor, group=self._group, async_op=async_op)


class Scatters(_Allocated):
    """FSDP2's reduce-scatters, over `group` in place of the mesh's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        scatter = getattr(dist, name_of("reduce-scatter"))
        return scatter(output_tensor, input_tensor, op=op, group=self._group, async_op=async_op)


class NoGathers(_Allocated):
    """All-gathers that do nothing: what the output held before stands where peers' shards would.

    FSDP2 has put the own shard into the output, and a buffer of torch's allocator that held
    parameters before holds parameters still. The ordering by streams and events is FSDP2's own.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        return None


class OwnSlices(_Allocated):
    """Reduce-scatters that copy the own slice: the average, if all ranks had the same gradients.

    The copy stays, because a later step reads the output: without it gradients would be whatever
    the memory held.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        own = input_tensor.view(group.size(), -1)[group.rank()]
        output_tensor.copy_(own.view_as(output_tensor))


def communicate(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """From the next step on the model's collectives go over `group`; over None, nowhere."""
    gathers = Gathers(group) if group else NoGathers()
    scatters = Scatters(group) if group else OwnSlices()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gathers)
            module.set_custom_reduce_scatter(scatters)
