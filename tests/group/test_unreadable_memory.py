"""CPU memory that a rank can use and its peers cannot read: calls with it go to the inner."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from survivors import routes

MEMFD_SECRET = 447
BYTES = 1 << 20
WORLD = 3


def secret_memory() -> mmap.mmap | None:
    """Memory that the kernel itself does not map; none where it does not offer it."""
    descriptor = ctypes.CDLL(None).syscall(MEMFD_SECRET, 0)
    if descriptor < 0:
        return None
    os.ftruncate(descriptor, BYTES)
    return mmap.mmap(descriptor, BYTES)


def gather_secrets():
    rank = dist.get_rank()
    memory = secret_memory() if rank == 1 else mmap.mmap(-1, BYTES)
    secret = torch.frombuffer(memory, dtype=torch.uint8)
    plain = torch.empty(BYTES, dtype=torch.uint8)
    expected = torch.arange(WORLD, dtype=torch.uint8).repeat_interleave(BYTES)
    right = []
    for shard in (plain, secret, plain):
        shard.fill_(rank)
        output = torch.empty(WORLD * BYTES, dtype=torch.uint8)
        dist.all_gather_into_tensor(output, shard)
        right.append(torch.equal(output, expected))
    return right, routes()


@pytest.mark.skipif(secret_memory() is None, reason="the kernel offers no memfd_secret")
def test_memory_that_peers_cannot_read_sends_one_call_to_the_inner():
    for right, counts in run_ranks(WORLD, gather_secrets):
        assert right == [True] * 3
        assert counts == {"direct": 2, "inner: memory that cannot be shared": 1}
