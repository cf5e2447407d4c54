"""ZeRO-2 on GPUs: no host synchronisation in a step, the kernel's bits, losses beside DDP's."""

from __future__ import annotations

import copy
import secrets

import pytest
import torch
import torch.distributed as dist
from groups import PATIENT, GpuRanks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from common.gpt import GPT, GPTConfig
from common.text import ByteBatches, load_text
from pg_sdma.zero2 import AdamW, Zero2
from pg_sdma.zero2.rounding import Key, accumulate

pytestmark = pytest.mark.gpu

STEPS, MICRO_STEPS = 20, 2
SIZES = GPTConfig(hidden=64, layers=4, heads=2, seq=64)


def train_both(clip: bool) -> tuple[list[float], list[float]]:
    """Losses of this rank with DDP and with ZeRO-2. From the second step on, ZeRO-2's steps raise
    where the host waits for the device."""
    device = torch.device("cuda", torch.cuda.current_device())
    with device:
        plain = GPT(SIZES)
    plain.initialise(seed=0)
    model = copy.deepcopy(plain)
    ddp = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4)
    zero = Zero2(model, model.blocks, shard_dtype=torch.float32)
    sharded_optimizer = AdamW(zero, lr=3e-4)
    batches = ByteBatches(
        load_text(), 2 * MICRO_STEPS, SIZES.seq, 0, dist.get_rank(), dist.get_world_size()
    )
    losses = torch.zeros(2, STEPS, device=device)
    for step in range(STEPS):
        inputs, targets = (x.to(device).chunk(MICRO_STEPS) for x in batches(step))
        parts = list(zip(inputs, targets, strict=True))
        for part in parts:
            loss = ddp(*part) / MICRO_STEPS
            loss.backward()
            losses[0, step] += loss.detach()
        if clip:
            clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            for part in parts:
                loss = model(*part) / MICRO_STEPS
                loss.backward()
                losses[1, step] += loss.detach()
            if clip:
                zero.clip_grad_norm_(1.0)
            sharded_optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    ddp_losses, zero_losses = losses.tolist()
    return ddp_losses, zero_losses


def test_a_step_never_waits_on_the_host_and_follows_ddp(gpu_ranks: GpuRanks) -> None:
    # On one GPU the inner is gloo, which waits on the host: so all that a step does there is
    # direct, and there is no norm to reduce.
    shared = gpu_ranks.share(2)
    env = {"PG_SDMA_OPS": "all_gather,reduce_scatter", "PG_SDMA_STRICT": "1", **PATIENT}
    ranks = gpu_ranks(2, env=env if shared else None)
    for ddp, zero in ranks.run(train_both, not shared, timeout=120):
        assert ddp[-1] < ddp[0] - 0.1
        # Attention's backward on GPUs adds up in no fixed order.
        assert zero == pytest.approx(ddp, abs=1e-3)


def compare_kernel() -> None:
    for shard_dtype in (torch.bfloat16, torch.float32):
        for dtype in (torch.bfloat16, torch.float32):
            for overwrite in (False, True):
                key = Key(secrets.randbits(64), *(secrets.randbits(32) for _ in range(3)))
                gradient = torch.randn(100_003).to(dtype)
                gradient[50_000:50_002] = torch.tensor([torch.inf, -torch.inf])
                shard = torch.randn(33_335).to(shard_dtype)
                here, there = ([shard.to(d), gradient.to(d)] for d in ("cpu", "cuda"))
                for tensors in (here, there):
                    accumulate(*tensors, 33_333, 1 / 3, overwrite, key)
                assert torch.equal(there[0].cpu(), here[0])
                assert not there[1].any()


def test_the_kernel_has_the_bits_of_the_cpu(gpu_ranks: GpuRanks) -> None:
    pytest.importorskip("triton")
    gpu_ranks(2).run(compare_kernel, timeout=120)
