"""What the memory or the links can do: a plain copy of the bytes that a collective moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pg_sdma.bench.launch import World
from pg_sdma.bench.measure import Gate, time_calls
from pg_sdma.bench.plot import WORDS
from pg_sdma.bench.table import Row


@dataclass(frozen=True)
class Peak:
    """A plain copy, made by all ranks at the same time."""

    what: str
    size: int  # bytes of the whole output or input that the copy stands for
    seconds: float | None  # None: not measured, and `what` says why

    def shares(self, rows: Sequence[Row]) -> dict[str, float]:
        """The part of its speed that rows of the same size reach, by their place."""
        if self.seconds is None:
            return {}
        return {row.place: self.seconds / row.seconds for row in rows if row.size == self.size}

    def sentence(self, backend: str, rows: Sequence[Row]) -> str:
        """The copy, and what share of its speed the rows of the same size reach."""
        if self.seconds is None:
            return f"peak not measured: {self.what}"
        shares = [f"{share:.0%} {WORDS[place]}" for place, share in self.shares(rows).items()]
        return (
            f"peak: {self.what} takes {self.seconds * 1e6:.2f} us on all ranks at once; of its "
            f"speed {backend} reaches {' and '.join(shares)}"
        )


def measure_peak(
    world: World, size: int, members: int, gate: Gate | None, iterations: int, whole: str
) -> Peak:
    """Times the copy that a collective with `size` bytes of `whole` (output, input) comes down to.

    On CPU that is the whole of it, out of memory of this process. On GPU it is the peers' shares,
    out of the next GPU's memory.
    """
    if world.device.type == "cpu":
        source = torch.ones(size, dtype=torch.uint8)
        what = f"a local copy of the {size} bytes of {whole}"
    elif (gpus := torch.cuda.device_count()) < 2:
        return Peak("this process sees one GPU, and a peer copy needs two", size, None)
    else:
        size_of_peers = size // members * (members - 1)
        neighbour = torch.device("cuda", (world.device.index + 1) % gpus)
        source = torch.ones(size_of_peers, dtype=torch.uint8, device=neighbour)
        torch.cuda.synchronize(neighbour)
        what = f"a copy of the peers' {size_of_peers} bytes from the next GPU"
    target = torch.zeros_like(source, device=world.device)
    times = time_calls([lambda i: target.copy_(source)], world, iterations, 2, gate)[0]
    return Peak(what, size, times.time)
