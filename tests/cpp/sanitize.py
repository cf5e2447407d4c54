"""Runs the tests of transport and engines on programs built with sanitizers; fails on any report.

`address,undefined` finds bad memory accesses, leaks and undefined behaviour; `thread` finds data
races, for which the transport's tests also run ranks as threads over one mapping of the control
page. ASAN_OPTIONS, UBSAN_OPTIONS and TSAN_OPTIONS are heeded; arguments go to pytest. Needs g++ and
its sanitizer libraries, which Debian's g++ brings along, and no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SANITIZERS = ("address,undefined", "thread")
TESTS = (
    "tests/cpp/test_transport.py",
    "tests/cpp/test_schedules.py",
    "tests/standin/test_standin.py",
    "tests/standin/test_standin_sharing.py",
    "tests/standin/test_standin_vote.py",
)


def main(arguments: list[str]) -> int:
    failed = []
    for sanitizer in SANITIZERS:
        print(f"== {sanitizer}", flush=True)
        pytest = [sys.executable, "-m", "pytest", *TESTS, *arguments]
        # A rank that ends by a signal or _exit() could not fail for a race at its end.
        # A test loads the stand-in for a driver a second time, as a copy.
        defaults = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_odr_violation=0"}
        environment = defaults | os.environ
        environment["PG_SDMA_TEST_SANITIZE"] = sanitizer
        if subprocess.run(pytest, cwd=ROOT, env=environment).returncode != 0:
            failed.append(sanitizer)
    if failed:
        print(f"failed with: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
