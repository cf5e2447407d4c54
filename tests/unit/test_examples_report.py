"""What the examples write: result.json, the table and the picture of a comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest

from common import report
from common.loop import Run
from common.report import (
    draw_losses,
    max_abs_loss_difference,
    require_extras,
    write_report,
)

INNER = Run(
    transport="inner",
    backend="cpu:gloo",
    first_step=0,
    losses=[5.5, 3.0, 2.5],
    ms_per_step=100.0,
    tokens_per_s=1000.0,
    peak_memory_bytes=None,
    fast_path_share=None,
)
SDMA = replace(
    INNER,
    transport="sdma",
    backend="cpu:sdma",
    ms_per_step=80.0,
    tokens_per_s=1250.0,
    fast_path_share=0.875,
)
SETUP = {
    "trainer": "FSDP2",
    "parameters": 869_504,
    "param_dtype": "bf16",
    "ranks": 2,
    "device_name": "CPU",
}


def test_equal_losses_differ_by_exactly_nothing() -> None:
    assert max_abs_loss_difference(INNER, SDMA) == 0


def test_the_largest_difference_counts_whatever_its_sign() -> None:
    assert max_abs_loss_difference(INNER, replace(SDMA, losses=[5.75, 2.0, 2.5])) == 1


@pytest.mark.parametrize("other", [{"losses": [5.5, 3.0]}, {"first_step": 1}])
def test_runs_of_other_steps_are_not_compared(other: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="steps differ: inner made 3 from 0"):
        max_abs_loss_difference(INNER, replace(SDMA, **other))


def test_a_comparison_leaves_result_picture_and_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report([INNER, SDMA], SETUP, tmp_path / "out")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["steps"] == 3
    assert result["ms_per_step"] == {"inner": 100.0, "sdma": 80.0}
    assert result["tokens_per_s"] == {"inner": 1000.0, "sdma": 1250.0}
    assert result["fast_path_share"] == 0.875
    assert result["max_abs_loss_difference"] == 0
    assert result["losses"]["sdma"] == SDMA.losses
    assert result["parameters"] == 869_504
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for cell in ("cpu:gloo", "cpu:sdma", "-20.0 %", "+25.0 %", "87.5%"):
        assert cell in printed


def test_a_single_run_leaves_its_result_and_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report([INNER], SETUP, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ms_per_step"] == {"inner": 100.0}
    assert result["max_abs_loss_difference"] is None
    assert not (tmp_path / "loss.png").exists()
    assert "cpu:gloo: 100.0 ms a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "note"),
    [(INNER.losses, "exactly 0 in all 3 steps"), ([5.5, 3.0, 2.75], "largest 0.25")],
)
def test_the_picture_says_how_far_the_losses_differ(
    losses: list[float], note: str, tmp_path: Path
) -> None:
    path = tmp_path / "loss.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text, not as outlines
        draw_losses(INNER, replace(SDMA, losses=losses), "heading", path)
    drawn = path.read_text()
    for text in (note, "heading", "step", "loss (nats per byte)", "cpu:sdma: 80.0 ms a step"):
        assert text in drawn


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == "rich" else name)
    with pytest.raises(SystemExit, match=r"draws with rich, which(.|\n)*pip install"):
        require_extras()
