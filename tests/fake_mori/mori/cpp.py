"""What is compiled in mori: the SHMEM world, and the classes that pybind11 makes."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import secrets
import tempfile
import time
from pathlib import Path

MORI_SHMEM_INIT_WITH_MPI_COMM = 0
MORI_SHMEM_INIT_WITH_UNIQUEID = 1
UNIQUE_ID_BYTES = 128
TIMEOUT = 60.0  # seconds in which peers have to come
HEADER = 4096  # of a heap: the barrier's counter
ALIGNMENT = 256


class World:
    """The heaps of all PEs, mapped: `bases[pe]` is the address of one."""

    def __init__(self, pe: int, npes: int, name: str) -> None:
        self.pe = pe
        self.npes = npes
        size = os.environ["MORI_SHMEM_HEAP_SIZE"]
        assert size.endswith("M")
        self.size = int(size[:-1]) << 20
        self._next = HEADER
        self._barriers = 0
        folder = Path(tempfile.gettempdir())
        paths = [folder / f"fake-mori-{name}-{peer}" for peer in range(npes)]
        unfinished = paths[pe].with_suffix(".new")
        with unfinished.open("wb") as file:
            file.truncate(self.size)
        unfinished.rename(paths[pe])
        self.maps = []
        for path in paths:
            wait_until(path.exists, f"PE {pe}: no heap {path}")
            with path.open("r+b") as file:
                self.maps.append(mmap.mmap(file.fileno(), self.size))
        self.bases = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self.maps]
        self.barrier()
        paths[pe].unlink()

    def malloc(self, size: int) -> int:
        """An offset, the same on every PE that allocates in the same order."""
        offset = self._next
        self._next += -(-size // ALIGNMENT) * ALIGNMENT
        if self._next > self.size:
            raise RuntimeError("Out of static heap memory! Increase via MORI_SHMEM_HEAP_SIZE")
        return offset

    def word(self, pe: int, offset: int) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(self.bases[pe] + offset)

    def barrier(self) -> None:
        self._barriers += 1
        self.word(self.pe, 0).value = self._barriers
        for peer in range(self.npes):
            word = self.word(peer, 0)
            wait_until(lambda word=word: word.value >= self._barriers, f"no barrier of {peer}")


_world: World | None = None


def world() -> World:
    assert _world is not None, "here mori crashes"
    return _world


def wait_until(done, what: str) -> None:
    end = time.monotonic() + TIMEOUT
    looks = 0
    while not done():
        looks += 1
        time.sleep(0 if looks < 100 else 1e-4)
        if time.monotonic() > end:
            raise RuntimeError(what)


def shmem_get_unique_id() -> bytes:
    return secrets.token_hex(UNIQUE_ID_BYTES // 2).encode()


def shmem_init_attr(flags: int, rank: int, nranks: int, unique_id: bytes) -> int:
    global _world
    if os.environ.get("FAKE_MORI_BROKEN") == "init":
        return -1
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise RuntimeError("Invalid unique ID size")
    if _world is None:  # or: already initialized, skipping
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # next to the GPU
        _world = World(rank, nranks, unique_id[:16].decode())
    return 0


def shmem_mype() -> int:
    return world().pe


def shmem_npes() -> int:
    return world().npes


class Handle:
    """One all-gather's buffers and what the kernel does with them, on the calling thread."""

    def __init__(
        self, my_pe: int, npes: int, input_size: int, output_size: int, copy_output: bool
    ) -> None:
        self._world = world()
        assert (my_pe, npes) == (self._world.pe, self._world.npes)
        self._flags = self._world.malloc(npes * 8)
        self._world.malloc(input_size)  # which nothing reads
        self._output = self._world.malloc(output_size)
        self._output_size = output_size
        self._copy_output = copy_output
        self._calls = 0
        self._packet = int(os.environ.get("FAKE_MORI_PACKET", 1 << 30))
        self._race = float(os.environ.get("FAKE_MORI_RACE", 0))
        self._random = random.Random(secrets.randbits(64))

    def gather(self, source: int, destination: int, words: int) -> None:
        """Reads `words` at address `source` on every PE; past the buffers' ends, too."""
        if words == 0:
            return
        here = self._world
        size = 4 * words
        sent = size if size <= self._packet else (size - 1) % self._packet + 1
        self._calls += 1
        # No look at whether a peer has copied its last output to where that belongs.
        for pe in range(here.npes):
            ctypes.memmove(here.bases[pe] + self._output + here.pe * size, source, sent)
        for pe in range(here.npes):
            here.word(pe, self._flags + 8 * here.pe).value = self._calls
        for pe in range(here.npes):
            flag = here.word(here.pe, self._flags + 8 * pe)
            wait_until(lambda flag=flag: flag.value >= self._calls, f"no data of PE {pe}")
        if self._random.random() < self._race:
            time.sleep(self._random.random() * 2e-3)
        if self._copy_output:
            ctypes.memmove(destination, here.bases[here.pe] + self._output, here.npes * size)

    def output(self) -> tuple[mmap.mmap, int, int]:
        return self._world.maps[self._world.pe], self._output, self._output_size


class DataType:
    Int8 = 0
    Uint8 = 1


class AllGatherIntoTensor:
    # pybind11 has no other signatures than these.
    def __init__(self, *args, **kwargs):
        """__init__(self: AllGatherIntoTensor, my_pe: int, npes: int, input_buffer_size: int,
        output_buffer_size: int, copy_output_to_user: bool = True, auto_register: bool = False)"""
        self._init(*args, **kwargs)

    def _init(
        self,
        my_pe: int,
        npes: int,
        input_buffer_size: int,
        output_buffer_size: int,
        copy_output_to_user: bool = True,
        auto_register: bool = False,
    ) -> None:
        self._handle = Handle(
            my_pe, npes, input_buffer_size, output_buffer_size, copy_output_to_user
        )

    def __call__(self, *args, **kwargs):
        """__call__(self: AllGatherIntoTensor, input_ptr: int, output_ptr: int, count: int,
        dtype: DataType, stream: int = 0) -> bool"""
        return self._call(*args, **kwargs)

    def _call(
        self, input_ptr: int, output_ptr: int, count: int, dtype: int, stream: int = 0
    ) -> bool:
        assert dtype in (DataType.Int8, DataType.Uint8)
        if count % 4 != 0:
            raise RuntimeError("per-rank byte length must be a multiple of 4")
        self._handle.gather(input_ptr, output_ptr, count // 4)
        return True
