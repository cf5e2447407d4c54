"""What the Works of calls on device tensors give, on the stand-in for the drivers."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin_programs import CUDA, HIP, build_with_torch, built, needs_a_torch_for_cpus, run

__all__ = ["built"]  # a fixture

pytestmark = needs_a_torch_for_cpus


@pytest.fixture(scope="module")
def program(built: None) -> Path:
    return build_with_torch("results")


@pytest.mark.parametrize("driver", [CUDA, HIP], ids=["cuda", "hip"])
def test_results_are_the_inners_by_either_way(program: Path, driver: str) -> None:
    """Direct, late, and in parts of which some were late; NCCL gives a list as one tensor."""
    done = run([program, driver], STANDIN_DELAY_US="2000")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the inner's\n"
