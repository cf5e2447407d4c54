"""What one rank refuses, all refuse, before any of them waits for another."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def agree(
    group: dist.ProcessGroup, operation: str, error: Exception | None, facts: tuple[Any, ...] = ()
) -> None:
    """Returns where no rank has an error and all have the same facts; collective.

    `facts` are compared by their repr, one by one. Raises `error` where it is this rank's own, and
    RuntimeError where another rank has one or has other facts.
    """
    digest = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "big")
    most = torch.tensor(
        [error is not None, digest, -digest], dtype=torch.int64, device=host_word_device(group)
    )
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    refused, largest, negated = most.tolist()
    if not refused and largest == -negated:
        return
    mine = (None if error is None else f"{type(error).__name__}: {error}", [repr(f) for f in facts])
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    if error is not None:
        raise error
    where = f"rank {group.rank()} of {group.size()}, ZeRO-2: {operation}"
    for rank, (words, _) in enumerate(everyone):
        if words is not None:
            raise RuntimeError(f"{where} is refused by rank {rank}: {words}")
    for rank, (_, others) in enumerate(everyone):
        if others != everyone[0][1]:
            raise RuntimeError(
                f"{where} differs between ranks: {_difference(everyone[0][1], others, rank)}; give "
                "every rank the same model and arguments"
            )


def host_word_device(group: dist.ProcessGroup) -> torch.device:
    """Where a word lies that the group reduces and the host then reads."""
    return torch.device(c10d._get_object_coll_device(group))


def _difference(first: list[str], others: list[str], rank: int) -> str:
    for one, other in zip(first, others, strict=False):
        if one != other:
            return f"rank 0 has {one}, rank {rank} {other}"
    return f"rank 0 has {len(first)} parts, rank {rank} {len(others)}"
