"""The slots of the host engine: their programs in random orders, and what is too few of a rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cpp_program import build, run
from test_transport import LIBRARY

WORLDS = [2, 3, 4]
SLOTS = [2, 4, 8]


@pytest.fixture(scope="module")
def explorer() -> Path:
    return build("explore_slots", LIBRARY)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("world", WORLDS)
def test_programs_are_right_in_any_order(explorer: Path, world: int, slots: int) -> None:
    done = run(explorer, world, slots, 1000, 1)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"(\d+) steps, (\d+) waits, (\d+) times one had to wait\n", done.stdout)
    assert found, done.stdout
    assert int(found[2]) > 50_000
    assert int(found[3]) > 100_000, "nobody has to wait: the orders are not random enough"


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rule", ["no-wait", "early", "ahead"])
def test_every_rule_is_needed(explorer: Path, world: int, slots: int, rule: str) -> None:
    done = run(explorer, world, slots, 1000, 1, rule)
    assert done.returncode == 1
    assert "wrong byte" in done.stderr
