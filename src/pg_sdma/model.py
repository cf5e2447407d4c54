"""A model, not a measurement, of how direct all-gathers grow with the number of ranks.

Alpha-beta: a call costs each rank's host a fixed time and one for each peer. It costs the device a
fixed time, one for each peer, and the bytes over the bandwidth. docs/scaling.md says what the model
leaves out and what follows from it. Times are in microseconds and bandwidths in GB/s (10^9), so a
GB/s is 1000 bytes a microsecond. Bytes are those of an output over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RANKS = (2, 4, 8, 16, 32, 72)
SIZES = (4 << 20, 64 << 20, 1 << 30)


@dataclass(frozen=True)
class Constant:
    """A number that the model takes from outside."""

    value: float
    unit: str
    meaning: str
    source: str  # a measurement in docs/results.md, or "assumed" and why


CONSTANTS = {
    "python": Constant(
        3.2, "us", "from Python into C++", "measured: What a call costs the host, 12.9 - 9.7"
    ),
    "handshake": Constant(
        0.8,
        "us",
        "publishing, handshake and the rest in C++, 2 ranks that come at once",
        "measured: What a call costs the host, 9.7 - 8.9",
    ),
    "copy_call": Constant(
        5.2, "us", "the driver's call for one copy", "measured: What a call costs the host"
    ),
    "memory_call": Constant(
        1.1,
        "us",
        "the driver's call for a batch of stream memory operations",
        "measured: What a call costs the host, a batch of two",
    ),
    "event_call": Constant(0.25, "us", "an event recorded", "measured: What a call costs the host"),
    "line": Constant(
        0.1, "us", "a cache line from another core", "assumed: the order of a miss within a socket"
    ),
    "lines": Constant(
        5,
        "lines",
        "of the page that a rank's host reads of each peer",
        "counted: three of a record of one tensor, and twice that of its acknowledgement",
    ),
    "alpha": Constant(
        16.0,
        "us",
        "a small gather on the device, 2 ranks",
        "fitted: All-gathers, alone, sdma in place",
    ),
    "peer": Constant(
        3.0,
        "us",
        "that each further peer's wait and copy add on the device",
        "assumed: never measured beyond 2 ranks",
    ),
    "h200": Constant(
        388.0,
        "GB/s",
        "into one H200 by copy engines",
        "fitted: All-gathers, alone, sdma in place",
    ),
    "mi300x_link": Constant(
        48.0,
        "GB/s",
        "of each of the 7 links of an MI300X",
        "assumed: reported; not run on hardware",
    ),
    "nvl72": Constant(
        776.0,
        "GB/s",
        "into one GPU of an NVL72",
        "assumed: nominal 900, times the 388 of nominal 450 of an H200; not run on hardware",
    ),
    "network": Constant(
        50.0, "GB/s", "of one GPU's network card", "assumed: nominal 400 Gb/s; not run on hardware"
    ),
    "queue": Constant(
        1000,
        "entries",
        "that fit behind a waiting stream before enqueuing blocks",
        "measured, roughly: csrc/engine/stream_queue.cpp",
    ),
}


@dataclass(frozen=True)
class Machine:
    """GPUs that reach each other's memory, and maybe hosts full of them."""

    title: str
    ranks: int  # on one host, or in one NVLink domain
    bandwidth: str  # the name of the constant
    mesh: bool = False  # a link to each peer, instead of one into a switch
    hosts: int = 1
    remark: str = ""


MACHINES = {
    "8xh200": Machine("8x H200", 8, "h200"),
    "8xmi300x": Machine(
        "8x MI300X",
        8,
        "mi300x_link",
        mesh=True,
        remark="each peer has a link of its own, so the number of hardware queues over which the "
        "copies are spread matters. ROCm's default is 4 (docs/amd.md). The host's part is CUDA's",
    ),
    "nvl72": Machine(
        "NVL72",
        72,
        "nvl72",
        remark="its 18 trays are hosts of their own, so today the inner carries this group. The "
        "model assumes a page that all of them can reach",
    ),
    "hosts": Machine(
        "4 hosts of 8x H200",
        8,
        "h200",
        hosts=4,
        remark="today the inner carries this group. The model is of two gathers: one over the "
        "network, among the ranks with the same place on their hosts, then a direct one within "
        "each host",
    ),
}


