"""What CUDA may hold back while a stream waits must not hang the ranks.

Each operation is done by one rank alone while gathers are outstanding that wait for the other
rank's device. There is no figure to check but the data: a hang ends in the harness's timeout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from groups import GpuRanks

pytestmark = pytest.mark.gpu

SHARD = 1 << 20
OUTSTANDING = 6
CYCLES = 300_000_000  # of the device's clock: more than a tenth of a second

# First used here. Another for each call in a process.
kernels = [torch.digamma, torch.lgamma, torch.erfinv, torch.special.i0e, torch.special.ndtri]


def first_use_of_a_kernel() -> None:
    kernels.pop()(torch.ones(1000, device="cuda") / 2)


def first_use_of_cublas() -> None:
    matrix = torch.ones(64, 64, dtype=torch.float64, device="cuda")
    torch.mm(matrix, matrix)


def malloc() -> None:
    kept.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))


def free() -> None:
    kept.clear()
    block = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    del block
    torch.cuda.empty_cache()


def new_memory() -> torch.Tensor:
    """An input that the peers have to open."""
    return torch.empty(1 << 26, dtype=torch.uint8, device="cuda")[:SHARD]


def create_stream() -> None:
    stream = ctypes.c_size_t()
    torch.cuda.check_error(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(stream)))


def pin() -> None:
    kept.append(torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True))


def synchronize() -> None:
    torch.cuda.synchronize()


OPERATIONS: dict[str, Callable[[], torch.Tensor | None]] = {
    operation.__name__: operation
    for operation in (
        first_use_of_a_kernel,
        first_use_of_cublas,
        malloc,
        free,
        new_memory,
        create_stream,
        pin,
        synchronize,
    )
}

kept: list[torch.Tensor] = []


class Gathers:
    """All-gathers over two groups in turn, whose results are checked at the end."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.other = dist.new_group(backend="cuda:sdma")
        self.issued: list[tuple[dist.Work, torch.Tensor]] = []
        buffers = 5 * OUTSTANDING
        self.inputs = torch.empty(buffers, SHARD, dtype=torch.uint8, device="cuda")
        self.outputs = torch.empty(buffers, self.world, SHARD, dtype=torch.uint8, device="cuda")

    def issue(self, count: int, own: torch.Tensor | None = None) -> None:
        """Issues `count` gathers; the first has `own` as its input."""
        for _ in range(count):
            number = len(self.issued)
            own = self.inputs[number] if own is None else own
            own.fill_(self.value(number, self.rank))
            group = self.other if number % 2 else None
            output = self.outputs[number].view(-1)
            work = dist.all_gather_into_tensor(output, own, group, async_op=True)
            self.issued.append((work, own))
            own = None

    def check(self) -> None:
        for number, (work, _) in enumerate(self.issued):
            work.wait()
            for rank in range(self.world):
                got = self.outputs[number, rank]
                expected = self.value(number, rank)
                assert got.eq(expected).all(), (number, rank, expected, got.unique().tolist())
        dist.destroy_process_group(self.other)

    @staticmethod
    def value(number: int, rank: int) -> int:
        return 8 * number + rank


def beside(name: str) -> None:
    """Rank 0 does it while its gathers wait for rank 1's device, then the other way round."""
    gathers = Gathers()
    gathers.issue(2)
    for busy in (1, 0):
        if gathers.rank == busy:
            torch.cuda._sleep(CYCLES)
        gathers.issue(OUTSTANDING)
        own = OPERATIONS[name]() if gathers.rank != busy else None
        gathers.issue(OUTSTANDING, own)
    gathers.check()


def beside_on_the_late_rank(name: str) -> None:
    """Rank 1 does it with gathers outstanding on both sides, before those that rank 0 waits for."""
    gathers = Gathers()
    for _ in range(2):
        if gathers.rank == 1:
            torch.cuda._sleep(CYCLES)
        gathers.issue(OUTSTANDING)
        own = OPERATIONS[name]() if gathers.rank == 1 else None
        gathers.issue(OUTSTANDING, own)
    gathers.check()


@pytest.mark.parametrize("patience", ["5", "20000"])
@pytest.mark.parametrize("function", [beside, beside_on_the_late_rank])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_deadlock(
    gpu_ranks: GpuRanks, name: str, function: Callable[[str], None], patience: str
) -> None:
    ranks = gpu_ranks(2, env={"PG_SDMA_PATIENCE_MS": patience})
    ranks.run(function, name, timeout=30)
