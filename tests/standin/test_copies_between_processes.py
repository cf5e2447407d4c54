"""benchmarks/gpu/copies.py: memory of another process."""

from __future__ import annotations

import os
import sys

import pytest
from cpp_program import SANITIZE
from standin_programs import LIBRARY, ROOT, built, run

__all__ = ["built"]  # a fixture

BOTH_WAYS = """
from copies import ONE, Memory, of_another_process, plan
from cuda_driver import Driver

SIZE = 1 << 16
driver = Driver()
own = Memory(driver.alloc(SIZE), driver.alloc(SIZE))
mine, theirs = (bytes([n]) * SIZE for n in (7, 9))
with of_another_process(driver, SIZE) as other:
    driver.put(own.source, mine)
    driver.put(other.source, theirs)
    streams = [driver.stream() for _ in range(2)]
    for copy in plan(ONE, 1, SIZE, own, other):
        driver("cuMemcpyAsync", copy.to, copy.source, copy.size, streams[copy.stream])
    for stream in streams:
        driver("cuStreamSynchronize", stream)
    assert driver.get(other.output, SIZE) == mine
    assert driver.get(own.output, SIZE) == theirs
print("both ways")
"""


@pytest.mark.skipif(bool(SANITIZE), reason="Python cannot load a library built with sanitizers")
def test_memory_of_another_process_is_copied_both_ways() -> None:
    path = os.pathsep.join([str(ROOT / "benchmarks" / "gpu"), str(ROOT / "tests" / "gpu")])
    done = run([sys.executable, "-c", BOTH_WAYS], PG_SDMA_DRIVER=str(LIBRARY), PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (0, "both ways\n"), done.stderr
