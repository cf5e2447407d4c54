"""What ranks have open of one another's memory, on the stand-in: found, kept and given back."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin_programs import LIBRARY, OUT, built, run

__all__ = ["built"]  # a fixture


@pytest.mark.parametrize(
    ("ranks", "outputs", "tickets"),
    [
        (2, 256, 128),
        (2, 1000, 4096),
        pytest.param(8, 4096, 4096, marks=pytest.mark.nightly),
    ],
)
def test_gathers_into_many_outputs(ranks: int, outputs: int, tickets: int, tmp_path: Path) -> None:
    numbers = [str(n) for n in (ranks, outputs, tickets)]
    done = run([OUT / "outputs", LIBRARY, tmp_path, *numbers], STANDIN_DEVICES=str(ranks))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", ["waits", "makes", "again"])
def test_what_peers_have_freed_is_closed(case: str, tmp_path: Path) -> None:
    done = run([OUT / "closing", LIBRARY, tmp_path, case])
    assert done.returncode == 0, done.stderr


def test_freed_memory_is_found_after_a_call_that_failed(tmp_path: Path) -> None:
    fail = {"STANDIN_FAIL": "cuPointerGetAttributes:120"}
    done = run([OUT / "closing", LIBRARY, tmp_path, "fails"], **fail)
    assert done.returncode == 0, done.stderr
