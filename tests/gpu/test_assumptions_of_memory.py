"""What the engine and its stand-in take for granted of CUDA's memory and devices, asked of them.

tests/standin/ASSUMPTIONS.md lists each assumption with its test. With two devices, peers are on the
second one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator

import pytest
from cuda_driver import (
    BLOCK_ID,
    BUFFER_ID,
    HANDLE_TYPES,
    IPC_CAPABLE,
    IS_MANAGED,
    MEMORY_POOL,
    MEMORY_TYPE,
    ORDINAL,
    RANGE_SIZE,
    RANGE_START,
    Driver,
)
from driver_peer import Peer, close_ipc, map_descriptors, open_ipc, read

pytest_plugins = ("driver_fixtures",)
pytestmark = pytest.mark.gpu

SIZE = 4 << 20


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


def test_a_chunks_range_is_its_reservation(driver: Driver) -> None:
    chunk = driver.granularity()
    base = driver.reserve(4 * chunk)
    driver.map(base + chunk, chunk, driver.create_chunk(chunk))
    assert driver.attributes(base + chunk, RANGE_START, RANGE_SIZE) == [base, 4 * chunk]
    driver("cuMemUnmap", base + chunk, chunk)
    driver("cuMemAddressFree", base, 4 * chunk)


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
