"""Ranks with the stand-in for mori: tests/fake_mori."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from harness import new_store, run_ranks

FAKE = Path(__file__).parents[1] / "fake_mori"
LEAST = 1 << 17  # bytes of buffers: with 3 ranks, chunks of 12 KiB
RANKS = 3
MORI = {
    "PG_SDMA_TRANSPORT": "mori",
    "PG_SDMA_MORI_ON_CPU": "1",
    "PG_SDMA_MORI_BYTES": str(LEAST),
}


def use_fake_mori() -> None:
    """Lets `import mori` find the stand-in, in this process."""
    if str(FAKE) not in sys.path:
        sys.path.insert(0, str(FAKE))


def join(budget: int = LEAST, handles: int = 2) -> Any:
    """This rank's MoriGather, with so many handles. Every rank calls it."""
    from pg_sdma import mori_transport

    class Gather(mori_transport.MoriGather):
        HANDLES = handles

    use_fake_mori()
    mori_transport.MoriGather = Gather
    store = new_store()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    offer = mori_transport.Offer("cpu", "tested", rank, world, True, budget)
    word = offer.prepare()
    if rank == 0:
        store.set("word", word)
    return offer.join(store.get("word").decode())


def shard(rank: int, number: int, size: int) -> torch.Tensor:
    """What `rank` has for gather `number`: uint8 [size] that any rank can make."""
    random = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(256, (size,), generator=random, dtype=torch.uint8)


def placed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy of uint8 [n] that lies `offset` bytes after a multiple of 4."""
    memory = torch.zeros(values.numel() + 8, dtype=torch.uint8)
    start = -memory.data_ptr() % 4 + offset
    return memory[start : start + values.numel()].copy_(values)


def run(
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    ranks: int = RANKS,
    **options: Any,
) -> Any:
    """What `function(*args)` returns on each rank, where a group of CPU tensors may go by mori."""
    return run_ranks(
        ranks, with_mori, function, args, env=MORI | dict(env or {}), backend=None, **options
    )


def with_mori(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    use_fake_mori()
    return function(*args)


def routes() -> dict[str, dict[str, int]]:
    """Calls of the default group by operation and route."""
    import pg_sdma

    return {
        operation: {route: count["calls"] for route, count in by_route.items()}
        for operation, by_route in pg_sdma.stats().items()
    }


def same(**env: str) -> list[dict[str, str]]:
    """Such an environment on all ranks."""
    return [env] * RANKS


def one(rank: int, **env: str) -> list[dict[str, str]]:
    """Such an environment on one rank."""
    return [env if r == rank else {} for r in range(RANKS)]
