"""What the engine and its stand-in take for granted of CUDA, asked of the device itself.

tests/standin/ASSUMPTIONS.md lists each assumption with its test here. With two devices, peers are
on the second one.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import pytest
from cuda_driver import (
    BLOCK_ID,
    BUFFER_ID,
    CAPTURE_IMPLICIT,
    GLOBAL_CAPTURE,
    HANDLE_TYPES,
    IPC_CAPABLE,
    IS_MANAGED,
    MEMORY_POOL,
    MEMORY_TYPE,
    ORDINAL,
    RANGE_SIZE,
    RANGE_START,
    RELAXED_CAPTURE,
    Driver,
    Failed,
    Page,
    wait,
    write,
)

pytestmark = pytest.mark.gpu

SIZE = 4 << 20


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


@pytest.fixture
def page(driver: Driver) -> Iterator[Page]:
    page = Page(driver)
    yield page
    page.close()


def passes(driver: Driver, event: int, seconds: float = 5.0) -> bool:
    """Whether an event passes, given some time."""
    end = time.monotonic() + seconds
    while not driver.passed(event):
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


# -- peers: another process with the same or the next device, that answers requests


def serve_peer(pipe: Connection, device: int) -> None:
    driver = Driver(device)
    driver.pipe = pipe
    while (request := pipe.recv()) is not None:
        function, arguments = request
        try:
            pipe.send((True, function(driver, *arguments)))
        except (Failed, AssertionError) as error:
            pipe.send((False, str(error)))


class Peer:
    def __init__(self, driver: Driver) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        count = driver.out(ctypes.c_int, "cuDeviceGetCount", ...)
        self.process = context.Process(target=serve_peer, args=(theirs, min(1, count - 1)))
        self.process.start()

    def ask(
        self, function: Callable[..., Any], *arguments: Any, descriptors: Sequence[int] = ()
    ) -> Any:
        self.pipe.send((function, arguments))
        for number in descriptors:
            reduction.send_handle(self.pipe, number, self.process.pid)
        assert self.pipe.poll(60), f"{function.__name__} did not return"
        ok, answer = self.pipe.recv()
        assert ok, answer
        return answer

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(30)
        self.process.kill()


@pytest.fixture
def peer(driver: Driver) -> Iterator[Peer]:
    peer = Peer(driver)
    yield peer
    peer.close()


def open_ipc(driver: Driver, handle: bytes) -> int:
    return driver.open_ipc(handle)


def close_ipc(driver: Driver, base: int) -> None:
    driver("cuIpcCloseMemHandle", base)


def read(driver: Driver, address: int, size: int) -> bytes:
    """Reads through memory of the peer's own, as an all-gather does."""
    own = driver.alloc(size)
    driver("cuMemcpyAsync", own, address, size, 0)
    content = driver.get(own, size)
    driver.free(own)
    return content


def map_descriptors(driver: Driver, count: int, chunk: int) -> int:
    base = driver.reserve(chunk * count)
    for index in range(count):
        number = reduction.recv_handle(driver.pipe)
        driver.map(base + index * chunk, chunk, driver.import_descriptor(number))
        os.close(number)
    return base


# -- finding the allocation under a tensor


def test_one_call_tells_all_of_an_allocation(driver: Driver) -> None:
    base = driver.alloc(SIZE)
    names = (MEMORY_TYPE, IS_MANAGED, ORDINAL, IPC_CAPABLE, RANGE_START, RANGE_SIZE, MEMORY_POOL)
    assert driver.attributes(base + 1000, *names) == [2, 0, 0, 1, base, SIZE, 0]
    assert driver.address_range(base + 1000) == (base, SIZE)
    driver.free(base)


def test_unknown_memory_reads_as_zeros(driver: Driver) -> None:
    here = ctypes.create_string_buffer(64)
    names = (MEMORY_TYPE, BUFFER_ID, IPC_CAPABLE)
    assert driver.attributes(ctypes.addressof(here), *names) == [0, 0, 0]
    assert driver.attributes(0, *names) == [0, 0, 0]


def test_managed_memory_says_so(driver: Driver) -> None:
    base = driver.out(ctypes.c_uint64, "cuMemAllocManaged", ..., SIZE, 1)
    assert driver.attributes(base, IS_MANAGED) == [1]
    driver.free(base)


