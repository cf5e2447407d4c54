"""Gathers without kernels by torch and NCCL, over symmetric memory.

NCCL's symmetric windows come from a registered memory pool here, not from torch's symmetric memory.
That has one backend a process, and `_low_contention_all_gather` needs the CUDA one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pg_sdma.bench.buffers import Arena, Case
from pg_sdma.bench.contenders import Calls, OverGroup, Room, SetUp
from pg_sdma.bench.launch import World

# A rival that hangs must not take the whole run with it.
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class ZeroCta(OverGroup):
    """NCCL told to use no compute unit (CTA) where it can, on a registered memory pool."""

    pool: Any = field(default=None, repr=False)  # keeps the memory

    def close(self) -> None:
        backend: Any = self.group._get_backend(torch.device("cuda"))
        backend.deregister_mem_pool(self.pool)


def zero_cta(world: World, room: Room) -> SetUp:
    """NCCL 2.28 and later copy by copy engines under this policy, if both tensors are symmetric.

    Raises RuntimeError where torch has not the options for it.
    """
    _require_gpu(world)
    if not dist.is_nccl_available():
        raise RuntimeError("this torch has no NCCL")
    nccl = dist.ProcessGroupNCCL
    if not hasattr(nccl, "NCCL_CTA_POLICY_ZERO") or "symm" not in (
        nccl.register_mem_pool.__doc__ or ""
    ):
        raise RuntimeError("this torch cannot register symmetric memory or has no CTA policy")
    if torch.cuda.nccl.version() < (2, 28):
        raise RuntimeError("needs NCCL 2.28 or later")
    yield
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
    options._timeout = TIMEOUT
    group = dist.new_group(backend="cuda:nccl", pg_options=options, timeout=TIMEOUT)
    backend: Any = group._get_backend(world.device)
    yield
    # The communicator is made by the first collective, and a pool needs it.
    dist.all_reduce(torch.ones(1, device=world.device), group=group)
    torch.cuda.synchronize(world.device)
    yield
    pool = torch.cuda.MemPool(backend.mem_allocator)
    # One tensor, so one segment: all ranks have to register the same windows in the same order. It
    # is there before the pool is registered, as later segments may not be symmetric.
    with torch.cuda.use_mem_pool(pool):
        memory = torch.zeros(room.whole + room.shards, dtype=torch.uint8, device=world.device)
    torch.cuda.synchronize(world.device)
    yield
    backend.register_mem_pool(pool, symm=True)
    yield
    whole, shards = memory[: room.whole], memory[room.whole :]
    return ZeroCta("zero-CTA", group, Arena.over(whole), Arena.over(shards), pool=pool)


@dataclass(frozen=True)
class LowContention:
    """`torch.ops.symm_mem._low_contention_all_gather`, whose inputs lie in symmetric memory.

    It allocates its outputs, so it has no in-place form.
    """

    name: str
    group_name: str
    device: torch.device
    places: tuple[str, ...] = ("out",)
    group: None = None

    def prepare(self, case: Case, wanted: int) -> Calls:
        import torch.distributed._symmetric_memory as symmetric_memory

        own: list[Tensor] = []
        for _ in range(min(wanted, 4)):  # each is exchanged between the ranks
            tensor = symmetric_memory.empty(case.count, dtype=case.dtype, device=self.device)
            symmetric_memory.rendezvous(tensor, self.group_name)  # type: ignore[arg-type]
            own.append(tensor.zero_())
        kept: dict[int, Tensor] = {}  # as many outputs in turn

        def call(i: int) -> Tensor:
            mine = own[i % len(own)]
            output = torch.ops.symm_mem._low_contention_all_gather(mine, self.group_name)
            output = torch.ops._c10d_functional.wait_tensor(output)
            kept[i % len(own)] = output
            return output

        return Calls(own, call)

    def close(self) -> None:
        pass


def low_contention(world: World, room: Room) -> SetUp:
    """PyTorch's own gather by plain copies. Raises RuntimeError where torch has it not."""
    _require_gpu(world)
    import torch.distributed._symmetric_memory as symmetric_memory

    if not hasattr(torch.ops.symm_mem, "_low_contention_all_gather"):
        raise RuntimeError("this torch has no _low_contention_all_gather")
    symmetric_memory.set_backend("CUDA")
    yield
    default = dist.group.WORLD
    assert default is not None
    return LowContention("low-contention", default.group_name, world.device)


def _require_gpu(world: World) -> None:
    if world.device.type != "cuda":
        raise RuntimeError("needs a GPU a rank")
    if torch.cuda.device_count() < world.size:
        raise RuntimeError("ranks share a GPU")
