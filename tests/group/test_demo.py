"""The FSDP2 demo on two CPU ranks, started the way its users start it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = ("--device", "cpu", "--preset", "tiny", "--warmup", "1")


def demo(out: Path, *options: str, **env: str) -> tuple[dict[str, Any], str]:
    """Runs the demo to its end, with `env` added; returns result.json and what was printed."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (sys.executable, *launch, "examples/train_fsdp2.py", *TINY, "--out", str(out))
    process = subprocess.run(
        (*command, *options),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads((out / "result.json").read_text()), process.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> list[float]:
    """The losses of 6 steps over sdma, which leave checkpoints after the third and the last."""
    save = ("--save", str(folder / "checkpoints"), "--save-every", "3")
    result, _ = demo(folder / "unbroken", "--steps", "6", *save)
    assert result["first_step"] == 0
    return result["losses"]["sdma"]


@pytest.fixture(scope="module")
def compared(folder: Path, unbroken: list[float]) -> tuple[dict[str, Any], str]:
    """What a comparison that starts at the third step leaves and prints."""
    resume = ("--resume", str(folder / "checkpoints" / "step-000003"))
    return demo(folder / "compared", "--compare", "--steps", "6", *resume)


def test_a_resumed_run_goes_on_as_if_never_stopped(
    unbroken: list[float], compared: tuple[dict[str, Any], str]
) -> None:
    result, _ = compared
    assert len(set(unbroken)) == 6
    assert result["first_step"] == 3
    assert result["losses"]["sdma"] == unbroken[3:]


def test_both_routes_train_to_the_same_losses(compared: tuple[dict[str, Any], str]) -> None:
    result, _ = compared
    assert result["losses"]["inner"] == result["losses"]["sdma"]
    assert result["max_abs_loss_difference"] == 0


def test_the_report_compares_the_two_backends(
    folder: Path, compared: tuple[dict[str, Any], str]
) -> None:
    result, printed = compared
    assert result["backend"] == {"inner": "cpu:gloo", "sdma": "cpu:sdma"}
    assert result["steps"] == 3
    assert result["fast_path_share"] == 1
    for measured in ("ms_per_step", "tokens_per_s"):
        assert set(result[measured]) == {"inner", "sdma"}
    assert (folder / "compared" / "loss.png").stat().st_size > 0
    assert "ms per step" in printed


def test_with_direct_reduce_scatters_it_trains_to_the_same_bits_again(
    folder: Path, unbroken: list[float]
) -> None:
    env = {"PG_SDMA_OPS": "all_gather,reduce_scatter", "PG_SDMA_STRICT": "1"}
    # A landing of another size is another cut into pieces, and no other sum.
    first, _ = demo(folder / "reduced", "--steps", "6", **env)
    again, _ = demo(folder / "again", "--steps", "6", PG_SDMA_LANDING_BYTES="4096", **env)
    losses = first["losses"]["sdma"]
    assert again["losses"]["sdma"] == losses
    assert first["fast_path_share"] == 1
    assert all(map(math.isfinite, losses)) and len(set(losses)) == 6
    # gloo adds the two ranks' fp32 gradients in the same precision, and two numbers have one sum.
    assert losses == unbroken
