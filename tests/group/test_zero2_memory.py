"""The gradients of GPT-2, 124 million parameters in bf16, take the memory that the formula says."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.gpt import GPT, PRESETS
from pg_sdma.zero2 import Zero2, gradient_bytes

MIB = 2**20


def measured_and_expected():
    """Bytes of what is there after a backward and was not before: gradients and nothing else."""
    with torch.device("meta"):
        model = GPT(PRESETS["gpt2-124m"]).bfloat16()
    model.to_empty(device="cpu")
    model.head.weight = model.tokens.weight  # which to_empty has torn apart
    before = live_bytes()
    zero = Zero2(model, model.blocks, master_dtype=None)
    model(*torch.randint(256, (2, 1, 4))).backward()
    zero.finish()
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    others = model.parameter_count() - sum(blocks)
    expected = gradient_bytes(blocks, others, dist.get_world_size())
    return live_bytes() - before, zero.gradient_bytes, expected


def live_bytes():
    """Bytes of all tensors' memory in this process, whoever has made them."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if issubclass(type(tensor), torch.Tensor) and tensor.device.type == "cpu"
    }
    return sum(storages.values())


@pytest.mark.parametrize(("size", "mib"), [(2, 221), (4, 162), (8, 132)])
def test_memory_with_peers_that_are_only_said_to_be_there(size, mib):
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    try:
        measured, reported, expected = measured_and_expected()
    finally:
        dist.destroy_process_group()
    assert round(expected / MIB) == mib
    assert measured == pytest.approx(expected, rel=0.01)
    assert reported == pytest.approx(expected, rel=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 4])
def test_memory_of_real_ranks(ranks, size):
    for measured, reported, expected in ranks(size).run(measured_and_expected, timeout=250):
        assert measured == pytest.approx(expected, rel=0.01)
        assert reported == pytest.approx(expected, rel=0.01)