def test_freed_memory_has_another_buffer_id(driver: Driver) -> None:
    ids = set()
    same_address = False
    base = 0
    for _ in range(8):
        before, base = base, driver.alloc(SIZE)
        same_address |= base == before
        ids.add(driver.attributes(base, BUFFER_ID)[0])
        driver.free(base)
    assert len(ids) == 8
    assert same_address, "the driver never gave an address again: nothing was tested"


# -- IPC handles


def test_a_peer_reads_through_an_ipc_handle(driver: Driver, peer: Peer) -> None:
    base = driver.alloc(SIZE)
    driver.put(base + 100, b"from the owner")
    mapped = peer.ask(open_ipc, driver.ipc_handle(base))
    assert peer.ask(read, mapped + 100, 14) == b"from the owner"
    peer.ask(close_ipc, mapped)
    driver.free(base)


def test_small_allocations_export_their_own_base(driver: Driver, peer: Peer) -> None:
    bases = [driver.alloc(512) for _ in range(3)]
    for index, base in enumerate(bases):
        driver.put(base, bytes([index]) * 512)
        assert driver.address_range(base)[0] == base
    for index, base in enumerate(bases):
        mapped = peer.ask(open_ipc, driver.ipc_handle(base))
        assert peer.ask(read, mapped, 512) == bytes([index]) * 512
    for base in bases:
        driver.free(base)


def test_opening_twice_gives_the_same_mapping(driver: Driver, peer: Peer) -> None:
    base = driver.alloc(SIZE)
    driver.put(base, b"twice")
    handle = driver.ipc_handle(base)
    mapped = peer.ask(open_ipc, handle)
    assert peer.ask(open_ipc, handle) == mapped
    peer.ask(close_ipc, mapped)
    assert peer.ask(read, mapped, 5) == b"twice"
    peer.ask(close_ipc, mapped)
    driver.free(base)


def test_freed_memory_stays_readable_for_peers(driver: Driver, peer: Peer) -> None:
    base = driver.alloc(SIZE)
    driver.put(base, b"left behind")
    mapped = peer.ask(open_ipc, driver.ipc_handle(base))
    driver.free(base)
    assert peer.ask(read, mapped, 11) == b"left behind"
    peer.ask(close_ipc, mapped)


def test_new_memory_at_an_address_opens_once_the_old_is_closed(driver: Driver, peer: Peer) -> None:
    """And says whether it also opens before: the engine then need not hurry to close."""
    base = driver.alloc(SIZE)
    old = peer.ask(open_ipc, driver.ipc_handle(base))
    driver.free(base)
    again = driver.alloc(SIZE)
    driver.put(again, b"new")
    handle = driver.ipc_handle(again)
    try:
        new = peer.ask(open_ipc, handle)
        print(f"same address: {again == base}; opened beside the old mapping")
    except AssertionError as error:
        print(f"same address: {again == base}; beside the old mapping: {error}")
        peer.ask(close_ipc, old)
        new = peer.ask(open_ipc, handle)
    assert peer.ask(read, new, 3) == b"new"
    driver.free(again)


# -- expandable segments


class Segment:
    """`count` chunks that lie one behind the other in one reservation."""

    def __init__(self, driver: Driver, count: int) -> None:
        self.driver = driver
        self.chunk = max(driver.granularity(), 2 << 20)
        self.count = count
        self.base = driver.reserve(count * self.chunk)
        for index in range(count):
            driver.map(self.at(index), self.chunk, driver.create_chunk(self.chunk))

    def at(self, index: int) -> int:
        return self.base + index * self.chunk

    def remap(self, index: int) -> None:
        """Replaces a chunk by another, at the same address."""
        self.driver("cuMemUnmap", self.at(index), self.chunk)
        self.driver.map(self.at(index), self.chunk, self.driver.create_chunk(self.chunk))

    def close(self) -> None:
        for index in range(self.count):
            self.driver("cuMemUnmap", self.at(index), self.chunk)
        self.driver("cuMemAddressFree", self.base, self.count * self.chunk)


@pytest.fixture
def segment(driver: Driver) -> Iterator[Segment]:
    segment = Segment(driver, 3)
    yield segment
    segment.close()


def test_a_chunk_is_told_apart_from_its_segment(driver: Driver, segment: Segment) -> None:
    middle = segment.at(1)
    assert driver.address_range(middle + 1000) == (middle, segment.chunk)
    names = (MEMORY_TYPE, IPC_CAPABLE, MEMORY_POOL, ORDINAL)
    assert driver.attributes(middle + 1000, *names) == [2, 0, 0, 0]
    assert driver.attributes(middle, HANDLE_TYPES)[0] & 1


