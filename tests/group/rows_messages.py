"""Rows of the table: point-to-point calls, coalescing forms, objects, what waits its turn."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from rows import DEVICE, done, empty, here, random, row
from torch.distributed.distributed_c10d import _coalescing_manager


@row
def send_and_recv():
    rank, size = here()
    x, received = random(5), empty(5)
    if rank % 2 == 0:
        dist.send(x, (rank + 1) % size, tag=3)
        source = dist.recv(received, (rank - 1) % size, tag=3)
    else:
        source = dist.recv(received, (rank - 1) % size, tag=3)
        dist.send(x, (rank + 1) % size, tag=3)
    return received, source


@row
def recv_from_anyone():
    rank, size = here()
    if rank > 0:
        dist.send(random(4) + 10 * rank, 0)
        return None
    received = [(dist.recv(x), x) for x in [empty(4) for _ in range(size - 1)]]
    return sorted(received, key=lambda pair: pair[0])


@row
def isend_and_irecv():
    rank, size = here()
    received = empty(5)
    sent = dist.isend(random(5), (rank + 1) % size)
    done(dist.irecv(received, (rank - 1) % size))
    done(sent)
    return received


@row
def batch_isend_irecv():
    rank, size = here()
    received = [empty(5), empty(2)]
    batch = [dist.P2POp(dist.isend, random(n), (rank + 1) % size, tag=n) for n in (5, 2)]
    batch += [dist.P2POp(dist.irecv, x, (rank - 1) % size, tag=len(x)) for x in received]
    for work in dist.batch_isend_irecv(batch):
        done(work)
    return received


@row(call=["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"])
def coalescing_manager(async_op, call):
    size = here()[1]
    tensors, outputs = [random(size), random(size * 2)], []
    with _coalescing_manager(async_ops=async_op) as manager:
        for x in tensors:
            if call == "all_reduce":
                dist.all_reduce(x)
                continue
            length = len(x) * size if call == "all_gather_into_tensor" else len(x) // size
            outputs.append(empty(length))
            getattr(dist, call)(outputs[-1], x)
    if async_op:
        manager.wait()
    return tensors, outputs


@row
def coalescing_manager_of_a_device():
    x = random(3)
    with _coalescing_manager(device=torch.device(DEVICE)):
        dist.broadcast(x, 0)
    return x


@row
def object_collectives():
    rank, size = here()
    mine = {"rank": rank, "text": "x" * rank}
    everyone, gathered, scattered = [None] * size, [None] * size, [None]
    dist.all_gather_object(everyone, mine)
    dist.gather_object(mine, gathered if rank == 0 else None, dst=0)
    dist.scatter_object_list(scattered, [[peer] for peer in range(size)], src=0)
    shared = [mine] if rank == 0 else [None]
    dist.broadcast_object_list(shared, src=0)
    return everyone, gathered, scattered, shared


@row
def object_lists_point_to_point():
    received = [None]
    if here()[0] == 0:
        dist.send_object_list([("a", 1)], dst=1)
    elif here()[0] == 1:
        dist.recv_object_list(received, src=0)
    return received


@row(waited=[False, True])
def all_gather_behind_a_reduce_scatter(async_op, waited):
    size = here()[1]
    scattered, gathered = empty(3), empty(size * 2)
    first = dist.reduce_scatter_tensor(scattered, random(size * 3), async_op=True)
    if waited:
        done(first)
        scattered.fill_(5)  # to stay, though `first` is still held
    done(dist.all_gather_into_tensor(gathered, random(2), async_op=async_op))
    if not waited:
        done(first)
    return scattered, gathered


BEHIND = {
    "all_reduce": lambda x, y, **options: dist.all_reduce(y, **options),
    "broadcast": lambda x, y, **options: dist.broadcast(y, 0, **options),
    "all_gather": lambda x, y, **options: dist.all_gather(list(y.chunk(here()[1])), x, **options),
    "reduce_scatter": lambda x, y, **options: dist.reduce_scatter_tensor(x, y, **options),
    "all_to_all": lambda x, y, **options: dist.all_to_all_single(y, y.clone(), **options),
    "scatter": lambda x, y, **options: dist.scatter(
        x, list(y.chunk(here()[1])) if here()[0] == 0 else None, **options
    ),
    "barrier": lambda x, y, **options: dist.barrier(**options),
    "broken": lambda x, y, **options: dist.reduce_scatter_tensor(x, y[1:], **options),
}


@row(call=list(BEHIND))
def behind_a_pending_all_gather(async_op, call):
    """Rank 0 comes late, so the others have an all-gather pending when they make the call."""
    rank, size = here()
    x, y, gathered = random(4), random(size * 4), empty(size * 3)
    if rank == 0:
        time.sleep(0.05)
    pending = dist.all_gather_into_tensor(gathered, random(3), async_op=True)
    done(BEHIND[call](x, y, async_op=async_op))
    done(pending)
    return x, y, gathered
