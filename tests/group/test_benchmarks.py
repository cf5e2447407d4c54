"""The benchmarks that are scripts, on CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def torchrun(script: str, *arguments: str) -> str:
    """Runs a script on two ranks to its end; returns what it printed."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = subprocess.run(
        (sys.executable, *start, str(BENCHMARKS / script), *arguments),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def routes(result: dict[str, Any], mode: str) -> dict[str, set[str]]:
    return {operation: set(by) for operation, by in result["routes"][mode].items()}


def test_fsdp2_steps_over_each_contestant(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    sizes = ("--device", "cpu", "--shapes", "1x64x16", "--steps", "3", "--warmup", "1")
    printed = torchrun("fsdp2_step.py", *sizes, "--rounds", "1", "--json", str(numbers))
    (shape,) = json.loads(numbers.read_text())["shapes"]
    found = {result["contestant"]: result for result in shape["results"]}
    assert list(found) == ["inner", "sdma", "sdma+rs"]
    for mode in ("free", "sync"):
        assert all(result["step"][mode] > 0 for result in found.values())
        assert routes(found["inner"], mode) == {}
        assert routes(found["sdma"], mode) == {"all_gather_into_tensor": {"direct"}}
        assert routes(found["sdma+rs"], mode) == {
            "all_gather_into_tensor": {"direct"},
            "reduce_scatter_tensor": {"direct"},
        }
        for name, result in found.items():
            host = result["calls"][mode]
            gathers = host["calls"]["all-gather"]
            assert len(gathers) > 3  # steps
            assert len(host["agreeing"]) == len(host["enqueueing"])
            assert len(host["agreeing"]) == {"inner": 0, "sdma": len(gathers)}.get(
                name, len(gathers) + len(host["calls"]["reduce-scatter"])
            )
    rows = [line for line in printed.splitlines() if line.startswith("| 0 |")]
    assert len(rows) == 2


def test_a_rank_whose_peer_is_killed_ends_and_names_it() -> None:
    options = ("--device", "cpu", "--bytes", "4M", "--repetitions", "2", "--jobs", "2")
    process = subprocess.run(
        (sys.executable, str(BENCHMARKS / "gpu" / "kill.py"), *options, "--bound", "60"),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "2 of 2 times the survivor ended by itself" in process.stdout
    rows = [line for line in process.stdout.splitlines() if line.startswith(("| 0 |", "| 1 |"))]
    for row, victim, survivor in zip(rows, (1, 0), (0, 1), strict=True):
        assert f"| rank {victim} |" in row
        assert "exit code 1" in row and f"DistBackendError: rank {survivor}: " in row


@pytest.mark.nightly
def test_a_step_of_zero2_is_set_beside_ddp_and_fsdp2() -> None:
    small = ("--hidden", "16", "--layers", "2", "--seq", "8", "--batch", "1", "--rounds", "1")
    printed = torchrun("zero2_step.py", *small, "--steps", "2", "--warmup", "1")
    rows = [line.split("|")[1:4] for line in printed.splitlines() if line.startswith("| ")]
    assert [name.split()[0] for name, *_ in rows[2:]] == ["DDP", "FSDP2,", "ZeRO-2,", "ZeRO-2,"]
    assert all(float(cpu) > 0 and float(wall) > 0 for _, cpu, wall in rows[2:])
