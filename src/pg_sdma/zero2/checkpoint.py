"""Shards as DTensors of the model's shapes, and back, so that no number of ranks is in a state.

Each DTensor is sharded in its first dimension. torch.distributed.checkpoint saves and loads it,
also in a group of another size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pg_sdma.zero2.unit import ShardedUnit

# Since torch 2.13 `all_gather_into_tensor` warns that it is deprecated.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

Values = Callable[[nn.Parameter], Tensor]


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group, device.type, c10d.get_process_group_ranks(group))


@torch.no_grad()
def as_dtensors(
    unit: ShardedUnit, mesh: DeviceMesh, names: Collection[str], values: Values
) -> dict[str, DTensor]:
    """What `values` gives for this rank's part of each parameter of the unit that is in `names`;
    collective. For a while one unit's values are whole."""
    own = torch.zeros(unit.layout.shard_numel, dtype=unit.master_dtype, device=unit.own.device)
    for name, parameter in unit.parameters.items():
        if name in names:
            own[unit.places[name]] = values(parameter)
    flat = own.new_empty(unit.layout.numel)
    all_gather(flat, own, group=mesh.get_group())
    made = {}
    for piece in unit.layout.pieces:
        if piece.name not in names:
            continue
        whole = piece.view(flat)
        placement = Shard(0) if whole.dim() else Replicate()
        if whole.dim():
            rows = -(-whole.shape[0] // mesh.size())
            first = min(mesh.get_local_rank() * rows, whole.shape[0])
            local = whole[first : first + rows]
        else:
            local = whole
        made[piece.name] = DTensor.from_local(
            local.clone(memory_format=torch.contiguous_format),
            mesh,
            [placement],
            run_check=False,
            shape=whole.shape,
            stride=torch.empty(whole.shape, device="meta").stride(),
        )
    return made


@torch.no_grad()
def take_values(unit: ShardedUnit, saved: Mapping[str, Tensor], values: Values) -> None:
    """The other way round: `saved` are DTensors or whole tensors, of the parameters' shapes;
    collective where they are DTensors."""
    for piece in unit.layout.pieces:
        if piece.name not in saved:
            continue
        tensor = saved[piece.name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        parameter = unit.parameters.get(piece.name)
        if parameter is None:
            continue
        target = values(parameter)
        flat = torch.empty(piece.shape.numel(), dtype=whole.dtype, device=target.device)
        flat.as_strided(piece.shape, piece.stride).copy_(whole)
        place = unit.places[piece.name]
        first = unit.layout.shard_numel * unit.rank + place.start - piece.start
        target.copy_(flat[first : first + target.numel()])


def mismatch(
    shapes: Mapping[str, Any], saved: Mapping[str, Tensor], what: str
) -> ValueError | None:
    """What differs between the parameters' shapes and those of a state."""
    found = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in {**shapes, **found}:
        here, there = (
            f"of shape {of[name]}" if name in of else "missing" for of in (shapes, found)
        )
        if here != there:
            return ValueError(
                f"{what}: {name} is {here} here and {there} in the state; load the state of the "
                "same model"
            )
    return None
