"""The FSDP2 demo on two CPU ranks, started the way its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = ("--device", "cpu", "--preset", "tiny", "--warmup", "1")


def demo(out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Runs the demo to its end; returns result.json and what was printed."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (sys.executable, *launch, "examples/train_fsdp2.py", *TINY, "--out", str(out))
    process = subprocess.run(
        (*command, *options),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads((out / "result.json").read_text()), process.stdout


def test_both_routes_train_to_the_same_losses(tmp_path: Path) -> None:
    result, printed = demo(tmp_path, "--compare", "--steps", "4")
    assert result["backend"] == {"inner": "cpu:gloo", "sdma": "cpu:sdma"}
    assert result["max_abs_loss_difference"] == 0
    assert len(result["losses"]["sdma"]) == result["steps"] == 4
    assert len(set(result["losses"]["sdma"])) == 4
    assert 0 <= result["fast_path_share"] <= 1
    for measured in ("ms_per_step", "tokens_per_s"):
        assert set(result[measured]) == {"inner", "sdma"}
    assert (tmp_path / "loss.png").stat().st_size > 0
    assert "ms per step" in printed


@pytest.mark.parametrize("resumed_over", ["sdma", "inner"])
def test_a_resumed_run_goes_on_as_if_never_stopped(
    saved: tuple[Path, list[float]], resumed_over: str, tmp_path: Path
) -> None:
    checkpoint, losses = saved
    result, _ = demo(
        tmp_path, "--steps", "6", "--resume", str(checkpoint), "--transport", resumed_over
    )
    assert result["first_step"] == 3
    assert result["losses"][resumed_over] == losses[3:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint after 3 of 6 steps over sdma, and the losses of all 6."""
    folder = tmp_path_factory.mktemp("demo")
    save = ("--save", str(folder / "checkpoints"), "--save-every", "3")
    result, _ = demo(folder, "--steps", "6", "--transport", "sdma", *save)
    return folder / "checkpoints" / "step-000003", result["losses"]["sdma"]
