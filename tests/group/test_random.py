"""Random all-gathers: some on every run, 20,000 on two, three and four ranks each night.

random_gathers.py says what is drawn and how it is checked, and is a program for longer runs.
"""

from __future__ import annotations

import os

import pytest
from harness import RanksFailed, run_ranks
from random_gathers import MOST_BYTES, run_cases

DEVICE = os.environ.get("PG_SDMA_TEST_DEVICE", "cpu")


def run(size, seed, cases, most_bytes, spoiled=-1, **options):
    """Runs the cases and returns each rank's calls of the sdma groups, by route."""
    args = (seed, 0, cases, most_bytes, DEVICE, spoiled)
    return run_ranks(size, run_cases, *args, backend=f"{DEVICE}:sdma", **options)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_gathers(size):
    for routes in run(size, seed=size, cases=150, most_bytes=8 << 20):
        assert routes["direct"] > 0
        if DEVICE == "cpu":
            assert list(routes) == ["direct"]


def test_random_gathers_with_short_patience_and_a_short_ring():
    """Ranks are late now and then: calls go this way and that, each on all ranks alike."""
    env = {"PG_SDMA_PATIENCE_MS": "0.5", "PG_SDMA_RING": "2"}
    for routes in run(3, seed=11, cases=150, most_bytes=1 << 20, env=env):
        assert routes["inner: late"] > 0


def test_a_wrong_byte_is_reported_with_all_that_it_takes_to_see_it_again():
    with pytest.raises(RanksFailed) as failure:
        run(2, seed=5, cases=30, most_bytes=1 << 20, spoiled=17)
    report = str(failure.value)
    assert "rank 1: seed 5, case 17 (" in report
    assert "bytes are wrong, the first at " in report
    assert "--ranks 2 --seed 5 --device " in report and "--first 7 " in report


@pytest.mark.nightly
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_20000_random_gathers(size):
    run(size, seed=100 + size, cases=20_000, most_bytes=MOST_BYTES, timeout=1900.0)
