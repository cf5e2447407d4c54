"""Ranks that leave their group while their devices have work pending, on the stand-in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from standin_programs import LIBRARY, OUT, built, run

__all__ = ["built"]  # a fixture


@pytest.mark.parametrize("case", ["backlog", "apart", "late", "departed"])
def test_a_rank_that_leaves_waits_for_what_it_has_enqueued(case: str, tmp_path: Path) -> None:
    """However long that takes, and peers do not take it for gone."""
    assert leave(tmp_path, case)[0] == ["exit code 0", "exit code 0"]


@pytest.mark.parametrize(
    ("case", "ends", "told"),
    [
        ("killed", ["signal 6", "signal 9"], "rank 0: .* the process of rank 1 has ended"),
        ("died-departed", ["signal 6", "signal 9"], "rank 0: .* the process of rank 1 has ended"),
        ("left", ["signal 6", "exit code 0"], "rank 0: .* rank 1 has destroyed the group"),
        ("never", ["signal 6", "exit code 0"], r"rank 0: .* it timed out\. Not called by rank 1"),
        ("aborted", ["signal 6", "signal 6"], "rank 0 aborted the group"),
        ("failed", ["exit code 0", "signal 6"], "rank 0 left .* its device has failed .*719"),
    ],
)
def test_a_rank_that_leaves_and_cannot_complete_ends(
    case: str, ends: list[str], told: str, tmp_path: Path
) -> None:
    ended, errors = leave(tmp_path, case)
    assert ended == ends, errors
    assert re.search(f"^pg_sdma: {told}", errors, re.MULTILINE), errors


def leave(folder: Path, case: str) -> tuple[list[str], str]:
    """How both ranks ended, and what they said."""
    done = run([OUT / "leaving", LIBRARY, folder, case], seconds=50)
    return re.findall(r"^rank \d: (.*)$", done.stdout, re.MULTILINE), done.stderr
