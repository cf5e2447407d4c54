"""benchmarks/gpu/copies.py: what it copies and prints."""

from __future__ import annotations

from copies import ONE, READ, WRITE, Copy, Memory, plan, table_of_one

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
