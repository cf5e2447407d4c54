"""What the engine and its stand-in take for granted of CUDA's streams, asked of the device itself.

tests/standin/ASSUMPTIONS.md lists each assumption with its test. With two devices, peers are on the
second one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from multiprocessing import reduction
from threading import Thread
from typing import Any

import pytest
from cuda_driver import (
    CAPTURE_IMPLICIT,
    GLOBAL_CAPTURE,
    RELAXED_CAPTURE,
    Driver,
    Failed,
    Page,
    wait,
    write,
)
from driver_peer import Peer, close_ipc, map_descriptors, passes

pytest_plugins = ("driver_fixtures",)
pytestmark = pytest.mark.gpu

SIZE = 4 << 20


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


def test_a_peers_copies_come_before_the_counter_behind_them(
    driver: Driver, page: Page, peer: Peer
) -> None:
    """A stream that waits for the counter finds what the peer has pushed, to the last byte."""
    target, tail, stream = driver.alloc(SIZE), driver.alloc(16), driver.stream()
    mapped = peer.ask(share_page, driver.ipc_handle(target), descriptors=[page.file])
    for round_ in range(1, 20):
        driver.put(target, bytes(SIZE))
        event = driver.event()
        driver.operate(stream, wait(page.address(0), round_))
        driver("cuMemcpyAsync", tail, target + SIZE - 16, 16, stream)
        driver("cuEventRecord", event, stream)
        assert not driver.passed(event)
        peer.ask(push, mapped, round_)
        assert passes(driver, event)
        assert driver.get(tail, 16) == bytes([round_]) * 16
    driver.free(target)
    driver.free(tail)


def share_page(driver: Driver, handle: bytes) -> int:
    Page(driver, reduction.recv_handle(driver.pipe))
    return driver.open_ipc(handle)


def push(driver: Driver, mapped: int, value: int) -> None:
    source, stream = driver.alloc(SIZE), driver.stream()
    driver.put(source, bytes([value]) * SIZE)
    driver("cuMemcpyAsync", mapped, source, SIZE, stream)
    driver.operate(stream, write(driver.pages[-1].address(0), value))
    driver("cuStreamSynchronize", stream)
    driver.free(source)


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


def test_unmapping_chunks_waits_for_nothing(driver: Driver, peer: Peer) -> None:
    chunk = driver.granularity()
    base = driver.reserve(chunk)
    driver.map(base, chunk, driver.create_chunk(chunk))
    number = driver.descriptor_of(base)
    peer.ask(unmap_while_waiting, chunk, descriptors=[number])
    os.close(number)
    driver("cuMemUnmap", base, chunk)
    driver("cuMemAddressFree", base, chunk)


def unmap_while_waiting(driver: Driver, chunk: int) -> None:
    page = Page(driver)
    mapped = map_descriptors(driver, 1, chunk)
    driver.operate(driver.stream(-1), wait(page.address(0), 1))
    ended = []

    def unmap() -> None:
        driver.enter()
        driver("cuMemUnmap", mapped, chunk)
        driver("cuEventDestroy_v2", driver.event())
        ended.append(True)

    unmapping = Thread(target=unmap, daemon=True)
    unmapping.start()
    unmapping.join(5)
    held = not ended
    page.counters[0] = 1
    unmapping.join()
    driver("cuMemAddressFree", mapped, chunk)
    assert not held, "unmapping is held up by a stream that waits"


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
