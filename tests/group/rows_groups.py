"""Rows of the table: groups made from the default group, device meshes, the group's own state."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from rows import DEVICE, done, empty, here, random, row
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.device_mesh import init_device_mesh

NOT_A_MEMBER = "not a member"


def gather_and_sum(group):
    """An all-gather and a sum on `group`, by the calls that a group object offers."""
    x, n = random(3), group.size()
    output = empty(3 * n)
    dist.all_gather_into_tensor(output, x, group=group)
    dist.all_reduce(x, group=group)
    return group.rank(), n, output, x


@row
def new_group_of_some():
    group = dist.new_group([0, 1])
    if here()[0] > 1:
        return NOT_A_MEMBER, group is dist.GroupMember.NON_GROUP_MEMBER
    results = gather_and_sum(group)
    dist.destroy_process_group(group)
    return results


@row
def new_group_without_rank_0():
    group = dist.new_group(list(range(1, here()[1])))
    return gather_and_sum(group) if here()[0] else NOT_A_MEMBER


@row
def new_groups_of_one():
    groups = [dist.new_group([rank]) for rank in range(here()[1])]
    return gather_and_sum(groups[here()[0]])


@row
def new_subgroups():
    group, groups = dist.new_subgroups(group_size=here()[1])
    return len(groups), gather_and_sum(group)


@row
def split_group():
    return gather_and_sum(dist.split_group(split_ranks=[[0, 1]]))


def gather_and_sum_by_methods(group):
    """gather_and_sum for a group that torch.distributed's functions do not know."""
    x, output = random(3), empty(3 * group.size())
    done(group._allgather_base(output, x, AllgatherOptions()))
    done(group.allreduce([x]))
    return group.rank(), group.size(), output, x


@row
def split_by_the_group_object():
    group = dist.group.WORLD.split_group([0, 1], timeout=timedelta(seconds=60), group_name="half")
    return NOT_A_MEMBER if group is None else gather_and_sum_by_methods(group)


@row
def merge_remote_group():
    mine = dist.new_group([here()[0]], use_local_synchronization=True)
    store = dist.PrefixStore("merge", dist.distributed_c10d._get_default_store())
    merged = mine.merge_remote_group(store, here()[1], group_name="merged")
    # Its ranks are numbered as they come, so what depends on the order is left out.
    _, size, output, total = gather_and_sum_by_methods(merged)
    return size, output.sort().values, total


@row
def shrink_group():
    return gather_and_sum(dist.shrink_group([here()[1] - 1]))


@row
def device_mesh_1d():
    return gather_and_sum(init_device_mesh(DEVICE, (here()[1],)).get_group())


@row(shape=["rows", "columns"])
def device_mesh_2d(shape):
    n = here()[1]
    mesh = init_device_mesh(
        DEVICE, (n, 1) if shape == "rows" else (1, n), mesh_dim_names=("a", "b")
    )
    return [gather_and_sum(mesh.get_group(name)) for name in ("a", "b")]


@row
def device_mesh_flattened():
    mesh = init_device_mesh(DEVICE, (1, here()[1]), mesh_dim_names=("a", "b"))
    return gather_and_sum(mesh[("a", "b")]._flatten().get_group())


@row
def sequence_number():
    backend = dist.new_group()._get_backend(torch.device(DEVICE))
    before = backend._get_sequence_number_for_group()
    done(backend.allreduce([random(3)]))
    return backend._get_sequence_number_for_group() - before


@row
def timeouts():
    backend = dist.new_group()._get_backend(torch.device(DEVICE))
    backend.set_timeout(timedelta(seconds=50))
    return backend.options._timeout


@row(
    name=[
        "supports_splitting",
        "supports_coalescing",
        "supports_shrinking",
        "supports_time_estimate",
        "mem_allocator",
        "bound_device_id",
    ]
)
def backend_property(name):
    return getattr(dist.group.WORLD._get_backend(torch.device(DEVICE)), name)


@row(name=["get_error", "suspend", "resume", "memory_stats", "abort", "shutdown"])
def backend_call(name):
    backend = dist.new_group()._get_backend(torch.device(DEVICE))
    result = getattr(backend, name)
    return str(result() if callable(result) else result)
