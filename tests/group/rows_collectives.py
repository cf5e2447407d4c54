"""Rows of the table: collectives and barriers."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from rows import DEVICE, Gathered, done, empty, here, random, row
from torch.nn.parallel import DistributedDataParallel

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
def all_reduce_premultiplied():
    x = random(4)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
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
def all_gather_channels_last(async_op):
    x = random(2, 3, 4, 5).to(memory_format=torch.channels_last)
    outputs = [torch.empty_like(x) for _ in range(here()[1])]
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


@row(name=["_all_gather_base", "_reduce_scatter_base"])
def deprecated(name):
    size = here()[1]
    output = empty(size * 4 if name == "_all_gather_base" else 1)
    getattr(dist, name)(output, random(4 if name == "_all_gather_base" else size))
    return output


@row
def distributed_data_parallel():
    model = torch.nn.Linear(3, 2).to(DEVICE)
    for parameter in model.parameters():
        parameter.data = random(*parameter.shape)  # DDP broadcasts those of rank 0
    replicated = DistributedDataParallel(model)
    replicated(random(4, 3)).sum().backward()
    return [(parameter, parameter.grad) for parameter in model.parameters()]


def late_mark(name):
    """Rank 0 sets `name` in the store, late. Whether it is set tells if a barrier waited for it."""
    store = dist.distributed_c10d._get_default_store()
    if here()[0] == 0:
        time.sleep(0.1)
        store.set(name, "")
    return lambda: store.check([name])


@row
def barrier(async_op):
    is_set = late_mark(f"barrier {async_op}")
    done(dist.barrier(async_op=async_op))
    return is_set()


@row
def monitored_barrier():
    is_set = late_mark("monitored_barrier")
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)
    return is_set()
