"""What we declare of the drivers is what the vendors' headers declare, for every header found here.

A CUDA toolkit is found under /usr/local, ROCm under /opt; CUDA builds of torch bring cuda.h in
their nvidia packages; Triton brings the headers of both vendors; PG_SDMA_CUDA_INCLUDE and
PG_SDMA_HIP_INCLUDE name other folders. `make test` downloads none, and skips what it does not find;
the tests marked nightly fetch Triton's wheel (190 MB) where no Triton is installed. It is unpacked,
never imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FETCHED = ROOT / "out" / "headers"
WHEEL = "triton==3.6.0"  # HIP 7.1, CUDA 12.8

HEADER = {"cuda": "cuda.h", "hip": "hip/hip_version.h"}
VERSION = {
    "cuda": re.compile(r"#define CUDA_VERSION (\d+)"),
    "hip": re.compile(r"#define HIP_VERSION_MAJOR (\d+)\s+#define HIP_VERSION_MINOR (\d+)"),
}
BACKEND = {"cuda": "nvidia", "hip": "amd"}  # of Triton
# A constant of each vendor, and where it is written down.
CONSTANTS = {
    "cuda": (
        "cuda.h",
        "CU_STREAM_MEM_OP_WAIT_VALUE_64",
        r"(CU_STREAM_MEM_OP_WAIT_VALUE_64\s*=) *4",
    ),
    "hip": (
        "hip/driver_types.h",
        "hipMemcpyDeviceToDeviceNoCU",
        r"(hipMemcpyDeviceToDeviceNoCU\s*=) *1024",
    ),
}

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")


def versions(vendor: str, folders: Iterable[Path]) -> list[Path]:
    """The include folders that hold the vendor's header, one of each version."""
    by_version: dict[tuple[str, ...], Path] = {}
    for folder in folders:
        header = folder / HEADER[vendor]
        if not header.is_file():
            continue
        if version := VERSION[vendor].search(header.read_text(errors="replace")):
            by_version.setdefault(version.groups(), folder)
    return [by_version[version] for version in sorted(by_version)]


def here(vendor: str) -> list[Path]:
    site = Path(sysconfig.get_paths()["purelib"])
    found = [
        Path(name) for name in os.environ.get(f"PG_SDMA_{vendor.upper()}_INCLUDE", "").split(":")
    ]
    found += [*Path("/usr/local").glob("cuda*/include"), *Path("/opt").glob("rocm*/include")]
    found += [
        *site.glob("nvidia/*/include"),
        site / "triton/backends" / BACKEND[vendor] / "include",
    ]
    return versions(vendor, found)


def compile_with(include: Path, vendor: str) -> subprocess.CompletedProcess[str]:
    folders = [f"-I{ROOT / 'csrc'}", f"-I{HERE}", f"-isystem{include}"]
    return subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", *folders, str(HERE / f"{vendor}_names.cpp")],
        capture_output=True,
        text=True,
        check=False,
    )


def agree(include: Path, vendor: str) -> None:
    done = compile_with(include, vendor)
    assert done.returncode == 0, done.stderr


FOUND = [(vendor, include) for vendor in HEADER for include in here(vendor)]


@pytest.mark.skipif(not FOUND, reason="no headers here")
@pytest.mark.parametrize(("vendor", "include"), FOUND, ids=str)
def test_declarations_match(vendor: str, include: Path) -> None:
    agree(include, vendor)


@pytest.fixture(scope="session")
def of_triton() -> Path:
    """The `backends` folder of a Triton, installed or fetched."""
    installed = Path(sysconfig.get_paths()["purelib"], "triton", "backends")
    if installed.is_dir():
        return installed
    unpacked = FETCHED / WHEEL
    if not unpacked.is_dir():
        wheels = FETCHED / "wheels"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(wheels),
        ]
        subprocess.run([*pip, WHEEL], check=True)
        [wheel] = wheels.glob("triton-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if "/include/" in name]
            packed.extractall(FETCHED / "partial", names)
        (FETCHED / "partial").rename(unpacked)
        wheel.unlink()
    return unpacked / "triton" / "backends"


@pytest.mark.nightly
@pytest.mark.parametrize("vendor", HEADER)
def test_declarations_match_the_headers_that_triton_brings(vendor: str, of_triton: Path) -> None:
    [include] = versions(vendor, [of_triton / BACKEND[vendor] / "include"])
    agree(include, vendor)


@pytest.mark.nightly
@pytest.mark.parametrize("vendor", HEADER)
def test_another_constant_is_noticed(vendor: str, of_triton: Path, tmp_path: Path) -> None:
    file, name, pattern = CONSTANTS[vendor]
    include = tmp_path / "include"
    shutil.copytree(of_triton / BACKEND[vendor] / "include", include)
    header = include / file
    text, changes = re.subn(pattern, r"\1 77", header.read_text(errors="replace"))
    assert changes > 0, f"{name} is not where it was"
    header.write_text(text)
    done = compile_with(include, vendor)
    assert done.returncode != 0 and name in done.stderr, done.stderr
