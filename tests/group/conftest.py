"""Groups of 2 to 4 processes on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Before the first rank's process: the server it is forked from keeps this environment.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from harness import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """`ranks(size, backend)`: processes that the module's tests share, new ones after a failure."""
    pools: dict[tuple[int, str], Ranks] = {}

    def get(size: int, backend: str = "cpu:sdma") -> Ranks:
        pool = pools.get((size, backend))
        if pool is None or not pool.alive:
            pool = pools[size, backend] = Ranks(size, backend)
        return pool

    yield get
    for pool in pools.values():
        if pool.alive:
            pool.close()
