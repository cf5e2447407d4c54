"""How fast two GPUs copy from each other at once: by reads, by writes, or one of them by both.

    python benchmarks/gpu/copies.py

One process drives both GPUs, so no handshake is in it. A read is enqueued on a stream of the GPU
that gets the bytes; a write on one of the GPU that has them, as an all-gather's copies are. Several
streams take a part of the bytes each. "one" is an all-gather for which a rank was late: the first
GPU writes on one stream and reads on another, and the second does nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))

from cuda_driver import Driver

SIZES = (1 << 20, 8 << 20, 64 << 20, 512 << 20)  # bytes, in each direction
STREAMS = (1, 2, 3)
CALLS = 8  # back to back
DEVICES = (0, 1)
READ, WRITE, ONE = "read", "write", "one"


class Copies:
    """Copies of `size` bytes in both directions, in equal parts on `streams` streams a GPU."""

    def __init__(self, driver: Driver, size: int, streams: int, way: str) -> None:
        self._driver = driver
        self._streams = {d: [torch.cuda.Stream(d) for _ in range(streams)] for d in DEVICES}
        self._memory = {
            d: [torch.zeros(size, dtype=torch.uint8, device=d) for _ in range(2)] for d in DEVICES
        }
        self._part = size if way == ONE else size // streams
        self._way = way
        for d in DEVICES:  # turns on peer access
            self._memory[d][1].copy_(self._memory[1 - d][0])

    def enqueue(self, device: int) -> None:
        """On the streams of `device`, whose context must be current."""
        if self._way == ONE and device != 0:
            return
        for i, stream in enumerate(self._streams[device]):
            write = self._way == WRITE or (self._way == ONE and i == 0)
            to, source = (1 - device, device) if write else (device, 1 - device)
            offset = 0 if self._way == ONE else i * self._part
            self._driver(
                "cuMemcpyAsync",
                self._memory[to][1].data_ptr() + offset,
                self._memory[source][0].data_ptr() + offset,
                self._part,
                stream.cuda_stream,
            )

    def seconds(self) -> float:
        """Of one copy, the slower direction's."""
        marks = {d: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for d in DEVICES}
        gate = {d: torch.cuda.Stream(d) for d in DEVICES}
        for d in DEVICES:
            torch.cuda.synchronize(d)
        for d in DEVICES:
            with torch.cuda.device(d), torch.cuda.stream(gate[d]):
                torch.cuda._sleep(2_000_000)  # a millisecond: enough to enqueue all
                marks[d][0].record()
                for stream in self._streams[d]:
                    stream.wait_stream(gate[d])
        for _ in range(CALLS):
            for d in DEVICES:
                with torch.cuda.device(d):
                    self.enqueue(d)
        for d in DEVICES:
            with torch.cuda.device(d), torch.cuda.stream(gate[d]):
                for stream in self._streams[d]:
                    gate[d].wait_stream(stream)
                marks[d][1].record()
        for d in DEVICES:
            torch.cuda.synchronize(d)
        return max(begin.elapsed_time(end) for begin, end in marks.values()) / CALLS / 1e3


def measure(driver: Driver, rounds: int) -> None:
    ways = [(way, streams) for way in (READ, WRITE) for streams in STREAMS] + [(ONE, 2)]
    names = [f"{way} {streams}" for way, streams in ways]
    print("  size (B)" + "".join(f"{name:>10}" for name in names) + "   GB/s, by streams")
    for size in SIZES:
        copies = [Copies(driver, size, streams, way) for way, streams in ways]
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(rounds):
            for samples, copy in zip(times, copies, strict=True):
                samples.append(copy.seconds())
        rates = (size / statistics.median(samples[1:]) / 1e9 for samples in times)
        print(f"{size:10}" + "".join(f"{rate:10.1f}" for rate in rates), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="the first is not counted")
    options = parser.parse_args()
    if torch.cuda.device_count() < len(DEVICES):
        raise SystemExit("copies.py needs two GPUs")
    driver = Driver()
    torch.cuda.set_device(0)
    print(f"2 x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    measure(driver, options.rounds)


if __name__ == "__main__":
    main()
