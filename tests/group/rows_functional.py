"""Rows of the table: functional collectives, their autograd forms, DTensor redistribution."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from rows import DEVICE, here, random, row
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor


def world():
    return dist.group.WORLD


@row
def functional_all_reduce():
    return functional.wait_tensor(functional.all_reduce(random(4), "sum", world()))


@row
def functional_all_reduce_coalesced():
    sums = functional.all_reduce_coalesced([random(4), random(2, 2)], "max", world())
    return [functional.wait_tensor(x) for x in sums]


@row
def functional_broadcast():
    return functional.wait_tensor(functional.broadcast(random(4), 0, world()))


@row(dim=[0, 1])
def functional_all_gather_tensor(dim):
    return functional.wait_tensor(functional.all_gather_tensor(random(2, 3), dim, world()))


@row
def functional_all_gather_into_tensor_coalesced():
    inputs = [random(4), random(2, 3)]
    outputs = functional.all_gather_into_tensor_coalesced(inputs, world())
    return [functional.wait_tensor(x) for x in outputs]


@row(dim=[0, 1])
def functional_reduce_scatter_tensor(dim):
    n = 2 * here()[1]
    return functional.wait_tensor(
        functional.reduce_scatter_tensor(random(n, n), "sum", dim, world())
    )


@row
def functional_reduce_scatter_tensor_coalesced():
    n = here()[1]
    inputs = [random(n), random(2 * n, 3)]
    outputs = functional.reduce_scatter_tensor_coalesced(inputs, "sum", [0, 0], world())
    return [functional.wait_tensor(x) for x in outputs]


@row
def functional_all_to_all_single():
    n = here()[1]
    return functional.wait_tensor(functional.all_to_all_single(random(n), None, None, world()))


@row
def functional_permute_tensor():
    n = here()[1]
    ring = [(rank + 1) % n for rank in range(n)]
    return functional.wait_tensor(functional.permute_tensor(random(3), ring, world()))


@row(call=["all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single"])
def functional_autograd(call):
    n = here()[1]
    x = random(n, 2).requires_grad_()
    if call == "all_gather_tensor":
        y = functional.all_gather_tensor_autograd(x, 0, world())
    elif call == "reduce_scatter_tensor":
        y = functional.reduce_scatter_tensor_autograd(x, "sum", 0, world())
    else:
        y = functional.all_to_all_single_autograd(x, [1] * n, [1] * n, world())
    (y * random(*y.shape)).sum().backward()
    return y, x.grad


@row(call=["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def differentiable_call(call):
    n = here()[1]
    xs = [random(3).requires_grad_() for _ in range(n)]
    if call == "all_reduce":
        y = differentiable.all_reduce(xs[0])
    elif call == "all_gather":
        y = torch.stack(differentiable.all_gather(xs[0]))
    elif call == "reduce_scatter":
        y = differentiable.reduce_scatter(torch.zeros(3, device=DEVICE), xs)
    else:
        y = torch.stack(differentiable.all_to_all([torch.zeros(3, device=DEVICE) for _ in xs], xs))
    (y * random(*y.shape)).sum().backward()
    return y, [x.grad for x in xs]


PLACEMENTS = {
    "replicate": Replicate(),
    "shard0": Shard(0),
    "shard1": Shard(1),
    "partial": Partial(),
}


@row(source=list(PLACEMENTS), target=["replicate", "shard0", "shard1"])
def dtensor_redistribute(source, target):
    mesh = init_device_mesh(DEVICE, (here()[1],))
    x = torch.arange(35.0, device=DEVICE).reshape(7, 5)
    if source == "partial":
        local = random(7, 5)
        x = torch.distributed.tensor.DTensor.from_local(local, mesh, [Partial()])
    else:
        x = distribute_tensor(x, mesh, [PLACEMENTS[source]])
    x = x.redistribute(mesh, [PLACEMENTS[target]])
    return x.to_local(), x.full_tensor()
