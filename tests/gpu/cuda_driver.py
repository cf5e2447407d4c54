"""CUDA's driver library by ctypes, as far as the assumption tests need it.

`PG_SDMA_DRIVER` names another library: the tests then hold the stand-in to what they hold CUDA to.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

NOT_READY = 600
CAPTURE_IMPLICIT = 906

MEMORY_TYPE, BUFFER_ID, IS_MANAGED, ORDINAL, IPC_CAPABLE = 2, 7, 8, 9, 10
RANGE_START, RANGE_SIZE, HANDLE_TYPES, MEMORY_POOL, BLOCK_ID = 11, 12, 14, 17, 20

GLOBAL_CAPTURE, RELAXED_CAPTURE = 0, 2
POSIX_DESCRIPTOR = 1


class IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


class MemoryOperation(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


def wait(address: int, value: int) -> MemoryOperation:
    return MemoryOperation(4, address, value, 0)


def write(address: int, value: int) -> MemoryOperation:
    return MemoryOperation(5, address, value, 0)


class Failed(Exception):
    """A driver call failed with `code`."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} gave {code}")
        self.code = code


class Driver:
    """One device, with its primary context current on the creating thread."""

    def __init__(self, device: int = 0) -> None:
        self.library = ctypes.CDLL(os.environ.get("PG_SDMA_DRIVER") or "libcuda.so.1")
        self.device = device
        self.pipe: Connection | None = None  # to the test, where this is a peer's
        self.streams: list[int] = []
        self.pages: list[Page] = []  # registered memory must not be unmapped before
        self("cuInit", 0)
        self.context = self.out(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", ..., device)
        self.enter()

    def __call__(self, name: str, *arguments: object) -> None:
        """Calls the driver; plain integers are passed as 64 bits, which every argument allows."""
        code = self.result(name, *arguments)
        if code != 0:
            raise Failed(name, code)

    def result(self, name: str, *arguments: object) -> int:
        """The result code of a call."""
        passed = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return getattr(self.library, name)(*passed)

    def out(self, kind: type, name: str, *arguments: object) -> int:
        """What the call stores where `...` stands among its arguments."""
        value = kind()
        self(name, *(ctypes.byref(value) if a is ... else a for a in arguments))
        return value.value or 0

    def enter(self) -> None:
        self("cuCtxPushCurrent_v2", self.context)

    # -- memory

    def alloc(self, size: int) -> int:
        return self.out(ctypes.c_uint64, "cuMemAlloc_v2", ..., size)

    def free(self, address: int) -> None:
        self("cuMemFree_v2", address)

    def put(self, address: int, content: bytes) -> None:
        self("cuMemcpyHtoD_v2", address, content, len(content))
        self("cuStreamSynchronize", 0)  # a small copy may be on its way when its call returns

    def get(self, address: int, size: int) -> bytes:
        content = ctypes.create_string_buffer(size)
        self("cuMemcpyDtoH_v2", content, address, size)
        return content.raw

    def attributes(self, address: int, *names: int) -> list[int]:
        """Pointer attributes by one call, each as the unsigned number that it fits into."""
        numbers = (ctypes.c_int * len(names))(*names)
        values = [ctypes.c_uint64() for _ in names]
        places = (ctypes.c_void_p * len(names))(*(ctypes.addressof(v) for v in values))
        self("cuPointerGetAttributes", len(names), numbers, places, address)
        return [value.value for value in values]

    def address_range(self, address: int) -> tuple[int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def ipc_handle(self, address: int) -> bytes:
        handle = IpcHandle()
        self("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open_ipc(self, handle: bytes) -> int:
        base = ctypes.c_uint64()
        given = IpcHandle.from_buffer_copy(handle)
        self("cuIpcOpenMemHandle_v2", ctypes.byref(base), given, 1)
        return base.value

    # -- expandable segments

    def properties(self) -> Properties:
        return Properties(1, POSIX_DESCRIPTOR, 1, self.device)

    def granularity(self) -> int:
        properties = ctypes.byref(self.properties())
        return self.out(ctypes.c_size_t, "cuMemGetAllocationGranularity", ..., properties, 0)

    def reserve(self, size: int) -> int:
        return self.out(ctypes.c_uint64, "cuMemAddressReserve", ..., size, 0, 0, 0)

    def create_chunk(self, size: int) -> int:
        properties = ctypes.byref(self.properties())
        return self.out(ctypes.c_uint64, "cuMemCreate", ..., size, properties, 0)

    def map(self, address: int, size: int, handle: int) -> None:
        """Maps a chunk for this device. Only the mapping holds it then."""
        self("cuMemMap", address, size, 0, handle, 0)
        self("cuMemRelease", handle)
        self("cuMemSetAccess", address, size, ctypes.byref(Access(1, self.device, 3)), 1)

    def descriptor_of(self, address: int) -> int:
        handle = self.out(ctypes.c_uint64, "cuMemRetainAllocationHandle", ..., address)
        number = self.out(ctypes.c_int, "cuMemExportToShareableHandle", ..., handle, 1, 0)
        self("cuMemRelease", handle)
        return number

    def import_descriptor(self, number: int) -> int:
        return self.out(ctypes.c_uint64, "cuMemImportFromShareableHandle", ..., number, 1)

    # -- streams

    def stream(self, priority: int = 0) -> int:
        given = ctypes.c_int(priority)
        stream = self.out(ctypes.c_void_p, "cuStreamCreateWithPriority", ..., 1, given)
        self.streams.append(stream)
        return stream

    def operate(self, stream: int, *operations: MemoryOperation) -> None:
        batch = (MemoryOperation * len(operations))(*operations)
        self("cuStreamBatchMemOp_v2", stream, len(operations), batch, 0)

    def copy_batch(self, stream: int, *copies: tuple[int, int, int]) -> int:
        """Enqueues (destination, source, bytes) in stream order; the driver's code."""
        destinations, sources, sizes = (
            (ctypes.c_uint64 * len(copies))(*column) for column in zip(*copies, strict=True)
        )
        attributes = (ctypes.c_int * 6)(1)  # accessed in stream order; no hints, no flags
        first, failed = ctypes.c_size_t(), ctypes.c_size_t()
        return self.result(
            "cuMemcpyBatchAsync",
            destinations,
            sources,
            sizes,
            len(copies),
            attributes,
            ctypes.byref(first),
            1,
            ctypes.byref(failed),
            stream,
        )

    def event(self) -> int:
        return self.out(ctypes.c_void_p, "cuEventCreate", ..., 2)

    def passed(self, event: int) -> bool:
        code = self.result("cuEventQuery", event)
        if code not in (0, NOT_READY):
            raise Failed("cuEventQuery", code)
        return code == 0

    @contextmanager
    def capture_mode(self, mode: int) -> Iterator[None]:
        before = ctypes.c_int(mode)
        self("cuThreadExchangeStreamCaptureMode", ctypes.byref(before))
        yield
        self("cuThreadExchangeStreamCaptureMode", ctypes.byref(before))


class Page:
    """Counters in host memory that the CPU and the device see: a memfd, as the control page is.

    `file` is that of another process's page; this one closes it.
    """

    def __init__(self, driver: Driver, file: int | None = None) -> None:
        self.driver = driver
        driver.pages.append(self)
        if file is None:
            file = os.memfd_create("page")
            os.ftruncate(file, mmap.PAGESIZE)
        self.file = file
        self.map = mmap.mmap(file, mmap.PAGESIZE)
        self.counters = (ctypes.c_uint64 * 512).from_buffer(self.map)
        self.host = ctypes.addressof(self.counters)
        driver("cuMemHostRegister_v2", self.host, mmap.PAGESIZE, 3)
        self.base = driver.out(ctypes.c_uint64, "cuMemHostGetDevicePointer_v2", ..., self.host, 0)

    def address(self, index: int) -> int:
        """The device's address of counter `index`."""
        return self.base + 8 * index

    def close(self) -> None:
        # Not before every operation on it is over, the waits of a failed test included.
        self.counters[:] = [1 << 62] * len(self.counters)
        for stream in self.driver.streams:
            self.driver("cuStreamSynchronize", stream)
        self.driver("cuMemHostUnregister", self.host)
        os.close(self.file)
        self.driver.pages.remove(self)
