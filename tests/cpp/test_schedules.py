"""All schedules: their programs in random orders, and what goes wrong without each rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cpp_program import build, run
from test_transport import LIBRARY

RULES = {
    "pull": ["no-ready", "early-done", "no-done"],
    "push": ["no-ready", "early-done", "no-done"],
    "thread": ["early-done", "no-done"],
    "late": ["no-ready", "own-last", "together", "early-done", "no-done"],
    "sums": ["no-ready", "early-done", "no-done", "no-join", "no-fork"],
    "thread-sums": ["early-done", "no-done"],
    "staged": ["no-filled", "early", "ahead"],
}
WORLDS = [2, 3]  # more ranks find nothing more, and take longer
# Staging buffers of a rank: they are used again and again where there are few.
CASES = [
    (schedule, world, buffers)
    for schedule in RULES
    for world in WORLDS
    for buffers in ([2, 4, 8] if schedule == "staged" else [8])
]
RUNS = 200


@pytest.fixture(scope="module")
def explorer() -> Path:
    return build("explore_schedules", LIBRARY)


@pytest.mark.parametrize(("schedule", "world", "buffers"), CASES)
def test_programs_are_right_in_any_order(
    explorer: Path, schedule: str, world: int, buffers: int
) -> None:
    done = run(explorer, schedule, world, buffers, RUNS, 1)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"(\d+) steps, (\d+) times one was not ready\n", done.stdout)
    assert found, done.stdout
    assert int(found[2]) > 5_000, "nobody has to wait: the orders are not random enough"


@pytest.mark.parametrize(
    ("schedule", "world", "buffers", "rule"),
    [(*case, rule) for case in CASES for rule in RULES[case[0]]],
)
def test_every_rule_is_needed(
    explorer: Path, schedule: str, world: int, buffers: int, rule: str
) -> None:
    done = run(explorer, schedule, world, buffers, RUNS, 1, rule)
    assert done.returncode == 1
    assert "wrong byte" in done.stderr
