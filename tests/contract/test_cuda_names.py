"""What we declare of CUDA's driver is what cuda.h declares, for every cuda.h found here.

A toolkit is found under /usr/local; CUDA builds of torch bring cuda.h in their nvidia and triton
packages; PG_SDMA_CUDA_INCLUDE names another folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def headers() -> list[Path]:
    """The cuda.h files of this machine that are of different CUDA versions."""
    site = Path(sysconfig.get_paths()["purelib"])
    found = [*Path("/usr/local").glob("cuda*/include/cuda.h")]
    found += [*site.glob("nvidia/*/include/cuda.h"), *site.glob("triton/backends/*/include/cuda.h")]
    if extra := os.environ.get("PG_SDMA_CUDA_INCLUDE"):
        found += [Path(folder) / "cuda.h" for folder in extra.split(":")]
    by_version = {}
    for header in found:
        if version := re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace")):
            by_version.setdefault(version[1], header)
    return [by_version[version] for version in sorted(by_version)]


@pytest.mark.skipif(not headers(), reason="no cuda.h here")
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")
@pytest.mark.parametrize("header", headers(), ids=str)
def test_declarations_match(header: Path) -> None:
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", f"-I{header.parent}"]
    done = subprocess.run(
        [*command, str(HERE / "cuda_names.cpp")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
