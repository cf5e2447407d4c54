"""The order that a chain of device tensors keeps on the device, on the stand-in for the drivers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from cpp_program import SANITIZE
from standin_programs import CUDA, HIP, OUT, STANDIN, built, run

__all__ = ["built"]  # a fixture

pytestmark = [
    pytest.mark.skipif(bool(SANITIZE), reason="torch is not built with sanitizers"),
    pytest.mark.skipif(
        bool(torch.version.cuda or torch.version.hip),
        reason="a torch with a device of its own, whose place the stand-in would take",
    ),
]


@pytest.fixture(scope="module")
def program(built: None) -> Path:
    target = OUT / "chain_order"
    torch_folder = f"TORCH={Path(torch.__file__).parent}"
    subprocess.run(["make", "-s", "-C", STANDIN, f"OUT={OUT}", torch_folder, target], check=True)
    return target


@pytest.mark.parametrize("driver", [CUDA, HIP], ids=["cuda", "hip"])
@pytest.mark.parametrize("seed", range(4))
def test_collectives_keep_their_order(program: Path, driver: str, seed: int) -> None:
    """800 by each, over streams, routes, Works and captures: each copies the byte before it."""
    done = run([program, driver, "200", str(seed)], STANDIN_DELAY_US="200")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "in order\n"
