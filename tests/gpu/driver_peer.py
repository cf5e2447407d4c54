"""A peer of a device: another process with the same or the next device, that answers requests."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from cuda_driver import Driver, Failed


def passes(driver: Driver, event: int, seconds: float = 5.0) -> bool:
    """Whether an event passes, given some time."""
    end = time.monotonic() + seconds
    while not driver.passed(event):
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


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


def open_ipc(driver: Driver, handle: bytes) -> int:
    return driver.open_ipc(handle)


def close_ipc(driver: Driver, base: int) -> None:
    driver("cuIpcCloseMemHandle", base)


def read(driver: Driver, address: int, size: int) -> bytes:
    """Reads through memory of the peer's own, as a pull does."""
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