def test_a_replaced_chunk_has_other_ids(driver: Driver, segment: Segment) -> None:
    seen = set()
    for _ in range(4):
        seen.add(tuple(driver.attributes(segment.at(1), BUFFER_ID, BLOCK_ID)))
        segment.remap(1)
    print("buffer and block ids of four chunks at one address:", sorted(seen))
    assert len(seen) == 4


def test_a_peer_maps_chunks_by_descriptors(driver: Driver, segment: Segment, peer: Peer) -> None:
    for index in range(3):
        driver.put(segment.at(index), bytes([index + 1]) * 100)
    numbers = [driver.descriptor_of(segment.at(index)) for index in range(3)]
    mapped = peer.ask(map_descriptors, 3, segment.chunk, descriptors=numbers)
    for number in numbers:
        os.close(number)
    for index in range(3):
        assert peer.ask(read, mapped + index * segment.chunk, 100) == bytes([index + 1]) * 100
    # A chunk that the owner has replaced stays what it was for the peer.
    segment.remap(1)
    driver.put(segment.at(1), b"x" * 100)
    assert peer.ask(read, mapped + segment.chunk, 100) == bytes([2]) * 100
    over_the_edge = peer.ask(read, mapped + segment.chunk - 50, 100)
    assert over_the_edge[50:] == bytes([2]) * 50


# -- stream memory operations


def test_a_wait_ends_at_its_value_or_above(driver: Driver, page: Page) -> None:
    stream, event = driver.stream(), driver.event()
    far = (1 << 40) + 1
    driver.operate(stream, wait(page.address(0), far), write(page.address(1), 7))
    driver("cuEventRecord", event, stream)
    page.counters[0] = far - 1
    assert not passes(driver, event, 0.2)
    page.counters[0] = far + 5
    assert passes(driver, event)
    assert page.counters[1] == 7


def test_a_write_follows_the_copies_before_it(driver: Driver, page: Page) -> None:
    """A peer that sees the counter finds the bytes in place."""
    stream = driver.stream()
    source, target = driver.alloc(SIZE), driver.alloc(SIZE)
    for round_ in range(1, 20):
        driver.put(source, bytes([round_]) * SIZE)
        driver("cuMemcpyAsync", target, source, SIZE, stream)
        driver.operate(stream, write(page.address(0), round_))
        while page.counters[0] != round_:
            pass
        other = driver.stream()
        tail = driver.alloc(16)
        driver("cuMemcpyAsync", tail, target + SIZE - 16, 16, other)
        driver("cuStreamSynchronize", other)
        assert driver.get(tail, 16) == bytes([round_]) * 16
        driver.free(tail)
    driver.free(source)
    driver.free(target)


def test_batches_hold_fewer_than_256(driver: Driver, page: Page) -> None:
    stream = driver.stream()
    driver.operate(stream, *(write(page.address(i), i) for i in range(255)))
    driver("cuStreamSynchronize", stream)
    assert list(page.counters[:255]) == list(range(255))
    with pytest.raises(Failed):
        driver.operate(stream, *(write(page.address(i), i) for i in range(256)))


def test_a_batch_of_copies_is_in_stream_order(driver: Driver, page: Page) -> None:
    stream = driver.stream()
    source, target = driver.alloc(SIZE), driver.alloc(SIZE)
    driver.put(source, b"old!" * 4)
    driver.put(target, bytes(16))
    driver.operate(stream, wait(page.address(0), 1))
    driver("cuMemcpyAsync", source + 16, source, 16, stream)
    parts = [(target + i, source + 16 + i, 4) for i in (0, 4, 8, 12)]
    assert driver.copy_batch(stream, *parts) == 0
    driver.operate(stream, write(page.address(8), 1))
    driver.put(source, b"new!" * 4)
    assert page.counters[8] == 0
    page.counters[0] = 1
    driver("cuStreamSynchronize", stream)
    assert page.counters[8] == 1
    assert driver.get(target, 16) == b"new!" * 4
    driver.free(source)
    driver.free(target)


def test_the_default_stream_takes_no_batch_of_copies(driver: Driver) -> None:
    memory = driver.alloc(64)
    assert driver.copy_batch(0, (memory + 32, memory, 8), (memory + 48, memory, 8)) != 0
    driver.free(memory)


