"""What a stream that waits does to the other streams of a process, where those are many.

Streams share a device's hardware queues (CUDA_DEVICE_MAX_CONNECTIONS of them, 8 by default), and in
a queue a wait holds up what comes behind it. Which streams share one is for the device to say.
"""

from __future__ import annotations

import math
import time

import pytest
from cuda_driver import Driver, Page, wait, write
from driver_peer import Peer

pytest_plugins = ("driver_fixtures",)
pytestmark = pytest.mark.gpu

CONNECTIONS = 8
PRIORITIES = (0, -5, -1, -2)  # what is out of a device's range is its nearest
SETTLED = 0.5  # seconds without another stream that has gone on
PATIENCE = 10.0


@pytest.mark.parametrize("count", [64, 130])
def test_waiting_streams_hold_no_more_than_share_their_queues(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Of `count` streams of mixed priorities one waits, then a ninth of them, then half.

    All end once the value is there. A gather counts on no more: what a late rank needs of its peers
    may be enqueued on their other streams behind it (docs/architecture.md, "When a rank is late"),
    and how many of those are held is printed, for it is the device's.
    """
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", str(CONNECTIONS))
    peer = Peer(driver)  # only a process that starts with it heeds the variable
    try:
        for every in (count, 9, 2):
            held, waiting = peer.ask(count_held, count, every)
            print(f"{count} streams, {waiting} of them wait: {held} others are held")
            assert held <= waiting * (math.ceil(count / CONNECTIONS) - 1)
    finally:
        peer.close()


def count_held(driver: Driver, count: int, every: int) -> tuple[int, int]:
    """Of `count` streams every `every`-th waits for a value that comes late.

    Returns how many of the others have not done their work before it came, and how many waited.
    Raises AssertionError where a stream is held for good.
    """
    page = Page(driver)
    gate = page.address(0)
    streams = [driver.stream(PRIORITIES[index % len(PRIORITIES)]) for index in range(count)]
    events = [driver.event() for _ in streams]
    waits = [index % every == every // 2 for index in range(count)]
    source, target = driver.alloc(8), driver.alloc(8 * count)
    driver.put(source, b"arrived!")
    driver.put(target, bytes(8 * count))

    def left(which: bool) -> int:
        pairs = zip(events, waits, strict=True)
        return sum(not driver.passed(event) for event, waiting in pairs if waiting is which)

    try:
        # All waits first: whoever shares a queue with one is behind it.
        for index, stream in enumerate(streams):
            if waits[index]:
                make_wait(driver, stream, gate, narrow=index % 4 < 2)
        for index, stream in enumerate(streams):
            driver("cuMemcpyAsync", target + 8 * index, source, 8, stream)
            driver.operate(stream, write(page.address(1 + index), 1))
            driver("cuEventRecord", events[index], stream)
        held, since = left(False), time.monotonic()
        while held and time.monotonic() < since + SETTLED:
            if (now := left(False)) < held:
                held, since = now, time.monotonic()
            time.sleep(0.001)
        assert left(True) == sum(waits), "a stream does not wait"
        page.counters[0] = 1
        until = time.monotonic() + PATIENCE
        while left(True) + left(False):
            assert time.monotonic() < until, f"{left(False)} streams are held for good"
            time.sleep(0.001)
        assert list(page.counters[1 : 1 + count]) == [1] * count
        assert driver.get(target, 8 * count) == b"arrived!" * count
    finally:
        page.counters[0] = 1  # Page.close() ends only waits for 64 bits
        for stream, event in zip(streams, events, strict=True):
            driver("cuStreamSynchronize", stream)
            driver("cuStreamDestroy_v2", stream)
            driver("cuEventDestroy_v2", event)
            driver.streams.remove(stream)
        driver.free(source)
        driver.free(target)
        page.close()
    return held, sum(waits)


def make_wait(driver: Driver, stream: int, gate: int, narrow: bool) -> None:
    """Makes a stream wait until the counter at `gate` is 1; of 32 bits where that is asked for, and
    the library, which may be the stand-in, has such waits."""
    if narrow and hasattr(driver.library, "cuStreamWaitValue32_v2"):
        driver("cuStreamWaitValue32_v2", stream, gate, 1, 0)
    else:
        driver.operate(stream, wait(gate, 1))
