"""DeepSpeed over sdma: the same training as over gloo, and its all-gathers on the direct route.

DeepSpeed is no part of `make setup`; `make nightly` installs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

import pg_sdma

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SOURCE_LIMIT = 64 * 2**20  # elements a rank, above which DeepSpeed's own SDMA path gives up
# What DeepSpeed looks for before it believes that it was launched; the group comes from a file.
LAUNCHED = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    missing = [name for name in ("deepspeed", "transformers") if find_spec(name) is None]
    if missing:
        pytest.fail(f"{' and '.join(missing)} not installed: run `make setup-zero3`, then again")


class Trained(NamedTuple):
    losses: list[float]
    digest: str  # of all parameters as this rank has them after the last step
    group_is_cloned: bool
    elements: int  # of all parameters
    gathers: list[dict[str, Any]]  # of each engine.step() over the data-parallel group: its stats


def train(backend: str, file: str, stage: int, width: int, layers: int) -> Trained:
    """Three steps of a stack of square matrices in bf16, over a group that DeepSpeed makes."""
    import deepspeed
    from deepspeed.utils import groups

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed(
        dist_backend=backend, init_method=f"file://{file}", rank=rank, world_size=size
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        },
    )
    group = groups._get_data_parallel_group()
    torch.manual_seed(rank)
    losses, gathers = [], []
    for _ in range(3):
        loss = engine(torch.randn(1, width, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        before = counts(group)
        engine.step()
        gathers.append({key: n - before.get(key, 0) for key, n in counts(group).items()})
        losses.append(loss.item())
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        digest.update(parameter.detach().view(torch.uint8).numpy())
    dist.barrier()
    elements = sum(parameter.numel() for parameter in engine.module.parameters())
    return Trained(losses, digest.hexdigest(), group is not dist.group.WORLD, elements, gathers)


def counts(group: dist.ProcessGroup) -> dict[tuple[str, str], int]:
    """Calls and bytes of the all-gathers over `group` so far, by what they are and route."""
    return {
        (what, route): count[what]
        for by_route in pg_sdma.stats(group).values()
        for route, count in by_route.items()
        for what in ("calls", "bytes")
    }


@pytest.mark.parametrize(("stage", "width", "layers"), [(1, 512, 3), (2, 512, 3), (1, 8200, 2)])
def test_the_gather_after_the_step_goes_direct_whatever_its_size(tmp_path, stage, width, layers):
    """One flat gather of all parameters, over a clone of the default group."""
    runs = {
        backend: run_ranks(
            2,
            train,
            *(backend, str(tmp_path / backend.replace(":", "-")), stage, width, layers),
            backend=None,
            env=LAUNCHED,
            timeout=400,
        )
        for backend in ("cpu:gloo", "cpu:sdma")
    }
    if width > 1000:
        assert runs["cpu:sdma"][0].elements / 2 > SOURCE_LIMIT
    for ours, inners in zip(runs["cpu:sdma"], runs["cpu:gloo"], strict=True):
        assert ours.losses == inners.losses
        assert len(set(ours.losses)) == 3  # it has learnt something
        assert ours.digest == inners.digest == runs["cpu:sdma"][0].digest
        assert ours.group_is_cloned
        size = 2 * ours.elements  # the parameters' bytes; no padding in this shape
        assert ours.gathers == [{("calls", "direct"): 1, ("bytes", "direct"): size}] * 3
        assert inners.gathers == [{}] * 3


RUNS = {
    "GPT": ("--model", "gpt-tiny"),
    "Qwen3": ("--model", "qwen3-tiny"),
    "hpZ": ("--model", "gpt-tiny", "--hpz", "2"),
    "ZeRO-2": ("--model", "gpt-tiny", "--stage", "2"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_example_trains_to_the_same_losses(tmp_path, name):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--device", "cpu", "--compare", "--num_steps", "6", "--warmup_steps", "1")
    options += ("--out", str(tmp_path))
    process = subprocess.run(
        (sys.executable, *launch, "examples/train_zero3.py", *options, *RUNS[name]),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 6
    assert result["backend"] == {"inner": "cpu:gloo", "sdma": "cpu:sdma"}
    assert result["losses"]["inner"] == result["losses"]["sdma"]
    assert len(set(result["losses"]["sdma"])) == 6
    assert result["max_abs_loss_difference"] == 0
    assert result["fast_path_share"] == 1
    for measured in ("ms_per_step", "tokens_per_s"):
        assert set(result[measured]) == {"inner", "sdma"}
    assert (tmp_path / "loss.png").stat().st_size > 0
    assert "| bytes that went direct |  | 100.0% |" in (tmp_path / "result.md").read_text()


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
    ],
)
def test_the_published_models_have_their_published_number_of_parameters(model, parameters):
    from zero3.models import MODELS, parameter_count

    assert parameter_count(MODELS[model]) == parameters
