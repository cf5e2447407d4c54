"""FSDP2 trains to exactly the inner's losses, with every race provoked that FSDP leaves room for.

With direct reduce-scatters, whose sums are rounded otherwise, it trains to nearly those, and to the
same bits in every run.

All kernels are deterministic. That mode also fills what torch.empty returns with NaN, so that the
buffer of every all-gather is poisoned.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from groups import PATIENT, GpuRanks, calls_by_route
from noise import Noise

from common.options import learning_rate
from common.session import deterministic_kernels
from common.text import ByteBatches, load_text
from train_fsdp2 import Training, build, parse

pytestmark = pytest.mark.gpu

STEPS = 50
MODEL = {"device": "cuda", "hidden": 256, "layers": 4, "heads": 4, "seq": 128, "batch": 2}
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Trained(NamedTuple):
    losses: list[float]
    routes: dict[str, int]
    expandable: bool  # whether torch's memory was in expandable segments


def train() -> Trained:
    """Trains over the default group. Every rank returns its own losses."""
    options = parse([f"--{name}={value}" for name, value in (MODEL | {"steps": STEPS}).items()])
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    losses = torch.zeros(STEPS, device=device)
    with deterministic_kernels(True):
        training = Training(build(options, device), learning_rate(options))
        batches = ByteBatches(
            load_text(), options.batch, options.seq, options.seed, rank, dist.get_world_size()
        )
        noise = Noise(random.Random(rank))
        for block in training.model.blocks:
            disturb(block, noise)
        for step in range(STEPS):
            inputs, targets = (x.to(device) for x in batches(step))
            losses[step].copy_(training.step(inputs, targets).detach())
            noise()
        expandable = [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]
    return Trained(losses.tolist(), dict(calls_by_route()), all(expandable))


def disturb(block: torch.nn.Module, noise: Noise) -> None:
    """Makes noise before and after a block's forward, and before its backward."""

    def after_forward(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        noise()
        output.register_hook(lambda gradient: noise())

    block.register_forward_pre_hook(lambda module, inputs: noise())
    block.register_forward_hook(after_forward)


@pytest.fixture(scope="module")
def inners_losses(gpu_ranks: GpuRanks) -> Any:
    """`inners_losses(size)`: each rank's losses over the inner alone."""
    known: dict[int, list[list[float]]] = {}

    def of(size: int) -> list[list[float]]:
        if size not in known:
            ranks = gpu_ranks(size, f"cpu:gloo,cuda:{gpu_ranks.inner(size)}", env=DETERMINISTIC)
            known[size] = [trained.losses for trained in ranks.run(train, timeout=120)]
        return known[size]

    return of


@pytest.mark.parametrize(
    ("size", "env"),
    [
        (2, {}),
        (4, {}),
        (2, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (
            2,
            {
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                "CUDA_DEVICE_MAX_CONNECTIONS": "32",
            },
        ),
    ],
    ids=["2 ranks", "4 ranks", "expandable", "expandable, 32 connections"],
)
def test_losses_are_the_inners(
    gpu_ranks: GpuRanks, inners_losses: Any, size: int, env: dict[str, str]
) -> None:
    ranks = gpu_ranks(size, env=env | DETERMINISTIC | PATIENT)
    results = ranks.run(train, timeout=120)
    assert [trained.losses for trained in results] == inners_losses(size)
    for trained in results:
        assert set(trained.routes) == {"direct"}
        assert trained.expandable == any("ALLOC_CONF" in name for name in env)
        assert len(set(trained.losses)) > STEPS / 2, "it did not train"


@pytest.mark.parametrize("size", [2, 4])
def test_direct_reduce_scatters_repeat_every_bit(
    gpu_ranks: GpuRanks, inners_losses: Any, size: int
) -> None:
    pytest.importorskip("triton")
    env = {"PG_SDMA_OPS": "all_gather,reduce_scatter"}
    ranks = gpu_ranks(size, env=env | DETERMINISTIC | PATIENT)
    first, second = (ranks.run(train, timeout=120) for _ in range(2))
    for trained, again, inners in zip(first, second, inners_losses(size), strict=True):
        assert trained.losses == again.losses
        assert trained.losses == pytest.approx(inners, rel=0.01)
        assert set(trained.routes) == {"direct"}


def test_one_connection_takes_the_inner(gpu_ranks: GpuRanks, inners_losses: Any) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    results = gpu_ranks(2, env=env | DETERMINISTIC).run(train, timeout=120)
    assert [trained.losses for trained in results] == inners_losses(2)
    for trained in results:
        assert len(trained.routes) == 1
        (route,) = trained.routes
        assert route.startswith("inner: ")
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in route
