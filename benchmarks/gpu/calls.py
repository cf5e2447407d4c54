"""The host's time of each driver call that an all-gather makes.

    python benchmarks/gpu/calls.py

The calls are made by ctypes, whose own cost is subtracted: that of a call that asks for the
driver's version. They are made on streams that never wait, and so few at a time that the launch
queue is not full. With two GPUs the copies are from the second, otherwise within the first.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))

from cuda_driver import BLOCK_ID, BUFFER_ID, Driver, MemoryOperation, Page, wait, write

CALLS = 64  # between two synchronisations
ROUNDS = 50
SHARD = 1 << 20  # bytes


def long(number: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(number)


def calls(driver: Driver) -> Iterator[tuple[str, Callable[[], int]]]:
    """Names and calls; what they work on lives as long as the iterator."""
    library, page = driver.library, Page(driver)
    stream, caller, event = (long(x) for x in (driver.stream(-1), driver.stream(), driver.event()))
    peer = torch.device("cuda", torch.cuda.device_count() - 1)
    source, target = (torch.zeros(2 * SHARD, dtype=torch.uint8, device=d) for d in (peer, "cuda:0"))
    target.copy_(source)  # turns on peer access
    destination, origin = long(target.data_ptr()), long(source.data_ptr())
    one, other = long(page.address(0)), long(page.address(8))
    peer_context = Driver(torch.cuda.device_count() - 1).context
    driver.enter()
    status, mode, context = ctypes.c_int(), ctypes.c_int(2), ctypes.c_void_p()
    numbers, values = (ctypes.c_int * 2)(BUFFER_ID, BLOCK_ID), (ctypes.c_uint64 * 2)()
    first = ctypes.addressof(values)
    places = (ctypes.c_void_p * 2)(first, first + 8)

    def operate(*operations: MemoryOperation) -> Callable[[], int]:
        batch = (MemoryOperation * len(operations))(*operations)
        return lambda: library.cuStreamBatchMemOp_v2(stream, len(operations), batch, 0)

    yield "nothing", lambda: library.cuDriverGetVersion(ctypes.byref(status))
    yield "cuCtxGetCurrent", lambda: library.cuCtxGetCurrent(ctypes.byref(context))
    yield (
        "cuThreadExchangeStreamCaptureMode",
        lambda: library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)),
    )
    yield (
        "cuStreamIsCapturing",
        lambda: library.cuStreamIsCapturing(caller, ctypes.byref(status)),
    )
    for n in (1, 2):
        ask = partial(library.cuPointerGetAttributes, n, numbers, places, destination)
        yield f"cuPointerGetAttributes, {n}", ask
    yield "cuEventRecord", lambda: library.cuEventRecord(event, caller)
    yield "cuStreamWaitEvent", lambda: library.cuStreamWaitEvent(stream, event, 0)
    yield (
        "cuEventRecord, cuStreamWaitEvent",
        lambda: library.cuEventRecord(event, caller) or library.cuStreamWaitEvent(stream, event, 0),
    )
    yield (
        "cuStreamWriteValue64",
        lambda: library.cuStreamWriteValue64_v2(stream, one, long(1), 0),
    )
    yield (
        "cuStreamWaitValue64",
        lambda: library.cuStreamWaitValue64_v2(stream, other, long(0), 0),
    )
    yield "cuStreamBatchMemOp, write", operate(write(page.address(0), 1))
    yield (
        "cuStreamBatchMemOp, write and wait",
        operate(write(page.address(0), 1), wait(page.address(8), 0)),
    )
    for name in ("cuMemcpyAsync", "cuMemcpyDtoDAsync_v2"):
        copy = partial(getattr(library, name), destination, origin, long(SHARD), stream)
        yield f"{name} from the peer", copy
    own, others = (long(c) for c in (driver.context, peer_context))
    yield (
        "cuMemcpyPeerAsync from the peer",
        lambda: library.cuMemcpyPeerAsync(destination, own, origin, others, long(SHARD), stream),
    )


def main() -> None:
    driver = Driver()
    # Torch makes the same context current, and keeps it.
    torch.cuda.set_device(0)
    print(
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    floor = 0.0
    for name, call in calls(driver):
        times = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            for _ in range(CALLS):
                began = time.perf_counter()
                code = call()
                times.append(time.perf_counter() - began)
                assert code == 0, f"{name} gave {code}"
        microseconds = statistics.median(times) * 1e6
        floor = floor or microseconds  # ctypes' own
        print(f"{microseconds - floor:8.2f} us  {name}")


if __name__ == "__main__":
    main()
