"""Random reduce-scatters: some on every run, 5,000 on two, three and four ranks each night.

random_reductions.py says what is drawn and how it is checked, and is a program for longer runs.
"""

from __future__ import annotations

import pytest
from harness import RanksFailed, run_ranks
from random_gathers import MOST_BYTES
from random_reductions import run_cases

BOTH = {"PG_SDMA_OPS": "all_gather,reduce_scatter"}


def run(size, seed, cases, most_bytes, spoiled=-1, env=None, **options):
    """Runs the cases and returns each rank's calls of the sdma groups, by route."""
    args = (seed, 0, cases, most_bytes, spoiled)
    return run_ranks(size, run_cases, *args, env={**BOTH, **(env or {})}, **options)


ALWAYS_INNER = {"inner: reduce operation MAX", "inner: reduce-scatter of Long"}


@pytest.mark.parametrize(
    ("size", "landing_bytes"), [(2, 4096), (3, 64 << 20), (4, 100_000)], ids=str
)
def test_random_reduce_scatters(size, landing_bytes):
    env = {"PG_SDMA_LANDING_BYTES": str(landing_bytes)}
    for routes in run(size, seed=size, cases=100, most_bytes=4 << 20, env=env):
        assert routes.pop("direct") > 0
        assert set(routes) == ALWAYS_INNER


def test_late_ranks_get_the_same_bits():
    """Calls go this way and that, each on all ranks alike, and no result tells which."""
    env = {"PG_SDMA_PATIENCE_MS": "0.5", "PG_SDMA_RING": "2", "PG_SDMA_LANDING_BYTES": "50000"}
    for routes in run(3, seed=11, cases=100, most_bytes=1 << 20, env=env):
        assert routes["inner: late"] > 0


def test_a_wrong_number_is_reported_with_all_that_it_takes_to_see_it_again():
    with pytest.raises(RanksFailed) as failure:
        run(2, seed=5, cases=30, most_bytes=1 << 20, spoiled=17)
    report = str(failure.value)
    assert "rank 0: seed 5, case 17 (" in report
    assert "numbers are wrong, the first at 0: " in report
    assert "random_reductions.py --ranks 2 --seed 5 --device cpu" in report
    assert "--first 7 " in report


@pytest.mark.nightly
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_5000_random_reduce_scatters(size):
    run(size, seed=100 + size, cases=5_000, most_bytes=MOST_BYTES, timeout=1900.0)
