"""The order that a chain of device tensors keeps on the device, on the stand-in for the drivers."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin_programs import CUDA, HIP, build_with_torch, built, needs_a_torch_for_cpus, run

__all__ = ["built"]  # a fixture

pytestmark = needs_a_torch_for_cpus


@pytest.fixture(scope="module")
def program(built: None) -> Path:
    return build_with_torch("chain_order")


@pytest.mark.parametrize("driver", [CUDA, HIP], ids=["cuda", "hip"])
@pytest.mark.parametrize("seed", range(4))
def test_collectives_keep_their_order(program: Path, driver: str, seed: int) -> None:
    """800 by each, over streams, routes, Works and captures: each copies the byte before it."""
    done = run([program, driver, "200", str(seed)], STANDIN_DELAY_US="200")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "in order\n"
