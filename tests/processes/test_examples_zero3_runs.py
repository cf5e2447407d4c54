"""The processes that the DeepSpeed example makes for its runs, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import train_zero3

PROGRAM = """
import os
import sys
from pathlib import Path
import torch.distributed as dist
sys.path.insert(0, {examples!r})
from zero3.processes import run_in_turn

if sys.argv[1:]:
    dist.init_process_group("gloo")
    line = f"run {{sys.argv[1]}} {{dist.get_rank()}} {{dist.get_world_size()}}\\n"
    os.write(1, line.encode())  # whole lines, whatever the other rank writes
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(3 if sys.argv[1] == "bad" else 0)
runs = {runs!r}
os.write(1, f"rank {{run_in_turn([[run] for run in runs])}}\\n".encode())
"""


def run_program(tmp_path: Path, runs: list[str]) -> tuple[int, str]:
    program = tmp_path / "program.py"
    examples = str(Path(train_zero3.__file__).parent)
    program.write_text(PROGRAM.format(examples=examples, runs=runs))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = subprocess.run(
        (sys.executable, *launch, str(program)), capture_output=True, text=True, timeout=120
    )
    return process.returncode, process.stdout


@pytest.mark.nightly
def test_every_run_gets_processes_and_a_group_of_its_own(tmp_path):
    code, output = run_program(tmp_path, ["first", "second"])
    assert code == 0
    assert sorted(output.splitlines()) == [
        "rank 0", "rank 1",
        "run first 0 2", "run first 1 2",
        "run second 0 2", "run second 1 2",
    ]  # fmt: skip


@pytest.mark.nightly
def test_a_run_that_fails_ends_the_program(tmp_path):
    code, output = run_program(tmp_path, ["bad", "never"])
    assert code != 0
    assert "rank" not in output
    assert "never" not in output
