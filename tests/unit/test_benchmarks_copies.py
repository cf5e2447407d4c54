"""benchmarks/gpu/copies.py: what it copies and prints, and memory of another process."""

from __future__ import annotations

import os
import sys

import pytest
from copies import ONE, READ, WRITE, Copy, Memory, plan, table_of_one
from cpp_program import SANITIZE
from standin_programs import LIBRARY, ROOT, built, run

__all__ = ["built"]  # a fixture

OWN, OTHER = Memory(source=1000, output=2000), Memory(source=5000, output=6000)


def test_a_write_leaves_the_own_memory_and_a_read_comes_to_it() -> None:
    assert plan(WRITE, 1, 300, OWN, OTHER) == [Copy(0, to=6000, source=1000, size=300)]
    assert plan(READ, 3, 300, OWN, OTHER) == [
        Copy(0, to=2000, source=5000, size=100),
        Copy(1, to=2100, source=5100, size=100),
        Copy(2, to=2200, source=5200, size=100),
    ]


def test_one_copies_all_both_ways_on_a_stream_each() -> None:
    assert plan(ONE, 1, 300, OWN, OTHER) == [
        Copy(0, to=6000, source=1000, size=300),
        Copy(1, to=2000, source=5000, size=300),
    ]


def test_one_is_told_as_so_many_writes_by_whose_memory_it_is() -> None:
    lines = table_of_one(
        {"another's": {1 << 20: (300.0, 280.0, 150.0)}, "its own": {1 << 20: (300.0, 280.0, 300.0)}}
    )
    assert [line for line in lines if "GB/s" in line] == [
        "another's, GB/s in each direction",
        "its own, GB/s in each direction",
    ]
    assert [line.split() for line in lines if line.endswith("writes")] == [
        ["1048576", "300.0", "280.0", "150.0", "2.00", "writes"],
        ["1048576", "300.0", "280.0", "300.0", "1.00", "writes"],
    ]


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
