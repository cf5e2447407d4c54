"""Tests that need a GPU: `make gpu-test`, or `pytest -m gpu tests/gpu`.

Where there are fewer GPUs than ranks, the ranks share them through an MPS daemon that is started
for them, and the wrapped backend is gloo; otherwise it is NCCL. This process has no part in that:
it never uses CUDA itself.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

# Before the first rank's process: the server it is forked from keeps this environment.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "group"))

import mps
import pytest
import torch
from groups import GpuRanks

CASES = 5000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=int, help=f"random all-gathers at each number of ranks ({CASES})"
    )


@pytest.fixture(scope="session")
def cases(pytestconfig: pytest.Config) -> int:
    return pytestconfig.getoption("--cases", default=None) or CASES


@pytest.fixture(scope="session")
def mps_client() -> Iterator[Callable[[], dict[str, str]]]:
    """Gives the environment of MPS's clients, and starts the daemon when first called."""
    with ExitStack() as until_the_end:

        @functools.cache
        def start() -> dict[str, str]:
            if not mps.available():
                pytest.skip(f"ranks that share a GPU need MPS: {mps.CONTROL} is not on PATH")
            return until_the_end.enter_context(mps.daemon())

        yield start


@pytest.fixture(scope="module")
def gpu_ranks(mps_client: Callable[[], dict[str, str]]) -> Iterator[GpuRanks]:
    """`gpu_ranks(size, ...)`: processes that the module's tests share. See groups.GpuRanks."""
    gpus = torch.cuda.device_count()  # by NVML, which makes no CUDA context
    if gpus == 0:
        pytest.skip("torch sees no GPU")
    ranks = GpuRanks(gpus, mps_client)
    yield ranks
    ranks.close()
