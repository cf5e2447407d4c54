"""Rows of the table: collectives, point-to-point calls, coalescing forms, objects."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from rows import DEVICE, Gathered, done, empty, here, random, row
from torch.distributed.distributed_c10d import _coalescing_manager

OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"]
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "float16", "bfloat16"]
DTYPES += ["float32", "float64", "complex64", "complex128", "float8_e4m3fn"]


@row
def broadcast(async_op):
    tensors = [random(5) for _ in range(here()[1])]
    for root, tensor in enumerate(tensors):
        done(dist.broadcast(tensor, root, async_op=async_op))
    return tensors


@row(op=OPS, dtype=["float32", "int64"])
def all_reduce(async_op, op, dtype):
    x = random(7, dtype=getattr(torch, dtype))
    done(dist.all_reduce(x, getattr(dist.ReduceOp, op), async_op=async_op))
    return x


@row
def all_reduce_sparse(async_op):
    x = (random(6) * (random(6) > 2)).to_sparse()
    done(dist.all_reduce(x, async_op=async_op))
    return x.to_dense()


@row
def all_reduce_coalesced(async_op):
    tensors = [random(3), random(2, 2)]
    done(dist.all_reduce_coalesced(tensors, async_op=async_op))
    return tensors


@row
def reduce(async_op):
    x, root = random(4, 2), here()[1] - 1
    done(dist.reduce(x, root, async_op=async_op))
    return x if here()[0] == root else "undefined elsewhere"


@row(dtype=DTYPES)
def all_gather(async_op, dtype):
    dtype = getattr(torch, dtype)
    x, outputs = random(3, 2, dtype=dtype), [empty(3, 2, dtype=dtype) for _ in range(here()[1])]
    done(dist.all_gather(outputs, x, async_op=async_op))
    return Gathered(x, outputs)


@row
def all_gather_uneven(async_op):
    rank, size = here()
    x, outputs = random(3 + rank), [empty(3 + peer) for peer in range(size)]
    done(dist.all_gather(outputs, x, async_op=async_op))
    return Gathered(x, outputs)


@row(n=[0, 1, 1000, 300_000])
def all_gather_into_tensor(async_op, n):
    x, output = random(n), empty(here()[1] * n)
    done(dist.all_gather_into_tensor(output, x, async_op=async_op))
    return Gathered(x, output.reshape(here()[1], n).unbind())


@row(dtype=DTYPES)
def all_gather_into_tensor_of(dtype):
    dtype = getattr(torch, dtype)
    x, output = random(5, dtype=dtype), empty(here()[1] * 5, dtype=dtype)
    dist.all_gather_into_tensor(output, x)
    return Gathered(x, output.chunk(here()[1]))


@row
def all_gather_into_tensor_in_place(async_op):
    rank, size = here()
    output = empty(size * 4)
    own = output.narrow(0, rank * 4, 4)
    own.copy_(random(4))
    done(dist.all_gather_into_tensor(output, own, async_op=async_op))
    return Gathered(own, output.chunk(size))


@row
def all_gather_into_tensor_stacked(async_op):
    x, output = random(3, 2), empty(here()[1], 3, 2)
    done(dist.all_gather_into_tensor(output, x, async_op=async_op))
    return Gathered(x, output.unbind())


@row
def all_gather_into_tensor_of_a_transpose():
    x, output = random(3, 2).t(), empty(here()[1] * 2, 3)
    dist.all_gather_into_tensor(output, x)
    return Gathered(x, output.chunk(here()[1]))


@row
def all_gather_into_a_transpose():
    x, output = random(2, 3), empty(3, here()[1] * 2).t()
    dist.all_gather_into_tensor(output, x)
    return Gathered(x, output.chunk(here()[1]))


@row(wrong=["size", "dtype", "list"])
def all_gather_with_a_wrong(wrong):
    size = here()[1]
    if wrong == "size":
        dist.all_gather_into_tensor(empty(size * 4 - 1), random(4))
    elif wrong == "dtype":
        dist.all_gather_into_tensor(empty(size * 4), random(4, dtype=torch.int32))
    else:
        dist.all_gather([empty(4)] * (size + 1), random(4))


@row
def all_gather_coalesced(async_op):
    lists = [[empty(2), empty(3, 2)] for _ in range(here()[1])]
    done(dist.all_gather_coalesced(lists, [random(2), random(3, 2)], async_op=async_op))
    return lists


@row
def gather(async_op):
    rank, size = here()
    outputs = [empty(4) for _ in range(size)] if rank == 0 else None
    done(dist.gather(random(4), outputs, dst=0, async_op=async_op))
    return outputs


@row
def scatter(async_op):
    rank, size = here()
    output = empty(4)
    inputs = [random(4) for _ in range(size)] if rank == size - 1 else None
    done(dist.scatter(output, inputs, src=size - 1, async_op=async_op))
    return output


@row(op=OPS)
def reduce_scatter(async_op, op):
    output, inputs = empty(3), [random(3) for _ in range(here()[1])]
    done(dist.reduce_scatter(output, inputs, getattr(dist.ReduceOp, op), async_op=async_op))
    return output


@row
def reduce_scatter_tensor(async_op):
    output = empty(3)
    done(dist.reduce_scatter_tensor(output, random(here()[1] * 3), async_op=async_op))
    return output


@row
def all_to_all(async_op):
    size = here()[1]
    outputs = [empty(2) for _ in range(size)]
    done(dist.all_to_all(outputs, [random(2) for _ in range(size)], async_op=async_op))
    return outputs


@row
def all_to_all_single(async_op):
    output = empty(here()[1] * 2)
    done(dist.all_to_all_single(output, random(here()[1] * 2), async_op=async_op))
    return output


@row
def all_to_all_single_uneven(async_op):
    rank, size = here()
    output, x = empty(size * (rank + 1)), random(size * (size + 1) // 2)
    sent = [peer + 1 for peer in range(size)]
    done(dist.all_to_all_single(output, x, [rank + 1] * size, sent, async_op=async_op))
    return output


@row(name=["all_gather_single", "reduce_scatter_single", "gather_single"])
def renamed(name):
    rank, size = here()
    if name == "reduce_scatter_single":
        output = empty(3)
        dist.reduce_scatter_single(output, random(size * 3))
        return output
    output = empty(size * 3)
    if name == "gather_single":
        dist.gather_single(random(3), output if rank == 0 else None, dst=0)
    else:
        dist.all_gather_single(output, random(3))
    return output


@row
def barrier(async_op):
    done(dist.barrier(async_op=async_op))


@row
def monitored_barrier():
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


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
