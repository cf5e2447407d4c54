"""The ZeRO-2 example on two CPU ranks, started the way its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_zero2
from common.gpt import GPT, PRESETS

ROOT = Path(__file__).parents[2]


def test_the_example_follows_ddp_and_reports_its_memory(tmp_path: Path) -> None:
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("examples/train_zero2.py", "--device", "cpu", "--preset", "tiny", "--compare"),
        *("--steps", "4", "--warmup", "1", "--batch", "6", "--micro-steps", "3"),
        *("--param-dtype", "fp32", "--shard-dtype", "bf16", "--out", str(tmp_path)),
    )
    process = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 4
    assert len(set(result["losses"]["ddp"])) == 4
    assert result["losses"]["zero2"] == pytest.approx(result["losses"]["ddp"], abs=1e-3)
    assert result["fast_path_share"] == 1
    # All gradients of a model of two layers in fp32, and half of them in bf16.
    with torch.device("meta"):
        model = GPT(PRESETS["tiny"])
    expected = 4 * model.parameter_count() + 2 * model.parameter_count() // 2
    assert result["gradient_bytes_formula"] == expected
    assert result["gradient_bytes_measured"] == pytest.approx(expected, rel=0.01)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "gradients of a rank: " in process.stdout


def test_a_batch_that_does_not_divide_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_zero2.parse(["--device", "cpu", "--batch", "4", "--micro-steps", "3"])
    assert "--batch 4 is no multiple of 3 micro-steps" in capsys.readouterr().err
