"""What benchmarks/gpu/kill.py takes for an end as it should be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kill import LONGEST_DELAY, MARGIN, READY, Outcome, Plan, end, table

DIRECT = f"{READY}{{'all_gather': {{'direct': {{'calls': 18, 'bytes': 9}}}}}}"
LATE = f"{READY}{{'all_gather': {{'direct': {{'calls': 9}}, 'inner: late': {{'calls': 9}}}}}}"
NAMED = "pg_sdma: rank 0: waits for rank 1, whose process has ended. Ending this process."

GOOD = Outcome(
    Plan(victim=1, gathers=3, delay=0.0021),
    killed=-9,
    code=-6,
    seconds=0.3,
    said=f"{DIRECT}\n{NAMED}\n",
    victim_said="last words",
    bound=5.0,
)


def test_an_end_by_abort_that_names_the_rank_is_as_it_should_be() -> None:
    assert GOOD.failure == ""
    assert (GOOD.message, end(GOOD.code)) == (NAMED, "SIGABRT")
    assert (end(1), end(None)) == ("exit code 1", "nothing")


def test_it_is_the_rank_that_was_killed_that_has_to_be_named() -> None:
    other = replace(GOOD, plan=Plan(victim=0, gathers=3, delay=0.0021))
    assert other.failure == "no message of rank 1 names rank 0"
    said = f"{DIRECT}\nrank 1: waits for rank 0, whose process has ended"
    assert replace(other, said=said).failure == ""
    assert replace(GOOD, said=said).failure == "no message of rank 0 names rank 1"


def test_the_victim_speaks_only_where_it_was_not_killed() -> None:
    assert GOOD.victim_said not in GOOD.report
    assert GOOD.victim_said in replace(GOOD, killed=1).report


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"killed": 1}, "rank 1 did not come to kill itself: ended by exit code 1"),
        ({"killed": None}, "ended by nothing"),
        ({"code": None, "seconds": 35.0}, "still there after 35.0 s"),
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
    assert lines[2] == f"| 0 | rank 1 | 2.1 ms | 3 | 0.0 s | SIGABRT | 0.30 s | {NAMED} |"
    assert "NOT AS IT SHOULD: rank 0 ended without an error" in lines[3]
    assert lines[-1].strip().startswith("1 of 2 times")


def test_plans_differ_and_can_be_had_again() -> None:
    plans = [Plan.draw(seed) for seed in range(20)]
    assert plans == [Plan.draw(seed) for seed in range(20)]
    assert len({plan.gathers for plan in plans}) > 2
    assert {plan.victim for plan in plans} == {0, 1}
    assert all(0 <= plan.delay <= LONGEST_DELAY and plan.gathers > 0 for plan in plans)
    assert len({plan.delay for plan in plans}) == len(plans)
    assert all(plan.survivor == 1 - plan.victim for plan in plans)


def test_plans_with_a_backlog_kill_ranks_that_leave_before_it_is_worked_off() -> None:
    plans = [Plan.draw(seed, 8.0) for seed in range(40)]
    assert all(0 <= plan.backlog <= 8 for plan in plans)
    leaving = [plan for plan in plans if plan.leaves]
    assert 5 < len(leaving) < 35
    assert all(plan.delay <= plan.backlog - MARGIN for plan in leaving)
    assert any(plan.backlog > 4 for plan in leaving)
    assert Plan.draw(7) == Plan.draw(7, 0.0) and not Plan.draw(7).leaves
