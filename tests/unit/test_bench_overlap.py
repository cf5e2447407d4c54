"""The arithmetic of `pg-sdma bench overlap`, its trace, and the picture of a table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from pg_sdma.bench import all_gather, layers, overlap, reduce_scatter
from pg_sdma.bench.field import OPERATIONS
from pg_sdma.bench.operation import Operation
from pg_sdma.bench.overlap import Overlap, Timeline, inside
from pg_sdma.bench.plot import crossover, draw, peak_busbw
from pg_sdma.bench.trace import activities, lines

OVERLAP = Overlap(
    contender="sdma",
    size=2**26,
    gathers=4,
    gemms=6,
    gemms_alone=6e-3,
    gathers_alone=4e-3,
    both=7e-3,
    gemm_alone=1.00e-3,
    gemm_beside=1.05e-3,
    gather_alone=1.0e-3,
    gather_beside=1.1e-3,
    wall=8e-3,
)


def test_hidden_is_what_the_gathers_do_not_add() -> None:
    assert OVERLAP.hidden == pytest.approx(0.75)  # 10 ms in a row, 7 ms side by side, 4 ms alone
    assert OVERLAP.gemm_slowdown == pytest.approx(0.05)


def test_a_step_hides_its_gathers_likewise() -> None:
    step = layers.Step("m", 1, 2, 3, "sdma", gemms_alone=6.0, gathers_alone=4.0, both=6.0, wrong=0)
    assert step.hidden == 1


def test_only_intervals_that_end_in_the_window_are_beside() -> None:
    assert inside([1.0, 3.0, 6.0], math.inf) == [1, 2, 3]
    assert inside([1.0, 3.0, 6.0], 5.0) == [1, 2]
    assert inside([2.0], 1.0) == []


def test_a_timeline_ends_with_the_later_stream() -> None:
    assert Timeline([1.0, 2.0], [0.5]).end == 2
    assert Timeline([], [0.5, 3.0]).end == 3


@pytest.mark.parametrize(
    ("heading", "line"),
    [
        *(
            (overlap.heading(operation), overlap.line(OVERLAP, operation))
            for operation in OPERATIONS.values()
        ),
        (
            layers.HEADING,
            layers.line(layers.Step("llama-70b", 2048, 24, 2**30, "sdma", 0.1, 0.1, 0.1, 0)),
        ),
    ],
)
def test_a_line_fits_its_heading(heading: str, line: str) -> None:
    assert len(line) == len(heading)


@pytest.mark.parametrize(
    ("operation", "noun", "size_of"),
    [
        (all_gather.OPERATION, "all-gather", "output"),
        (reduce_scatter.OPERATION, "reduce-scatter", "input"),
    ],
)
def test_the_table_names_the_operation(operation: Operation, noun: str, size_of: str) -> None:
    assert f" {noun} alone " in overlap.heading(operation)
    said = overlap.meaning(operation, 64)
    assert said.startswith(f"# {noun}: ")
    assert f"size is its {size_of}\n" in said
    assert "64^3" in said


@pytest.mark.parametrize("name", layers.MODELS)
def test_a_model_s_layer_starts_and_ends_with_its_hidden_size(name: str) -> None:
    model = layers.MODELS[name]
    assert model.matrices[0][0] == model.matrices[-1][1] == model.hidden


def event(cat: str, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": start, "dur": duration}


EVENTS = [
    event("user_annotation", "sdma, alone", 100, 50),
    event("user_annotation", "sdma, beside", 200, 50),
    event("gpu_user_annotation", "sdma, alone", 0, 1000),
    event("kernel", "gemm", 205, 30),
    event("kernel", "gemm", 240, 5),
    event("gpu_memcpy", "Memcpy PtoP", 110, 20),
    event("gpu_memcpy", "Memcpy PtoP", 210, 22),
    event("kernel", "before", 99, 1),
    event("kernel", "after", 150, 1),
    event("cpu_op", "aten::mm", 210, 1),
    {"name": "no category", "ts": 110},
]


def test_a_phase_has_what_ran_on_the_device_in_it() -> None:
    (copy,) = activities(EVENTS, "sdma, alone")
    assert (copy.kind, copy.name, copy.calls, copy.microseconds) == ("copy", "Memcpy PtoP", 1, 20)
    beside = activities(EVENTS, "sdma, beside")
    assert [(a.kind, a.name, a.calls, a.microseconds) for a in beside] == [
        ("kernel", "gemm", 2, 35),
        ("copy", "Memcpy PtoP", 1, 22),
    ]


def test_activities_are_listed_below_their_phase() -> None:
    shown = lines(activities(EVENTS, "sdma, alone") + activities(EVENTS, "sdma, beside"))
    assert [s for s in shown if s.startswith("#")] == ["# sdma, alone:", "# sdma, beside:"]
    assert shown[1].split() == ["copy", "1", "20.0", "Memcpy", "PtoP"]


def row(size: int, ratio: float | None, place: str = "out") -> dict[str, Any]:
    return {
        "size": size,
        "ratio": ratio,
        "place": place,
        "busbw": 1.0,
        "vs_busbw": 2.0,
        "seconds": 1e-6,
        "vs_seconds": 2e-6,
        "ranks": 2,
        "times": {"time": 1e-6, "wall": None},
        "vs": {"time": 2e-6, "wall": None},
    }


@pytest.mark.parametrize(
    ("ratios", "size"),
    [((0.9, 1.1, 1.2), 2), ((1.1, 0.9, 1.0), 3), ((1.1, 1.2, 0.9), None), ((1, 1, 1), 1)],
)
def test_the_crossover_is_the_size_after_the_last_slower_one(
    ratios: tuple[float, ...], size: int | None
) -> None:
    assert crossover([row(i, ratio) for i, ratio in enumerate(ratios, 1)]) == size


def test_the_picture_names_both_backends_and_the_crossover(tmp_path: Path) -> None:
    result = {
        "operation": "all_gather",
        "size_of": "output",
        "backend": "sdma",
        "vs": "gloo",
        "ranks": 2,
        "device_name": "CPU",
        "dtype": "float",
        "torch": "2",
        "coalesced": 3,
        "peak": {"size": 4096, "seconds": 1e-6},
        "rows": [row(s, r, p) for p in ("out", "in") for s, r in ((1024, 0.5), (4096, 2.0))],
    }
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text, not as outlines
        draw(result, tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    for text in (
        "sdma, in place",
        "gloo, out of place",
        "never slower from here (in place)",
        "a plain copy of 4 KiB in the same run",
        "3 tensors a call",
        "time of a call (us)",
    ):
        assert text in drawn
    assert "the host's cost in it" not in drawn


def test_the_picture_of_gpus_has_the_host_s_cost_too_and_may_lack_peak_and_comparison(
    tmp_path: Path,
) -> None:
    on_gpu = {"times": {"time": 1e-6, "wall": 4e-6}, "vs": None, "vs_seconds": None}
    result = {
        "operation": "all_gather",
        "size_of": "output",
        "backend": "sdma",
        "vs": None,
        "ranks": 2,
        "device_name": "a GPU",
        "dtype": "float",
        "torch": "2",
        "coalesced": 1,
        "peak": {"size": 4096, "seconds": None},
        "rows": [row(size, None) | on_gpu for size in (1024, 4096)],
    }
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(result, tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    assert "time of a call on the device (us)" in drawn
    assert "the host's cost in it" in drawn
    for absent in ("a plain copy", "never slower", "tensors a call"):
        assert absent not in drawn


def test_the_peak_is_drawn_as_a_gather_that_takes_as_long_as_the_copy() -> None:
    result = {
        "peak": {"size": 8_000_000, "seconds": 1e-3},
        "rows": [row(8_000_000, 1) | {"ranks": 4}],
    }
    assert peak_busbw(result) == pytest.approx(6)  # 8 GB/s, of which three quarters arrive