def test_a_waiting_stream_holds_no_other(driver: Driver, page: Page, peer: Peer) -> None:
    handle_of = driver.alloc(SIZE)
    waiting = driver.stream(-1)
    driver.operate(waiting, wait(page.address(0), 1))
    held = driver.event()
    driver("cuEventRecord", held, waiting)
    for priority in (0, -1):
        other, event = driver.stream(priority), driver.event()
        driver("cuEventRecord", event, other)
        assert passes(driver, event)
    # Nor what the engine does at such times: exports, pinning, streams.
    driver.ipc_handle(handle_of)
    Page(driver)
    driver.stream()
    assert not driver.passed(held)
    page.counters[0] = 1
    assert passes(driver, held)
    driver.free(handle_of)


def test_a_peer_opens_while_its_stream_waits(driver: Driver, peer: Peer) -> None:
    base = driver.alloc(SIZE)
    driver.put(base, b"open")
    assert peer.ask(open_while_waiting, driver.ipc_handle(base)) == b"open"
    driver.free(base)


def open_while_waiting(driver: Driver, handle: bytes) -> bytes:
    page = Page(driver)
    driver.operate(driver.stream(-1), wait(page.address(0), 1))
    mapped = driver.open_ipc(handle)
    own, other = driver.alloc(4), driver.stream()
    driver("cuMemcpyAsync", own, mapped, 4, other)
    event = driver.event()
    driver("cuEventRecord", event, other)
    assert passes(driver, event)
    page.counters[0] = 1
    return driver.get(own, 4)


def test_closing_while_a_stream_waits_lets_others_enqueue(driver: Driver, peer: Peer) -> None:
    """The group's thread closes peers' memory while its streams wait: the calls that enqueue must
    go on. Whether the closing itself returns before the wait is over is printed."""
    base = driver.alloc(SIZE)
    returned = peer.ask(close_while_waiting, driver.ipc_handle(base))
    print("closing beside a waiting stream", "returns" if returned else "is held up")
    driver.free(base)


def close_while_waiting(driver: Driver, handle: bytes) -> bool:
    page = Page(driver)
    mapped = driver.open_ipc(handle)
    waiting, other = driver.stream(-1), driver.stream()
    driver.operate(waiting, wait(page.address(0), 1))

    def close() -> None:
        driver.enter()
        close_ipc(driver, mapped)

    def enqueue() -> None:
        driver.enter()
        for value in range(10):
            driver.operate(other, write(page.address(1), value))
            driver.operate(waiting, write(page.address(2), value))

    closing, enqueuing = Thread(target=close), Thread(target=enqueue)
    closing.start()
    closing.join(1)
    returned = not closing.is_alive()
    enqueuing.start()
    enqueuing.join(5)
    held = enqueuing.is_alive()
    page.counters[0] = 1
    closing.join()
    enqueuing.join()
    assert not held, "enqueuing is held up by a thread that closes"
    return returned


# -- events


def test_a_wait_keeps_what_an_event_recorded(driver: Driver, page: Page) -> None:
    """So one event can be recorded again as soon as the waits on it are enqueued."""
    first, second, third = driver.stream(), driver.stream(), driver.stream()
    event, end = driver.event(), driver.event()
    driver("cuEventRecord", event, first)
    driver("cuStreamWaitEvent", second, event, 0)
    driver.operate(third, wait(page.address(0), 1))
    driver("cuEventRecord", event, third)
    driver("cuEventRecord", end, second)
    assert passes(driver, end)
    assert not driver.passed(event)
    page.counters[0] = 1
    assert passes(driver, event)


# -- launches

