"""Where the flags of a handshake lie best: on a host page, or in the memory of the GPU that waits.

    python benchmarks/gpu/flags.py

One process drives both GPUs. Each step is that of a two-rank all-gather: tell the peer that one is
ready, wait for it, push a shard, tell the peer that it is there, wait for the peer's. On the host
page a rank writes a flag once for all its peers. In GPU memory it writes one for each, over NVLink.
It prints the device's time of a step. The steps lie behind a gate, so the host's time is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))

from cuda_driver import Driver, Page, wait, write

SIZES = (4 << 10, 256 << 10, 4 << 20)  # bytes of a shard
STEPS = 50  # back to back: what fits behind a gate
DEVICES = (0, 1)
READY, DONE = 0, 1  # a device's counters

# The address at which a device waits for its peer, by device and index.
Places = Callable[[int, int], int]


def on_a_page(drivers: Mapping[int, Driver]) -> Places:
    """Counters on a host page that both devices see, a cache line each."""
    page = Page(drivers[0])  # kept by its driver
    return lambda device, index: page.address(8 * (len(DEVICES) * index + device))


def in_gpu_memory(_: Mapping[int, Driver]) -> Places:
    """Counters in the memory of the device that waits."""
    memory = {d: torch.zeros(64, dtype=torch.int64, device=d) for d in DEVICES}
    return lambda device, index: memory[device][8 * index].data_ptr()


WAYS = {"host page": on_a_page, "GPU memory": in_gpu_memory}


class Steps:
    """Steps that push `size` bytes each way, with flags at `places`."""

    def __init__(self, drivers: Mapping[int, Driver], places: Places, size: int) -> None:
        self._drivers = drivers
        self._places = places
        self._size = size
        self._memory = {
            d: [torch.zeros(size, dtype=torch.uint8, device=d) for _ in range(2)] for d in DEVICES
        }
        for d in DEVICES:  # turns on peer access
            self._memory[d][1].copy_(self._memory[1 - d][0])
        self._streams = {d: torch.cuda.Stream(d) for d in DEVICES}
        self._number = 0

    def enqueue(self, device: int, number: int) -> None:
        """On the stream of `device`, whose context must be current."""
        driver, other = self._drivers[device], 1 - device
        stream = self._streams[device].cuda_stream

        def tell_and_wait(index: int) -> None:
            told, heard = self._places(other, index), self._places(device, index)
            driver.operate(stream, write(told, number), wait(heard, number))

        tell_and_wait(READY)
        target, origin = self._memory[other][1].data_ptr(), self._memory[device][0].data_ptr()
        driver("cuMemcpyAsync", target, origin, self._size, stream)
        tell_and_wait(DONE)

    def seconds(self) -> float:
        """Of one step, the slower device's."""
        marks = {d: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for d in DEVICES}
        for d in DEVICES:
            torch.cuda.synchronize(d)
        for d in DEVICES:
            with torch.cuda.device(d), torch.cuda.stream(self._streams[d]):
                torch.cuda._sleep(8_000_000)  # some milliseconds: enough to enqueue all
                marks[d][0].record()
        first = self._number + 1
        self._number += STEPS
        for d in DEVICES:
            with torch.cuda.device(d):
                for number in range(first, first + STEPS):
                    self.enqueue(d, number)
                marks[d][1].record(self._streams[d])
        for d in DEVICES:
            torch.cuda.synchronize(d)
        return max(begin.elapsed_time(end) for begin, end in marks.values()) / STEPS / 1e3


def measure(rounds: int) -> None:
    drivers = {d: Driver(d) for d in DEVICES}
    print("shard (B)" + "".join(f"{name:>14}" for name in WAYS) + "   us a step")
    for size in SIZES:
        steps = [Steps(drivers, places(drivers), size) for places in WAYS.values()]
        times: list[list[float]] = [[] for _ in steps]
        for _ in range(rounds):
            for samples, step in zip(times, steps, strict=True):
                samples.append(step.seconds())
        cells = (statistics.median(samples[1:]) * 1e6 for samples in times)
        print(f"{size:9}" + "".join(f"{cell:14.2f}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="the first is not counted")
    options = parser.parse_args()
    if torch.cuda.device_count() < len(DEVICES):
        raise SystemExit("flags.py needs two GPUs")
    print(f"2 x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    measure(options.rounds)


if __name__ == "__main__":
    main()
