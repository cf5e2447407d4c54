"""How fast two GPUs copy from each other: by reads, by writes, or by both on one of them.

    python benchmarks/gpu/copies.py

A read is enqueued on a stream of the GPU that gets the bytes. A write is enqueued on one of the GPU
that has them, as an all-gather's copies are. There is no handshake. It prints two tables of rates.

First table: one GPU copies and the other does nothing. It writes, it reads, or, "one", it writes on
one stream and reads on another, as the late rank of an all-gather does. The other GPU's memory is
another process's, opened by its IPC handle as ranks open each other's, and then the same process's.
Where both directions share an engine, "one" takes the time of two writes.

Second table: one process has both GPUs copy from each other at once, and several streams take a
part of the bytes each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))

from cuda_driver import Driver
from driver_peer import Peer, close_ipc

SIZES = (1 << 20, 8 << 20, 64 << 20, 512 << 20)  # bytes, in each direction
STREAMS = (1, 2, 3)
CALLS = 8  # back to back
DEVICES = (0, 1)
READ, WRITE, ONE = "read", "write", "one"
ALONE = (WRITE, READ, ONE)


class Memory(NamedTuple):
    """Addresses on one GPU."""

    source: int  # where copies come from
    output: int  # where they go to


class Copy(NamedTuple):
    """`size` bytes, on a stream of a GPU that copies."""

    stream: int
    to: int
    source: int
    size: int


def plan(way: str, streams: int, size: int, own: Memory, other: Memory) -> list[Copy]:
    """What the GPU enqueues whose memory is `own`: `size` bytes in each direction that it makes."""
    if way == ONE:
        return [Copy(0, other.output, own.source, size), Copy(1, own.output, other.source, size)]
    to, source = (other.output, own.source) if way == WRITE else (own.output, other.source)
    part = size // streams
    return [Copy(i, to + i * part, source + i * part, part) for i in range(streams)]


class Copies:
    """By device, what it copies."""

    def __init__(self, driver: Driver, plans: Mapping[int, Sequence[Copy]]) -> None:
        self._driver = driver
        self._plans = plans
        self._streams = {d: [torch.cuda.Stream(d) for _ in plan] for d, plan in plans.items()}

    def _enqueue(self, device: int) -> None:
        with torch.cuda.device(device):
            for copy in self._plans[device]:
                stream = self._streams[device][copy.stream].cuda_stream
                self._driver("cuMemcpyAsync", copy.to, copy.source, copy.size, stream)

    def seconds(self) -> float:
        """Of all copies once, on the slower device."""
        marks = {d: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for d in self._plans}
        gate = {d: torch.cuda.Stream(d) for d in self._plans}
        for d in self._plans:
            torch.cuda.synchronize(d)
        for d in self._plans:
            with torch.cuda.device(d), torch.cuda.stream(gate[d]):
                torch.cuda._sleep(2_000_000)  # a millisecond: enough to enqueue all
                marks[d][0].record()
                for stream in self._streams[d]:
                    stream.wait_stream(gate[d])
        for _ in range(CALLS):
            for d in self._plans:
                self._enqueue(d)
        for d in self._plans:
            with torch.cuda.device(d), torch.cuda.stream(gate[d]):
                for stream in self._streams[d]:
                    gate[d].wait_stream(stream)
                marks[d][1].record()
        for d in self._plans:
            torch.cuda.synchronize(d)
        return max(begin.elapsed_time(end) for begin, end in marks.values()) / CALLS / 1e3


def rates(size: int, copies: Sequence[Copies], rounds: int) -> list[float]:
    """GB/s in each direction of each of `copies`, measured in turn."""
    times: list[list[float]] = [[] for _ in copies]
    for _ in range(rounds):
        for samples, copy in zip(times, copies, strict=True):
            samples.append(copy.seconds())
    return [size / statistics.median(samples[1:]) / 1e9 for samples in times]


def export(driver: Driver, size: int) -> list[bytes]:
    """IPC handles of two new blocks of `size` bytes, for a Memory. A peer's process answers it."""
    return [driver.ipc_handle(driver.alloc(size)) for _ in Memory._fields]


@contextmanager
def of_another_process(driver: Driver, size: int) -> Iterator[Memory]:
    """Memory on the next GPU that another process owns, as long as the block is."""
    peer = Peer(driver)
    try:
        opened = [driver.open_ipc(handle) for handle in peer.ask(export, size)]
        yield Memory(*opened)
        for base in opened:
            close_ipc(driver, base)
    finally:
        peer.close()


def of_tensors(tensors: Sequence[torch.Tensor]) -> Memory:
    return Memory(*(tensor.data_ptr() for tensor in tensors))


def alone(driver: Driver, own: Memory, other: Memory, rounds: int) -> dict[int, list[float]]:
    """Size -> the rates of ALONE, where only the first GPU copies."""
    return {
        size: rates(
            size, [Copies(driver, {0: plan(way, 1, size, own, other)}) for way in ALONE], rounds
        )
        for size in SIZES
    }


def table_of_one(by_process: Mapping[str, Mapping[int, Sequence[float]]]) -> list[str]:
    """Rates of ALONE, and how many times a write's time "one" takes. By whose the memory is."""
    lines = ["one GPU copies, memory on the other is"]
    for words, by_size in by_process.items():
        lines.append(f"{words}, GB/s in each direction")
        lines.append("  size (B)" + "".join(f"{way:>10}" for way in ALONE) + "   one takes")
        for size, (write, read, one) in by_size.items():
            cells = "".join(f"{rate:10.1f}" for rate in (write, read, one))
            lines.append(f"{size:10}{cells}{write / one:6.2f} writes")
    return lines


def measure_both(driver: Driver, memory: Mapping[int, Memory], rounds: int) -> None:
    """Prints the rates of both GPUs at once."""
    ways = [(way, streams) for way in (READ, WRITE) for streams in STREAMS]
    print("both GPUs copy at once, of one process, GB/s in each direction, by streams")
    print("  size (B)" + "".join(f"{way + ' ' + str(n):>10}" for way, n in ways))
    for size in SIZES:
        copies = [
            Copies(
                driver,
                {d: plan(way, streams, size, memory[d], memory[1 - d]) for d in DEVICES},
            )
            for way, streams in ways
        ]
        found = rates(size, copies, rounds)
        print(f"{size:10}" + "".join(f"{rate:10.1f}" for rate in found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="the first is not counted")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: give 2 or more, for the first is not counted")
    if torch.cuda.device_count() < len(DEVICES):
        raise SystemExit("copies.py needs two GPUs")
    driver = Driver()
    torch.cuda.set_device(0)
    print(f"2 x {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)

    def allocate(device: int) -> list[torch.Tensor]:
        return [torch.zeros(SIZES[-1], dtype=torch.uint8, device=device) for _ in Memory._fields]

    # First, while this process has no context on the other GPU, as a rank has none.
    tensors = {0: allocate(0)}
    with of_another_process(driver, SIZES[-1]) as other:
        theirs = alone(driver, of_tensors(tensors[0]), other, options.rounds)
    tensors[1] = allocate(1)
    for d in DEVICES:  # turns on peer access
        tensors[d][1].copy_(tensors[1 - d][0])
    memory = {d: of_tensors(tensors[d]) for d in DEVICES}
    ours = alone(driver, memory[0], memory[1], options.rounds)
    by_process = {"another process's, opened by IPC handle": theirs, "of the same process": ours}
    print("\n".join(table_of_one(by_process)), flush=True)
    measure_both(driver, memory, options.rounds)


if __name__ == "__main__":
    main()