STORE = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 where, .param .u64 what)
{
    .reg .u64 %where, %what;
    ld.param.u64 %where, [where];
    ld.param.u64 %what, [what];
    cvta.to.global.u64 %where, %where;
    st.global.u64 [%where], %what;
    ret;
}
"""


@ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p))
def store(arguments: Any) -> None:
    """The same for the stand-in, whose kernels are functions."""
    where, what = (ctypes.c_uint64.from_address(arguments[i]).value for i in range(2))
    ctypes.c_uint64.from_address(where).value = what


def storing_kernel(driver: Driver) -> int:
    if not hasattr(driver.library, "cuModuleLoadData"):
        return ctypes.cast(store, ctypes.c_void_p).value or 0
    module = driver.out(ctypes.c_void_p, "cuModuleLoadData", ..., STORE)
    return driver.out(ctypes.c_void_p, "cuModuleGetFunction", ..., module, b"store")


def test_a_launch_keeps_its_arguments(driver: Driver, page: Page) -> None:
    """And runs in stream order; pointers behind those that it takes are not looked at."""
    function, stream, event = storing_kernel(driver), driver.stream(), driver.event()
    address = driver.alloc(8)
    driver.put(address, bytes(8))
    words = (ctypes.c_uint64 * 8)(address, 7)
    places = [ctypes.addressof(words) + 8 * i for i in range(8)]
    driver.operate(stream, wait(page.address(0), 1))
    driver(
        "cuLaunchKernel",
        *(function, 1, 1, 1, 1, 1, 1, 0, stream),
        (ctypes.c_void_p * 8)(*places),
        None,
    )
    driver("cuEventRecord", event, stream)
    words[1] = 8
    assert not driver.passed(event)
    page.counters[0] = 1
    assert passes(driver, event)
    assert driver.get(address, 8) == (7).to_bytes(8, "little")
    driver.free(address)


# -- captures


def capture(driver: Driver, meanwhile: Callable[[], None]) -> int:
    """Captures a stream while another thread does something; what ending the capture gives."""
    stream = driver.stream()
    driver("cuStreamBeginCapture_v2", stream, GLOBAL_CAPTURE)
    thread = Thread(target=meanwhile)
    thread.start()
    thread.join()
    graph = ctypes.c_void_p()
    return driver.result("cuStreamEndCapture", stream, ctypes.byref(graph))


def engine_work(driver: Driver, page: Page) -> None:
    """What a gather does; a group's creation, which also pins memory, is not part of it."""
    stream, event = driver.stream(), driver.event()
    driver.operate(stream, write(page.address(0), 1))
    driver("cuEventRecord", event, stream)
    assert passes(driver, event)


def test_relaxed_work_leaves_a_capture_alone(driver: Driver, page: Page) -> None:
    failures: list[Exception] = []

    def meanwhile() -> None:
        try:
            driver.enter()
            with driver.capture_mode(RELAXED_CAPTURE):
                engine_work(driver, page)
        except Exception as error:
            failures.append(error)

    assert capture(driver, meanwhile) == 0
    assert not failures
    assert page.counters[0] == 1


def test_unrelaxed_work_breaks_a_capture(driver: Driver, page: Page) -> None:
    """Why the engine bothers."""

    def meanwhile() -> None:
        driver.enter()
        with pytest.raises(Failed):
            engine_work(driver, page)

    assert capture(driver, meanwhile) != 0


def test_a_stream_says_whether_it_captures(driver: Driver) -> None:
    stream, status = driver.stream(), ctypes.c_int(-1)
    driver("cuStreamIsCapturing", stream, ctypes.byref(status))
    assert status.value == 0
    driver("cuStreamBeginCapture_v2", stream, RELAXED_CAPTURE)
    driver("cuStreamIsCapturing", stream, ctypes.byref(status))
    assert status.value == 1
    # Nobody may ask the default stream meanwhile, or they may: both answers are understood.
    code = driver.result("cuStreamIsCapturing", 0, ctypes.byref(status))
    assert code == CAPTURE_IMPLICIT or (code == 0 and status.value == 0)
    graph = ctypes.c_void_p()
    driver("cuStreamEndCapture", stream, ctypes.byref(graph))


# -- devices


def test_a_whole_device_has_one_uuid(driver: Driver) -> None:
    uuids = []
    for name in ("cuDeviceGetUuid", "cuDeviceGetUuid_v2"):
        uuid = ctypes.create_string_buffer(16)
        driver(name, uuid, 0)
        uuids.append(uuid.raw)
    assert uuids[0] == uuids[1] != bytes(16)


def test_nvlink_has_atomics(driver: Driver) -> None:
    count = driver.out(ctypes.c_int, "cuDeviceGetCount", ...)
    if count < 2:
        pytest.skip("one device")
    ask = functools.partial(driver.out, ctypes.c_int)
    assert ask("cuDeviceCanAccessPeer", ..., 0, 1) == 1
    print("atomics between devices 0 and 1:", ask("cuDeviceGetP2PAttribute", ..., 3, 0, 1))
