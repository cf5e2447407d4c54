"""The benchmarks that are scripts, on CPU ranks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def torchrun(script: str, *arguments: str, ends: tuple[int, ...] = (0,)) -> str:
    """Runs a script on two ranks to one of these ends; returns what it printed."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = subprocess.run(
        (sys.executable, *start, str(BENCHMARKS / script), *arguments),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode in ends, process.stdout + process.stderr
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
        # Each began with the same weights, and two ranks' sums have one order.
        (loss,) = {result["loss"][mode] for result in found.values()}
        assert math.isfinite(loss)
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
            assert len(host["cpu"]["all-gather"]) == len(gathers)
            assert len(host["agreeing"]) == {"inner": 0, "sdma": len(gathers)}.get(
                name, len(gathers) + len(host["calls"]["reduce-scatter"])
            )
    rows = [line for line in printed.splitlines() if line.startswith("| 0 |")]
    assert len(rows) == 2


def test_pairs_of_fsdp2_steps_and_their_floor(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    sizes = ("--device", "cpu", "--shapes", "1x64x16", "--steps", "3", "--warmup", "1")
    options = ("--pairs", "2", "--check", "--contestants", "none,inner,sdma")
    # Whether sdma is slower here is the machine's to say: that it is told alike is not.
    printed = torchrun("fsdp2_step.py", *sizes, *options, "--json", str(numbers), ends=(0, 1))
    (shape,) = json.loads(numbers.read_text())["shapes"]
    order = [(result["round"], result["contestant"]) for result in shape["results"]]
    assert order == [
        *((0, name) for name in ("none", "inner", "sdma")),
        *((1, name) for name in ("sdma", "inner", "none")),
    ]
    for result in shape["results"]:
        for mode in ("free", "sync"):
            counted = {name: len(of) for name, of in result["calls"][mode]["calls"].items()}
            # A gather and a scatter of the root and of the one block, and one more of the block
            # for its backward.
            assert counted == (
                {"all-gather": 0, "reduce-scatter": 0}
                if result["contestant"] == "none"
                else {"all-gather": 9, "reduce-scatter": 6}
            )
    for mode in ("free", "sync"):
        # Neither steps without gradients nor an earlier round leave anything behind.
        trained = [r for r in shape["results"] if r["contestant"] != "none"]
        (loss,) = {result["loss"][mode] for result in trained}
        assert math.isfinite(loss)
    assert list(shape["pairs"]) == ["none", "inner", "sdma"]
    assert shape["pairs"]["inner"]["free"]["saved"] == 0
    assert shape["pairs"]["none"]["free"]["cpu"] == 0 < shape["pairs"]["sdma"]["free"]["cpu"]
    table = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(table) == 1 + 1 + 6 and "median of 2 pairs" in table[0]
    slower = [
        of["saved"] < of["quartiles"][0] - of["quartiles"][1]
        for of in shape["pairs"]["sdma"].values()
    ]
    assert any(slower) == ("no contestant is slower than gloo" not in printed)


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
