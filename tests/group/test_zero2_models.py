"""Many kinds of models, each trained with ZeRO-2 beside DDP: the same weights, step by step."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from zero2_models import MODELS

import pg_sdma
from pg_sdma.zero2 import AdamW, Zero2

STEPS, MICRO_STEPS = 3, 2
# DDP refuses checkpoints that are reentrant beside parameters that are not used.
ALL_USED = ("checkpointed", "compiled")


def follow_ddp(name, shard_dtype):
    """Trains with DDP and with ZeRO-2; returns the largest difference of a weight, how far the
    weights went, and the share of gathers that went direct."""
    torch.manual_seed(0)
    plain, _, loss = MODELS[name]()
    torch.manual_seed(dist.get_rank())  # rank 0's counts
    model, blocks, _ = MODELS[name]()
    if dist.get_rank() == 0:
        model.load_state_dict(plain.state_dict())
    start = copy.deepcopy(plain.state_dict())
    rank, unused = dist.get_rank(), name not in ALL_USED
    ddp = DistributedDataParallel(plain, find_unused_parameters=unused)
    options = {"lr": 0.003, "eps": 1e-4}
    zero = Zero2(model, blocks, shard_dtype=shard_dtype, find_unused_parameters=unused, buffers=2)
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizers = torch.optim.AdamW(trained, **options), AdamW(zero, **options)
    before = direct_calls()
    for step in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            part = MICRO_STEPS * step + micro_step
            last = micro_step == MICRO_STEPS - 1
            with nullcontext() if last or unused else ddp.no_sync():
                loss(ddp, part, rank).backward()
            loss(model, part, rank).backward()
        norm = clip_grad_norm_(trained, 1.0)
        sharded_norm = zero.clip_grad_norm_(1.0)
        rtol = 1e-5 if shard_dtype == torch.float32 else 2e-2
        torch.testing.assert_close(sharded_norm, norm, rtol=rtol, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ended, state = plain.state_dict(), model.state_dict()
    difference = max((ended[key] - state[key]).abs().max().item() for key in ended)
    travelled = max((ended[key] - start[key]).abs().max().item() for key in ended)
    return difference, travelled, direct_calls() - before


def direct_calls():
    counts = pg_sdma.stats().get("all_gather_into_tensor_coalesced", {})
    return counts.get("direct", {"calls": 0})["calls"]


def check(results, shard_dtype):
    for difference, travelled, direct in results:
        assert travelled > STEPS * 0.002
        assert difference <= travelled * (1e-3 if shard_dtype == torch.float32 else 0.15)
        assert direct == STEPS


@pytest.mark.parametrize("name", MODELS)
def test_it_follows_ddp(ranks, name):
    check(ranks(2).run(follow_ddp, name, torch.float32), torch.float32)


@pytest.mark.nightly
@pytest.mark.parametrize("shard_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_it_follows_ddp_on_any_number_of_ranks(ranks, name, size, shard_dtype):
    check(ranks(size).run(follow_ddp, name, shard_dtype), shard_dtype)
