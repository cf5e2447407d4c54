"""The rivals over symmetric memory, with doubles for what needs GPUs: order of calls and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pg_sdma.bench import symmetric
from pg_sdma.bench.buffers import Case
from pg_sdma.bench.contenders import Room
from pg_sdma.bench.symmetric import LowContention, low_contention, zero_cta

CPU = torch.device("cpu")
ROOM = Room(whole=4096, shards=2048)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called of NCCL, whose memory is the host's here."""
    said: list[str] = []

    class Nccl:
        """Of ProcessGroupNCCL what is used."""

        NCCL_CTA_POLICY_ZERO = 2
        mem_allocator = "ncclMemAlloc"

        class Options:
            def __init__(self) -> None:
                self.config = SimpleNamespace(cta_policy=None)

        def register_mem_pool(self, pool: object, symm: bool = False) -> None:
            """register_mem_pool(pool, symm: bool = False)"""
            said.append(f"register {pool} symm={symm}")

        def deregister_mem_pool(self, pool: object) -> None:
            said.append(f"deregister {pool}")

    def new_group(backend: str, pg_options: Any, timeout: object) -> Any:
        said.append(f"group {backend} policy {pg_options.config.cta_policy}")
        return SimpleNamespace(_get_backend=lambda device: Nccl())

    @contextlib.contextmanager
    def use_mem_pool(pool: object) -> Iterator[None]:
        said.append(f"allocate in {pool}")
        yield
        said.append("allocated")

    monkeypatch.setattr(symmetric, "_require_gpu", lambda world: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: said.append("all_reduce"))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    return said


def test_the_pool_is_registered_after_the_communicator_and_the_memory(log: list[str]) -> None:
    world: Any = SimpleNamespace(device=CPU)
    stages = zero_cta(world, ROOM)
    with pytest.raises(StopIteration) as done:
        while True:
            next(stages)
            log.append("-")
    contender = done.value.value
    assert log == [
        *("-", "group cuda:nccl policy 2", "-", "all_reduce", "-"),
        *("allocate in pool of ncclMemAlloc", "allocated", "-"),
        *("register pool of ncclMemAlloc symm=True", "-"),
    ]
    case = Case(torch.float32, 8, 1, False, ranks=(0, 1), rank=0)
    made = contender.prepare(case, 3)
    assert len(made.own) == 3
    memory = contender.whole._memory.untyped_storage().data_ptr()
    assert all(own.untyped_storage().data_ptr() == memory for own in made.own)
    contender.close()
    assert log[-1] == "deregister pool of ncclMemAlloc"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.delattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"), "CTA policy"),
        (lambda m: m.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5)), "NCCL 2.28"),
        (lambda m: m.setattr(dist, "is_nccl_available", lambda: False), "no NCCL"),
    ],
)
def test_an_older_torch_or_nccl_is_told_before_any_rank_waits(
    log: list[str], monkeypatch: pytest.MonkeyPatch, change: Any, why: str
) -> None:
    change(monkeypatch)
    world: Any = SimpleNamespace(device=CPU)
    with pytest.raises(RuntimeError, match=why):
        next(zero_cta(world, ROOM))
    assert log == []


def test_low_contention_gathers_from_symmetric_memory_and_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    said: list[str] = []

    def gather(own: torch.Tensor, group_name: str) -> torch.Tensor:
        said.append(f"gather {group_name}")
        return torch.cat([own, own + 1])

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        said.append("wait")
        return tensor

    monkeypatch.setattr(
        symmetric_memory, "empty", lambda *size, dtype, device: torch.ones(*size, dtype=dtype)
    )
    monkeypatch.setattr(
        symmetric_memory, "rendezvous", lambda tensor, group: said.append("rendezvous")
    )
    monkeypatch.setattr(torch.ops.symm_mem, "_low_contention_all_gather", gather, raising=False)
    monkeypatch.setattr(torch.ops._c10d_functional, "wait_tensor", wait, raising=False)
    case = Case(torch.int32, 3, 1, False, ranks=(0, 1), rank=0)
    made = LowContention("low-contention", "name", CPU).prepare(case, 2)
    assert said == ["rendezvous"] * 2
    made.own[1].fill_(5)
    assert made.call(3).tolist() == [5, 5, 5, 6, 6, 6]
    assert made.call(2).tolist() == [0, 0, 0, 1, 1, 1]
    assert said[2:] == ["gather name", "wait"] * 2


def test_low_contention_sets_the_backend_before_anything_is_allocated(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    monkeypatch.setattr(symmetric_memory, "set_backend", lambda name: log.append(name))
    monkeypatch.setattr(
        torch.ops.symm_mem, "_low_contention_all_gather", lambda own, name: own, raising=False
    )
    world: Any = SimpleNamespace(device=CPU)
    next(low_contention(world, ROOM))
    assert log == ["CUDA"]
