"""Coalesced all-gathers of device tensors that go to the inner, on the stand-in for the drivers."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin_programs import CUDA, build_with_torch, built, needs_a_torch_for_cpus, run

__all__ = ["built"]  # a fixture

pytestmark = needs_a_torch_for_cpus


@pytest.fixture(scope="module")
def program(built: None) -> Path:
    return build_with_torch("coalesced_gathers")


@pytest.mark.parametrize("seed", range(2))
def test_gloo_gets_device_tensors_one_at_a_time(program: Path, seed: int) -> None:
    """It would end the process; who waits for the call waits for all, and hears of any failure."""
    done = run([program, CUDA, str(seed)], STANDIN_DELAY_US="2000")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "one by one\n"
