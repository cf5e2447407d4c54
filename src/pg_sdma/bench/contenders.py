"""Ways to gather that are measured beside each other."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pg_sdma.bench.all_gather import gather, gathered
from pg_sdma.bench.buffers import ALIGNMENT, Arena, Case, differing, make_buffers
from pg_sdma.bench.launch import World


@dataclass(frozen=True)
class Gathers:
    """All-gathers of one case, over buffers in turn."""

    own: list[Tensor]  # (count,): what call i sends is own[i % len(own)]
    # Gathers; returns the output of (ranks * count,), which is there for the current stream.
    call: Callable[[int], Tensor]
    moves_peers_data: bool = True  # False: bytes of the same number, which nobody checks


class Contender(Protocol):
    """One way to gather among all ranks."""

    @property
    def name(self) -> str: ...

    @property
    def places(self) -> tuple[str, ...]:
        """ "in" place, "out" of place, or both."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Whose routes are counted, if any."""

    def prepare(self, case: Case, wanted: int) -> Gathers:
        """Gathers over `wanted` buffers in turn, or as many as there is room for."""

    def close(self) -> None:
        """Gives back what only all ranks together can. The device is idle then."""


# Sets a contender up, and yields wherever all ranks have to have come before one may go on.
SetUp = Generator[None, None, Contender]


@dataclass(frozen=True)
class Room:
    """Memory that a contender needs, in bytes, at any one time."""

    whole: int  # outputs
    shards: int  # inputs


@dataclass(frozen=True)
class OverGroup:
    """`all_gather_into_tensor` over a process group."""

    name: str
    group: dist.ProcessGroup
    whole: Arena
    shards: Arena
    places: tuple[str, ...] = ("in", "out")

    def prepare(self, case: Case, wanted: int) -> Gathers:
        made = make_buffers(case, self.whole, self.shards, wanted)

        def call(i: int) -> Tensor:
            buffers = made[i % len(made)]
            gather(buffers, self.group)
            return buffers.whole[0]

        return Gathers([buffers.shards[0] for buffers in made], call)

    def close(self) -> None:
        pass


def over_group(name: str, backend: str, world: World, room: Room) -> SetUp:
    """A contender over `backend`, in memory of torch's own allocator."""
    group = world.group(backend)
    yield
    return OverGroup(name, group, Arena(room.whole, world.device), Arena(room.shards, world.device))


@dataclass(frozen=True)
class PeerCopy:
    """No gather: copies as many bytes as one moves, from the next GPU, and waits for no rank."""

    name: str
    whole: Arena
    source: Tensor  # on the next GPU, of uint8
    places: tuple[str, ...] = ("in",)
    group: None = None

    def prepare(self, case: Case, wanted: int) -> Gathers:
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

        return Gathers([buffers.shards[0] for buffers in made], call, moves_peers_data=False)

    def close(self) -> None:
        pass


def peer_copy(world: World, room: Room) -> SetUp:
    """The copy that an in-place gather comes down to. Raises RuntimeError without a next GPU."""
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
    """For outputs of `largest` bytes one at a time, or for `at_least` bytes of smaller ones."""
    whole = max(largest, at_least) + ALIGNMENT
    return Room(whole, whole // ranks + ALIGNMENT)


def count_wrong(case: Case, gathers: Gathers) -> int | None:
    """Gathers known bytes into an output that is wrong everywhere; the elements still wrong.

    None where the contender moves other bytes.
    """
    if not gathers.moves_peers_data:
        gathers.call(0)
        return None
    output = gathers.call(0)
    expected = gathered(case, 0, output.device)
    output.view(torch.uint8).copy_(~expected)
    start = case.rank * case.shard_bytes
    gathers.own[0].view(torch.uint8).copy_(expected[start : start + case.shard_bytes])
    return differing(gathers.call(0), expected.view(case.dtype))
