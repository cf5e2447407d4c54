"""What benchmarks/gpu/kill.py takes for an end as it should be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kill import READY, Outcome, Plan, table

DIRECT = f"{READY}{{'all_gather': {{'direct': {{'calls': 18, 'bytes': 9}}}}}}"
LATE = f"{READY}{{'all_gather': {{'direct': {{'calls': 9}}, 'inner: late': {{'calls': 9}}}}}}"
NAMED = "pg_sdma: rank 0: waits for rank 1, whose process has ended. Ending this process."

GOOD = Outcome(Plan(3, 0.0), code=-6, seconds=0.3, said=f"{DIRECT}\n{NAMED}\n", bound=5.0)


def test_an_end_by_abort_that_names_the_rank_is_as_it_should_be() -> None:
    assert GOOD.failure == ""
    assert (GOOD.message, GOOD.ended_by) == (NAMED, "SIGABRT")
    assert replace(GOOD, code=1).ended_by == "exit code 1"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"code": None}, "still there after 5 s"),
        ({"code": 0}, "without an error"),
        ({"seconds": 5.1}, "longer than 5 s"),
        ({"said": f"{LATE}\n{NAMED}"}, "not direct"),
        ({"said": NAMED}, "not direct"),
        ({"said": DIRECT}, "names rank 1"),
        ({"said": f"{DIRECT}\nrank 0: waits for rank 10, whose process has ended"}, "names rank 1"),
        ({"said": f"{DIRECT}\nCUDA error: an illegal memory access"}, "names rank 1"),
    ],
)
def test_every_other_end_is_not(changed: dict[str, object], why: str) -> None:
    assert why in replace(GOOD, **changed).failure  # type: ignore[arg-type]


def test_the_table_counts_the_ends_as_they_should_be() -> None:
    lines = table([GOOD, replace(GOOD, code=0)])
    assert lines[2] == f"| 0 | 3 | SIGABRT | 0.30 s | {NAMED} |"
    assert "NOT AS IT SHOULD: rank 0 ended without an error" in lines[3]
    assert lines[-1].strip().startswith("1 of 2 times")


def test_plans_differ_and_can_be_had_again() -> None:
    plans = [Plan.draw(seed) for seed in range(20)]
    assert plans == [Plan.draw(seed) for seed in range(20)]
    assert len({plan.gathers for plan in plans}) > 2
    assert len({plan.delay for plan in plans}) > 1
