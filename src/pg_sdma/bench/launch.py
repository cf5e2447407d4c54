"""Starts the ranks of a benchmark, or joins those that torchrun has started."""

from __future__ import annotations

import gc
import os
import platform
import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pg_sdma.settings import Settings, read_settings

T = TypeVar("T")

# What --vs calls the measured backend with a call for each tensor of a coalesced one.
APART = "apart"


class UsageError(Exception):
    """Options that contradict each other, or ask for what is not there."""


class World:
    """This rank among the ranks of a benchmark, and the gloo group by which they keep in step."""

    def __init__(self, device: str) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = torch.device(device)
        if device == "cuda":
            local_rank = int(os.environ["LOCAL_RANK"])
            self.device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)

    @property
    def device_name(self) -> str:
        """As a reader knows it: "CPU", or the GPU's product name."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def barrier(self) -> None:
        """Blocks the host until every rank's host is here; idle the device first if it matters."""
        dist.barrier()

    def median_of_means(self, samples: Sequence[float]) -> float:
        """The mean over the ranks of each sample, then the median over the samples."""
        mean = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(mean)
        return statistics.median((mean / self.size).tolist())

    def total(self, count: int) -> int:
        total = torch.tensor(count)
        dist.all_reduce(total)
        return int(total)

    def largest(self, value: float) -> float:
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def gathered(self, value: T) -> list[T]:
        """Every rank's `value`, which can be pickled."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def group(self, backend: str, parts: int = 1) -> dist.ProcessGroup:
        """A group over `backend` of this rank and its neighbours, one of `parts` equal ones."""
        each = self.size // parts
        ranks = [list(range(first, first + each)) for first in range(0, self.size, each)]
        devices = "cpu:gloo,cuda" if self.device.type == "cuda" else "cpu"
        group, _ = dist.new_subgroups_by_enumeration(ranks, backend=f"{devices}:{backend}")
        return group

    def facts(self) -> dict[str, object]:
        """Where something was measured."""
        found: dict[str, object] = {
            "device": self.device.type,
            "device_name": self.device_name,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "ranks": self.size,
        }
        if self.device.type == "cuda":
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        return found


Body = Callable[[World, Namespace], None]


def run_ranks(
    body: Body, options: Namespace, check: Callable[[Namespace, int], object] | None = None
) -> int:
    """Calls `body(world, options)` on every rank; returns the exit status.

    Under torchrun this process is one rank. Otherwise `options.ranks` processes are started, one a
    GPU by default, two on CPU. `check(options, ranks)` is called before that. Raises UsageError
    where the ranks outnumber the GPUs, and what `check` raises.
    """
    if dist.is_torchelastic_launched():
        if options.ranks:
            raise UsageError("torchrun has started the ranks: leave --ranks out")
        if check:
            check(options, int(os.environ["WORLD_SIZE"]))
        dist.init_process_group("gloo")
        _run_rank(body, options)
        return 0
    cuda = options.device == "cuda"
    ranks = options.ranks or (torch.cuda.device_count() if cuda else 2)
    if cuda:
        check_gpus(ranks, torch.cuda.device_count(), read_settings())
    if check:
        check(options, ranks)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        mp.spawn(rank_main, (ranks, store.port, body, options), nprocs=ranks)
    except mp.ProcessExitedException as ended:
        return ended.exit_code
    return 0


def measured_backends(options: Namespace) -> list[str]:
    """Names of the measured backend and of the one to compare with, unless that is "none".

    "inner" stands for the backend that sdma wraps, and APART for the measured one, with that word
    behind its name and a comma.
    """
    given = [options.backend] if options.vs == "none" else [options.backend, options.vs]
    inner = read_settings().inner_backend(options.device)
    names = [inner if name == "inner" else name for name in given]
    return [f"{names[0]}, {APART}" if name == APART else name for name in names]


def check_gpus(ranks: int, gpus: int, settings: Settings) -> None:
    """Raises UsageError where `ranks` processes cannot have a GPU each."""
    if gpus == 0:
        raise UsageError("--device cuda: torch sees no GPU here")
    if ranks > gpus and not settings.allow_same_device:
        raise UsageError(
            f"{ranks} ranks want a GPU each and torch sees {gpus}: give fewer --ranks, or set "
            "PG_SDMA_ALLOW_SAME_DEVICE=1 and PG_SDMA_INNER=gloo to let ranks share one"
        )


def rank_main(rank: int, ranks: int, port: int, body: Body, options: Namespace) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    # As torchrun does: the ranks share the machine's cores.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    _run_rank(body, options)


def _run_rank(body: Body, options: Namespace) -> None:
    world = World(options.device)
    body(world, options)
    # Not in a `finally`: after an error the peers never come to the barrier.
    world.barrier()
    gc.collect()
    dist.destroy_process_group()