class Model:
    """The formulas, with the constants that are given in place of CONSTANTS."""

    def __init__(self, changes: Mapping[str, float] = {}) -> None:
        """Raises ValueError for a constant that is not there or not above 0."""
        for name, value in changes.items():
            if name not in CONSTANTS:
                raise ValueError(f"{name!r} is none of {', '.join(CONSTANTS)}")
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}, which has to be above 0")
        self.constants = {name: c.value for name, c in CONSTANTS.items()} | dict(changes)

    def source(self, name: str) -> str:
        """Where the value of a constant comes from."""
        given = self.constants[name] != CONSTANTS[name].value
        return "given" if given else CONSTANTS[name].source

    def enqueue(self, ranks: int, pieces: int = 1) -> float:
        """The driver's calls of a gather, `pieces` copies a peer.

        Of a synchronous gather: a batch of memory operations before each peer's copy, one at the
        end, and an event (csrc/transport/schedule/copies.cpp, StreamQueue::run).
        """
        c = self.constants
        copies = (ranks - 1) * pieces
        return c["event_call"] + ranks * c["memory_call"] + copies * c["copy_call"]

    def enqueue_batched(self) -> float:
        """The same if all waits came first, and then one call with all copies (not built)."""
        c = self.constants
        return c["event_call"] + 2 * c["memory_call"] + c["copy_call"]

    def handshake(self, ranks: int) -> float:
        """Publishing and reading every peer's record, where all have come. No skew."""
        c = self.constants
        return c["handshake"] + (ranks - 2) * c["lines"] * c["line"]

    def host(self, ranks: int) -> float:
        """What a call costs a rank's host."""
        return self.constants["python"] + self.handshake(ranks) + self.enqueue(ranks)

    def page_reads(self, ranks: int) -> int:
        """Lines of the page that a call moves, over all ranks: hosts' reads, and devices' waits.

        A device reads each peer's `ready` and `done` once at least.
        """
        return round(ranks * (ranks - 1) * (self.constants["lines"] + 2))

    def calls_ahead(self, ranks: int) -> int:
        """Calls that a host can enqueue before it blocks, while a peer's device is late.

        A call has two writes, two waits a peer and a copy a peer.
        """
        return int(self.constants["queue"] // (3 * ranks - 1))

    def alpha(self, ranks: int) -> float:
        """The device's time of a call without bytes."""
        return self.constants["alpha"] + (ranks - 2) * self.constants["peer"]

    def device(self, machine: Machine, size: int, queues: int = 1) -> float:
        """The device's time of an in-place gather of `size` bytes within one host of `machine`.

        Of several hosts: of the second of two levels, in which a rank pushes to each peer on its
        host what it has of all hosts.

        On a mesh, copies on one queue go over one link after the other; `queues` over so many.
        """
        per_us = self.constants[machine.bandwidth] * 1e3
        shard = size / machine.ranks
        peers = machine.ranks - 1
        in_turn = -(-peers // queues) if machine.mesh else peers
        return self.alpha(machine.ranks) + in_turn * shard / per_us

    def network(self, machine: Machine, size: int) -> float:
        """What a gather's bytes take over the network, each rank's card busy all the time."""
        remote = size * (machine.hosts - 1) / machine.hosts
        return remote / machine.ranks / (self.constants["network"] * 1e3)

    def hidden_from(self, machine: Machine, queues: int = 1) -> int:
        """Bytes from which on a gather takes the device longer than the host.

        Below that a host that makes gathers alone is what limits them.
        """
        wanted = self.host(machine.ranks) - self.alpha(machine.ranks)
        a_byte = self.device(machine, 1, queues) - self.alpha(machine.ranks)
        return max(0, round(wanted / a_byte))


@dataclass(frozen=True)
class Row:
    """One size on one machine. Times in us."""

    machine: str
    way: str  # "", or which of a machine's ways to gather
    size: int
    ranks: int
    network: float
    device: float
    host: float
    alpha: float

    @property
    def busbw(self) -> float:
        """GB/s that arrive at a rank, of network and links one after the other."""
        return self.size * (self.ranks - 1) / self.ranks / (self.network + self.device) / 1e3

    @property
    def longest(self) -> str:
        parts = {
            "network": self.network,
            "bytes": self.device - self.alpha,
            "latency": self.alpha,
            "host": self.host,
        }
        return max(parts, key=lambda name: parts[name])

    def as_json(self) -> dict[str, object]:
        return vars(self) | {"busbw": self.busbw, "longest": self.longest}


def rows_of(model: Model, names: Sequence[str], sizes: Sequence[int]) -> list[Row]:
    """Every size on every machine; on a mesh with one queue, with ROCm's four, with one a peer."""
    rows = []
    for name in names:
        machine = MACHINES[name]
        ways = {"": 1}
        if machine.mesh:
            ways = {"one queue": 1, "4 queues": 4, "a queue a peer": machine.ranks - 1}
        for way, queues in ways.items():
            for size in sizes:
                host = model.host(machine.ranks)
                if machine.hosts > 1:  # a column's shards lie apart in the output
                    host += model.enqueue(machine.ranks, machine.hosts)
                    host -= model.enqueue(machine.ranks)
                rows.append(
                    Row(
                        machine=machine.title,
                        way=way,
                        size=size,
                        ranks=machine.ranks * machine.hosts,
                        network=model.network(machine, size),
                        device=model.device(machine, size, queues),
                        host=host,
                        alpha=model.alpha(machine.ranks),
                    )
                )
    return rows
