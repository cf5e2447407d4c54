"""Groups of 2 to 4 processes on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

# Before the first rank's process: the server it is forked from keeps this environment.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from harness import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """`ranks(size, backend, env)`: processes that the module's tests share, new after a failure."""
    pools: dict[tuple[object, ...], Ranks] = {}

    def get(size: int, backend: str = "cpu:sdma", env: Mapping[str, str] | None = None) -> Ranks:
        key = (size, backend, *sorted((env or {}).items()))
        pool = pools.get(key)
        if pool is None or not pool.alive:
            pool = pools[key] = Ranks(size, backend, env=env)
        return pool

    yield get
    for pool in pools.values():
        if pool.alive:
            pool.close()
