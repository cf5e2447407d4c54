"""`pg-sdma` on CPU ranks of its own, and under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = ("bench", "all_gather", "--device", "cpu", "-n", "3", "-w", "1")


def pg_sdma(*command: str, torchrun: bool = False, status: int = 0, **environ: str) -> str:
    """Runs the command line to its end, with exit status `status`; returns what it printed."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    module = (*start, "-m", "pg_sdma") if torchrun else ("-m", "pg_sdma")
    process = subprocess.run(
        (sys.executable, *module, *command),
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == status, process.stdout + process.stderr
    return process.stdout


@pytest.mark.parametrize("torchrun", [False, True])
def test_bench_measures_both_backends_and_checks_them(torchrun: bool, tmp_path: Path) -> None:
    ranks = () if torchrun else ("--ranks", "2")
    picture, numbers = tmp_path / "curves.png", tmp_path / "numbers.json"
    files = ("--json", str(numbers), "--plot", str(picture))
    printed = pg_sdma(
        *BENCH, *ranks, "-b", "64", "-e", "64K", "-f", "32", *files, torchrun=torchrun
    )

    result = json.loads(numbers.read_text())
    assert (result["backend"], result["vs"], result["ranks"]) == ("sdma", "gloo", 2)
    rows = result["rows"]
    assert [(row["size"], row["place"]) for row in rows] == [
        (size, place) for size in (64, 2048, 65536) for place in ("out", "in")
    ]
    for row in rows:
        assert row["count"] * 4 * 2 == row["size"]
        assert row["wrong"] == row["vs_wrong"] == 0
        assert row["route"] == "direct"
        assert row["times"]["time"] > 0 and row["vs"]["time"] > 0
    assert result["peak"]["size"] == 65536
    assert set(result["peak"]["shares"]) == {"out", "in"}
    assert "# Avg bus bandwidth: " in printed
    assert printed.count("than gloo") == 2
    table = [line for line in printed.splitlines() if not line.startswith("#")]
    assert [line.split()[0] for line in table] == [str(row["size"]) for row in rows]
    assert "# 0 elements were wrong" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_coalesces_in_groups_and_leaves_comparison_and_check_out(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    sizes = ("-b", "6K", "-e", "6K", "--dtype", "bfloat16", "--in-place")
    groups = ("--ranks", "4", "--groups", "2", "--coalesced", "3")
    pg_sdma(*BENCH, *sizes, *groups, "--vs", "none", "-c", "0", "--json", str(numbers))
    (row,) = json.loads(numbers.read_text())["rows"]
    assert (row["size"], row["count"], row["ranks"]) == (6144, 512, 2)
    assert (row["vs"], row["wrong"], row["ratio"]) == (None, None, None)
    assert row["route"] == "direct"


def test_a_coalesced_call_is_compared_with_a_call_for_each_tensor(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    sizes = ("-b", "8K", "-e", "8K", "--coalesced", "4", "--vs", "apart", "--check")
    pg_sdma(*BENCH, *sizes, "--json", str(numbers))
    result = json.loads(numbers.read_text())
    assert (result["backend"], result["vs"]) == ("sdma", "sdma, apart")
    for row in result["rows"]:
        assert row["route"] == "direct"
        assert row["wrong"] == row["vs_wrong"] == 0
        assert row["vs"]["time"] > 0


def test_bench_shows_the_route_that_was_taken(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    sizes = ("-b", "1K", "-e", "1K", "--out-of-place")
    # DETAIL hides the backend behind a wrapper.
    environ = {"PG_SDMA_MIN_BYTES": "2048", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    pg_sdma(*BENCH, *sizes, "--json", str(numbers), **environ)
    (row,) = json.loads(numbers.read_text())["rows"]
    assert row["route"] == "inner: below 2048 bytes (PG_SDMA_MIN_BYTES)"


def test_reduce_scatters_go_direct_whatever_the_environment_says(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    sizes = ("-b", "4K", "-e", "64K", "-f", "16", "--dtype", "bfloat16")
    command = ("bench", "reduce_scatter", *BENCH[2:], *sizes)
    printed = pg_sdma(*command, "--json", str(numbers), PG_SDMA_OPS="all_gather")
    result = json.loads(numbers.read_text())
    assert (result["operation"], result["size_of"]) == ("reduce_scatter", "input")
    rows = result["rows"]
    assert [(row["size"], row["place"]) for row in rows] == [
        (size, place) for size in (4096, 65536) for place in ("out", "in")
    ]
    for row in rows:
        assert row["count"] * 2 * 2 == row["size"]
        assert row["wrong"] == row["vs_wrong"] == 0
        assert (row["redop"], row["route"]) == ("sum", "direct")
    table = [line.split() for line in printed.splitlines() if not line.startswith("#")]
    assert {line[3] for line in table} == {"sum"}


def test_rivals_that_cannot_run_here_leave_the_others_running(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    sizes = ("-b", "4K", "-e", "64K", "-f", "16", "--json", str(numbers))
    printed = pg_sdma("bench", "rivals", *BENCH[2:], *sizes)
    result = json.loads(numbers.read_text())
    assert result["contenders"] == ["sdma", "gloo"]
    assert set(result["absent"]) == {"zero-CTA", "low-contention", "peer copy"}
    assert [(row["size"], row["place"]) for row in result["rows"]] == [
        (size, place) for size in (4096, 65536) for place in ("in", "out")
    ]
    for row in result["rows"]:
        assert row["wrong"] == {"sdma": 0, "gloo": 0}
        assert row["route"] == "direct"
        assert all(times["time"] > 0 for times in row["times"].values())
    assert sum(line.startswith(("| 4096 |", "| 65536 |")) for line in printed.splitlines()) == 4
    assert "not measured: zero-CTA: rank 0: RuntimeError: needs a GPU" in printed
