"""The driver calls of an in-place all-gather, issued from Python with nothing around them.

They come in the order in which the engine makes them for a synchronous call
(csrc/transport/schedule/copies.cpp), on the caller's stream and on counters of their own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile

import torch
import torch.distributed as dist
from cuda_driver import Driver, wait, write

from pg_sdma.bench.launch import World
from pg_sdma.bench.measure import Call

LINE = 64  # bytes: each counter has a cache line of its own


class Counters:
    """Two counters a rank, in host memory that all ranks and their devices see."""

    def __init__(self, world: World, driver: Driver) -> None:
        names = [""]
        if world.rank == 0:
            file, names[0] = tempfile.mkstemp(dir="/dev/shm")
            os.ftruncate(file, mmap.PAGESIZE)
            os.close(file)
        dist.broadcast_object_list(names)
        with open(names[0], "r+b") as shared:
            self._map = mmap.mmap(shared.fileno(), mmap.PAGESIZE)
        world.barrier()
        if world.rank == 0:
            os.unlink(names[0])
        self._driver = driver
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        driver("cuMemHostRegister_v2", self._host, mmap.PAGESIZE, 3)
        base = driver.out(ctypes.c_uint64, "cuMemHostGetDevicePointer_v2", ..., self._host, 0)
        self.ready = [base + LINE * rank for rank in range(world.size)]
        self.done = [base + LINE * (world.size + rank) for rank in range(world.size)]

    def close(self) -> None:
        torch.cuda.synchronize()
        self._driver("cuMemHostUnregister", self._host)


class BareGathers:
    """In-place all-gathers within `arena`, a tensor of bytes on each rank's device."""

    def __init__(self, world: World, arena: torch.Tensor) -> None:
        self._rank = world.rank
        self._peers = [(world.rank + i) % world.size for i in range(1, world.size)]
        self._driver = driver = Driver(world.device.index)
        self._end = driver.event()
        self._number = 0
        self.counters = Counters(world, driver)
        self._arena = arena.data_ptr()
        base, _ = driver.address_range(self._arena)
        exports: list[tuple[bytes, int]] = [(b"", 0)] * world.size
        dist.all_gather_object(exports, (driver.ipc_handle(base), self._arena - base))
        self._targets = {
            peer: driver.open_ipc(exports[peer][0]) + exports[peer][1] for peer in self._peers
        }

    def of(self, shard: int) -> Call:
        """A call that gathers `shard` bytes a rank at the arena's start."""

        def gather(_: int) -> None:
            driver, counters = self._driver, self.counters
            stream = torch.cuda.current_stream().cuda_stream
            self._number += 1
            number = self._number
            operations = [write(counters.ready[self._rank], number)]
            place = self._rank * shard
            for peer in self._peers:
                driver.operate(stream, *operations, wait(counters.ready[peer], number))
                target = self._targets[peer] + place
                driver("cuMemcpyAsync", target, self._arena + place, shard, stream)
                operations = []
            waits = (wait(counters.done[peer], number) for peer in self._peers)
            driver.operate(stream, write(counters.done[self._rank], number), *waits)
            driver("cuEventRecord", self._end, stream)

        return gather
