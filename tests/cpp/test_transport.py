"""The transport and the host engine under random load, without torch.

tests/cpp/sanitize.py runs these same tests on programs built with sanitizers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cpp_program import ROOT, SANITIZE, build, run

LIBRARY = [
    *sorted(str(file.relative_to(ROOT / "csrc")) for file in ROOT.glob("csrc/transport/**/*.cpp")),
    "engine/host.cpp",
    "engine/past_caches.cpp",
    "engine/inject.cpp",
]


@pytest.fixture(scope="module")
def stress() -> Path:
    return build("stress_transport", LIBRARY)


def counts(program: Path, *arguments: object) -> dict[str, int]:
    """How many operations went which way: direct, inner, error, unfinished."""
    done = run(program, *arguments)
    assert done.returncode == 0, f"{arguments}:\n{done.stdout}{done.stderr}"
    return {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", done.stdout)}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", ["pull", "slots"])
@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_gathers_are_right(stress: Path, ranks: str, way: str, world: int) -> None:
    went = counts(stress, ranks, way, "none", world, 500, 0, 1)
    assert went["inner"] == went["unfinished"] == 0
    assert went["direct"] > 400
    assert went["error"] > 20


@pytest.mark.parametrize(
    "program",
    ["check_tickets", "check_preference", "check_cores", "check_peers", "check_wait_policy"],
)
def test_small_parts(program: str) -> None:
    done = run(build(program, LIBRARY))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("patience", [100, 2000])
@pytest.mark.parametrize("way", ["pull", "slots"])
@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_gathers_are_right_where_ranks_are_late(
    stress: Path, ranks: str, way: str, patience: int
) -> None:
    if SANITIZE:
        patience *= 20  # sanitized ranks that are on time come that much later
    went = counts(stress, ranks, way, "none", 3, 1000, patience, 2)
    assert went["unfinished"] == 0
    assert went["direct"] > 0
    assert went["inner"] > 0


@pytest.mark.parametrize(("way", "seed"), [("pull", 0), ("slots", 1), ("slots", 2)])
@pytest.mark.parametrize("patience", [0, 300])
@pytest.mark.parametrize(
    ("ranks", "fate"),
    [
        ("processes", "killed"),
        ("processes", "exits"),
        ("processes", "departs"),
        ("processes", "aborts"),
        ("threads", "departs"),
        ("threads", "aborts"),
    ],
)
def test_the_others_are_told_who_left(
    stress: Path, ranks: str, fate: str, patience: int, way: str, seed: int
) -> None:
    counts(stress, ranks, way, fate, 3, 100, patience, seed)


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_the_others_are_told_who_stalls(stress: Path, ranks: str) -> None:
    went = counts(stress, ranks, "slots", "stalls", 3, 40, 0, 1)
    assert went["unfinished"] == 20


@pytest.mark.parametrize(("way", "seed"), [("pull", 11), ("slots", 11), ("slots", 13)])
def test_the_others_are_told_who_is_stopped(stress: Path, way: str, seed: int) -> None:
    counts(stress, "processes", way, "stops", 3, 40, 0, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("fate", ["killed", "aborts"])
def test_the_others_are_told_at_many_moments(stress: Path, fate: str) -> None:
    for seed in range(100):
        counts(stress, "processes", "slots", fate, 2 + seed % 3, 100, 0, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("patience", [0, 50, 500, 3000])
@pytest.mark.parametrize("way", ["pull", "slots"])
@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_many_gathers_are_right(
    stress: Path, ranks: str, way: str, patience: int, seed: int
) -> None:
    went = counts(stress, ranks, way, "none", 2 + seed % 4, 5000, patience, seed)
    assert went["unfinished"] == 0
    assert (went["inner"] > 0) == (patience > 0)


@pytest.mark.parametrize("world", [2, 3])
def test_votes_come_to_one_result(world: int) -> None:
    done = run(build("stress_vote", LIBRARY), world, 14 * world, 1)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", [2, 3])
def test_a_group_is_made_again_and_again_on_one_store(world: int, seed: int) -> None:
    done = run(build("stress_makings", LIBRARY), world, 200, seed)
    assert done.returncode == 0, done.stderr
    [(groups, failed)] = re.findall(r"(\d+) groups, (\d+) failed", done.stdout)
    assert int(groups) == 200 and int(failed) > 5
