"""Groups whose ranks have CUDA tensors: on a GPU each, or several on one through MPS."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from harness import Ranks, init_group

import pg_sdma

BACKEND = "cpu:gloo,cuda:sdma"

# Hosts wait for one another as long as it takes, so that no call goes to the inner for being late.
PATIENT = {"PG_SDMA_PATIENCE_MS": "20000"}


class GpuRanks:
    """Ranks by what they were made with, each set shared by its users until one of them fails.

    `mps_client` starts the MPS daemon, once, and gives the environment of its clients.
    """

    def __init__(self, gpus: int, mps_client: Callable[[], Mapping[str, str]]) -> None:
        self._gpus = gpus
        self._mps_client = mps_client
        self._pools: dict[object, Ranks] = {}

    def share(self, size: int) -> bool:
        """Whether `size` ranks have to share GPUs."""
        return size > self._gpus

    def inner(self, size: int) -> str:
        """The backend that sdma wraps at `size` ranks: NCCL refuses two ranks on one GPU."""
        return "gloo" if self.share(size) else "nccl"

    def __call__(
        self,
        size: int,
        backend: str = BACKEND,
        env: Mapping[str, str] | None = None,
        bind: bool = False,
    ) -> Ranks:
        """`size` ranks whose default group is `backend`, with `env` added to their environment.

        `bind` gives init_process_group the device_id.
        """
        # Small gathers, too, go direct here.
        env = {"PG_SDMA_MIN_BYTES": "0", **(env or {})}
        key = (size, backend, bind, *sorted(env.items()))
        pool = self._pools.get(key)
        if pool is None or not pool.alive:
            if self.share(size):
                env.update(self._mps_client())
                env.update(PG_SDMA_ALLOW_SAME_DEVICE="1", PG_SDMA_INNER="cuda=gloo")
            pool = self._pools[key] = Ranks(size, backend=None, env=env)
            pool.run(join_group, backend, bind)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            if pool.alive:
                pool.close()


def join_group(backend: str, bind: bool) -> None:
    device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    init_group(backend, device_id=device if bind else None)


def level() -> None:
    """Blocks the host until every rank's host is here, and touches no GPU."""
    dist.all_reduce(torch.zeros(1))


def calls_by_route(*groups: dist.ProcessGroup) -> Counter[str]:
    """This rank's all-gathers over `groups` (the default group if none) as "direct" or "inner: "
    and the reason."""
    calls: Counter[str] = Counter()
    for group in groups or (dist.group.WORLD,):
        for by_route in pg_sdma.stats(group).values():
            calls.update({route: count["calls"] for route, count in by_route.items()})
    return calls
