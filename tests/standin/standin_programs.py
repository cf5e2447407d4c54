"""The stand-in for the drivers and its programs, in tests/standin: built, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cpp_program import SANITIZE, SANITIZE_FLAGS

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "tests" / "standin"
OUT = ROOT / "out" / (f"standin-{SANITIZE}" if SANITIZE else "standin")
LIBRARY = OUT / "libpgsdma_standin.so"
CUDA, HIP = str(LIBRARY), f"hip:{LIBRARY}"  # the same library, by whose names it is called


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Builds the stand-in and its programs where their sources are newer."""
    if not (shutil.which("make") and shutil.which("g++")):
        pytest.skip("make and g++ are needed")
    flags = [f"CXXFLAGS={' '.join(SANITIZE_FLAGS)}"] if SANITIZE else []
    subprocess.run(["make", "-s", "-j2", "-C", STANDIN, f"OUT={OUT}", *flags], check=True)


# Of programs in which torch's CUDA device is the stand-in.
needs_a_torch_for_cpus = [
    pytest.mark.skipif(bool(SANITIZE), reason="torch is not built with sanitizers"),
    pytest.mark.skipif(
        bool(torch.version.cuda or torch.version.hip),
        reason="a torch with a device of its own, whose place the stand-in would take",
    ),
]


def build_with_torch(program: str) -> Path:
    target = OUT / program
    torch_folder = f"TORCH={Path(torch.__file__).parent}"
    subprocess.run(["make", "-s", "-C", STANDIN, f"OUT={OUT}", torch_folder, target], check=True)
    return target


def run(
    command: list[str | Path], seconds: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=os.environ | env, check=False
    )
