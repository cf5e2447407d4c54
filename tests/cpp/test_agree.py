"""All interleavings of small groups, through the code that agrees on routes in production."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cpp_program import ROOT, build, run

PROTOCOL = ROOT / "csrc/transport/agreement/protocol.h"
RULES = re.findall(r"static constexpr bool (\w+) = true;", PROTOCOL.read_text())

# world, operations, slots of the ring, whether exports are opened, faults; how many states at least
BOUNDS = [
    ((2, 4, 1, 0, 2), 300_000),
    ((2, 4, 1, 1, 2), 1_000_000),
    ((2, 4, 2, 0, 2), 1_000_000),
    ((2, 4, 2, 1, 2), 3_000_000),
    ((3, 2, 1, 0, 1), 1_000_000),
    ((3, 2, 1, 1, 1), 2_000_000),
    ((3, 3, 1, 0, 1), 5_000_000),
]
LARGE_BOUNDS = [
    ((3, 2, 1, 1, 2), 10_000_000),
    ((3, 3, 1, 1, 1), 20_000_000),
    ((3, 3, 2, 0, 1), 15_000_000),
]


@pytest.fixture(scope="module")
def explorer() -> Path:
    return build("explore_agree")


def check(explorer: Path, bounds: tuple[int, ...], at_least: int) -> None:
    done = run(explorer, *bounds)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    found = re.fullmatch(r"(\d+) states, (\d+) moves, at most (\d+) moves deep\n", done.stdout)
    assert found, done.stdout
    assert int(found[1]) > at_least, "the model has lost most of its states"


@pytest.mark.parametrize(("bounds", "at_least"), BOUNDS, ids=str)
def test_every_interleaving_is_right(
    explorer: Path, bounds: tuple[int, ...], at_least: int
) -> None:
    check(explorer, bounds, at_least)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("bounds", "at_least"), LARGE_BOUNDS, ids=str)
def test_every_interleaving_is_right_in_larger_groups(
    explorer: Path, bounds: tuple[int, ...], at_least: int
) -> None:
    check(explorer, bounds, at_least)


def test_the_explorer_knows_every_rule(explorer: Path) -> None:
    assert sorted(RULES) == run(explorer, "rules").stdout.split()


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_needed(explorer: Path, rule: str) -> None:
    for opens in (0, 1):
        done = run(explorer, 2, 3, 1, opens, 2, rule)
        if done.returncode == 1 and re.search(r"^VIOLATION after \d+ moves: ", done.stdout, re.M):
            return
        assert done.returncode == 0, done.stderr
    pytest.fail(f"no group of two ranks misses {rule}: is it superfluous?")
