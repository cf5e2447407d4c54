"""All interleavings of small groups, through the code that carries late operations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cpp_program import ROOT, build, run
from test_agree import check

PROTOCOL = ROOT / "csrc/transport/agreement/late_protocol.h"
RULES = re.findall(r"static constexpr bool (\w+) = true;", PROTOCOL.read_text())

# world, operations, slots of the ring, faults; how many states at least
BOUNDS = [
    ((2, 5, 1, 2), 20_000),
    ((2, 5, 2, 2), 30_000),
    ((3, 3, 1, 1), 500_000),
    ((3, 3, 2, 1), 1_000_000),
]


@pytest.fixture(scope="module")
def explorer() -> Path:
    return build("explore_arrival")


@pytest.mark.parametrize(("bounds", "at_least"), BOUNDS, ids=str)
def test_every_interleaving_is_right(
    explorer: Path, bounds: tuple[int, ...], at_least: int
) -> None:
    check(explorer, bounds, at_least)


def test_the_explorer_knows_every_rule(explorer: Path) -> None:
    assert sorted(RULES) == run(explorer, "rules").stdout.split()


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_needed(explorer: Path, rule: str) -> None:
    done = run(explorer, 3, 2, 1, 1, rule)
    assert done.returncode == 1, f"no group of three ranks misses {rule}: is it superfluous?"
    assert re.search(r"^VIOLATION after \d+ moves: ", done.stdout, re.MULTILINE), done.stderr
