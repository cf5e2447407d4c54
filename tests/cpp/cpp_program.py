"""Builds the C++ programs of tests/cpp, which need no torch, and runs them.

With PG_SDMA_TEST_SANITIZE (`address,undefined` or `thread`) in the environment they, and those of
tests/standin, are built with these sanitizers and fail on any report: see tests/cpp/sanitize.py.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZE = os.environ.get("PG_SDMA_TEST_SANITIZE", "")
COMPILER = os.environ.get("CXX", "g++")


# -Wno-tsan: the thread sanitizer does not know fences. Those here only order payloads that are
# atomics themselves.
SANITIZE_FLAGS = [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", "-Wno-tsan"]
SANITIZE_FLAGS += ["-O1", "-g", "-fno-omit-frame-pointer"]


def _flags() -> list[str]:
    flags = ["-std=c++20", "-Wall", "-Wextra", f"-I{ROOT / 'csrc'}", "-pthread"]
    return flags + (SANITIZE_FLAGS if SANITIZE else ["-O2"])


def _once(target: Path, command: list[str]) -> Path:
    """Runs `command` to make `target`, whose name tells its content, where it is not there yet."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        partial.rename(target)
    return target


def build(program: str, library: Sequence[str] = ()) -> Path:
    """Compiles tests/cpp/<program>.cpp and the `library` files of csrc, where that is not done yet.

    Skips the test where there is no compiler.
    """
    if not shutil.which(COMPILER):
        pytest.skip(f"no {COMPILER} here")
    compile_one = [COMPILER, *_flags()]
    headers = sorted([*(ROOT / "tests/cpp").glob("*.h"), *(ROOT / "csrc").rglob("*.h")])
    common = hashlib.sha256(repr(compile_one).encode())
    for header in headers:
        common.update(header.read_bytes())

    def compiled(source: Path) -> Path:
        digest = common.copy()
        digest.update(source.read_bytes())
        target = ROOT / "build" / "cpp" / f"{source.stem}-{digest.hexdigest()[:16]}.o"
        return _once(target, [*compile_one, "-c", str(source)])

    sources = [ROOT / "tests/cpp" / f"{program}.cpp", *(ROOT / "csrc" / name for name in library)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(file) for file in pool.map(compiled, sources)]
    digest = hashlib.sha256(repr(objects).encode()).hexdigest()[:16]
    return _once(ROOT / "build" / "cpp" / f"{program}-{digest}", [*compile_one, *objects])


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the program; its exit code is the caller's to judge."""
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)
