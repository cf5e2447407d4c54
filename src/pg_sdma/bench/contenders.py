"""Ways to do a collective, to be measured beside each other."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pg_sdma.bench import all_gather
from pg_sdma.bench.buffers import ALIGNMENT, Arena, Case, differing, make_buffers
from pg_sdma.bench.launch import World
from pg_sdma.bench.operation import Operation


@dataclass(frozen=True)
class Calls:
    """Collectives of one case, all-gathers if nothing else is said, over buffers in turn."""

    own: list[Tensor]  # what call i gives is own[i % len(own)]: of a gather (count,)
    # Returns the output, of a gather (ranks * count,), which is there for the current stream.
    call: Callable[[int], Tensor]
    # None: it moves other bytes of the same number, which nobody checks.
    operation: Operation | None = all_gather.OPERATION


class Contender(Protocol):
    """One way to do a collective among all ranks."""

    @property
    def name(self) -> str: ...

    @property
    def places(self) -> tuple[str, ...]:
        """ "in" place, "out" of place, or both."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Whose routes are counted, if any."""

    def prepare(self, case: Case, wanted: int) -> Calls:
        """Calls over `wanted` buffers in turn, or as many as there is room for."""

    def close(self) -> None:
        """Gives back what only all ranks together can. The device is idle then."""


# Sets a contender up, and yields wherever all ranks have to have come before one may go on.
SetUp = Generator[None, None, Contender]


@dataclass(frozen=True)
class Room:
    """Memory that a contender needs, in bytes, at any one time."""

    whole: int  # a gather's outputs, a reduce-scatter's inputs
    shards: int  # the other


@dataclass(frozen=True)
class OverGroup:
    """torch.distributed's call over a process group."""

    name: str
    group: dist.ProcessGroup
    whole: Arena
    shards: Arena
    places: tuple[str, ...] = ("in", "out")
    operation: Operation = all_gather.OPERATION

    def prepare(self, case: Case, wanted: int) -> Calls:
        made = make_buffers(case, self.whole, self.shards, wanted)

        def call(i: int) -> Tensor:
            buffers = made[i % len(made)]
            self.operation.call(buffers, self.group)
            return self.operation.outputs(buffers)[0]

        own = [self.operation.inputs(buffers)[0] for buffers in made]
        return Calls(own, call, self.operation)

    def close(self) -> None:
        pass


def over_group(name: str, backend: str, operation: Operation, world: World, room: Room) -> SetUp:
    """A contender over `backend`, in memory of torch's own allocator."""
    group = world.group(backend)
    yield
    whole, shards = (Arena(size, world.device) for size in (room.whole, room.shards))
    return OverGroup(name, group, whole, shards, operation=operation)


@dataclass(frozen=True)
class PeerCopy:
    """No collective: copies as many bytes as one moves, from the next GPU; waits for no rank."""

    name: str
    whole: Arena
    source: Tensor  # on the next GPU, of uint8
    places: tuple[str, ...] = ("in",)
    group: None = None

    def prepare(self, case: Case, wanted: int) -> Calls:
        made = make_buffers(case, self.whole, self.whole, wanted)
        source = self.source[: case.size - case.shard_bytes].view(case.dtype)
        before = case.rank * case.count

        def call(i: int) -> Tensor:
            output = made[i % len(made)].whole[0]
            for to, part in (
                (output[:before], source[:before]),
                (output[before + case.count :], source[before:]),
            ):
                if len(to):
                    to.copy_(part)
            return output

        return Calls([buffers.shards[0] for buffers in made], call, operation=None)

    def close(self) -> None:
        pass


def peer_copy(world: World, room: Room) -> SetUp:
    """The copy that a collective in place comes down to. Raises RuntimeError without a next GPU."""
    gpus = torch.cuda.device_count()
    if world.device.type != "cuda" or gpus < 2:
        raise RuntimeError("a copy from another GPU needs one, and this process sees none")
    neighbour = torch.device("cuda", (world.device.index + 1) % gpus)
    if not torch.cuda.can_device_access_peer(world.device, neighbour):
        raise RuntimeError(f"{world.device} does not reach the memory of {neighbour}")
    yield
    source = torch.ones(room.whole, dtype=torch.uint8, device=neighbour)
    torch.cuda.synchronize(neighbour)
    return PeerCopy("peer copy", Arena(room.whole, world.device), source)


def room_for(largest: int, ranks: int, at_least: int = 0) -> Room:
    """For `largest` bytes of all shards at a time, or for `at_least` bytes of smaller ones."""
    whole = max(largest, at_least) + ALIGNMENT
    return Room(whole, whole // ranks + ALIGNMENT)


def count_wrong(case: Case, calls: Calls) -> int | None:
    """Calls with known bytes, the output wrong everywhere before; the elements that still are.

    None where the contender moves other bytes.
    """
    output = calls.call(0)
    if calls.operation is None:
        return None
    expected = calls.operation.make_known(case, 0, calls.own[0], output)
    return differing(calls.call(0), expected)
