"""`pg-sdma tune`: what it makes of measurements, says and writes."""

from __future__ import annotations

import dataclasses

import pytest

from pg_sdma import _C, tuning
from pg_sdma.bench import tune
from pg_sdma.bench.measure import Times
from pg_sdma.bench.table import Row
from pg_sdma.cli import main


@pytest.mark.parametrize(
    ("good", "expected"),
    [
        ([], tuning.NEVER),
        ([True, True, True], 0),
        ([False, True, True], 4),
        ([True, False, True], 16),
        ([True, True, False], tuning.NEVER),
    ],
)
def test_the_bound_is_the_size_behind_the_last_bad_one(
    good: list[bool], expected: int | str
) -> None:
    assert tuning.bound(list(zip((1, 4, 16), good, strict=False))) == expected


def row(size: int, place: str, ratio: float, direct: float | None = 1.0) -> Row:
    return Row(
        size=size,
        count=size // 8,
        type="float",
        redop="none",
        place=place,
        ranks=2,
        times=Times(1e-3, None),
        vs=Times(ratio * 1e-3, None),
        wrong=0,
        vs_wrong=0,
        route="",
        direct=direct,
    )


def test_a_size_is_good_where_both_places_are_and_the_calls_went_direct() -> None:
    rows = [
        row(1024, "out", 2.0),
        row(1024, "in", 0.9),  # slower in place
        row(4096, "out", 2.0),
        row(4096, "in", 2.0, direct=0.5),  # half of them the inner's
        row(16384, "out", 0.98),  # within the tolerance
        row(16384, "in", 1.2),
        row(65536, "out", 1.5, direct=0.95),
        row(65536, "in", 1.5),
    ]
    assert tune.bound_of(rows, 1) == 16384
    assert tune.bound_of(rows, 16) == 1024  # of the mean tensor
    assert tune.bound_of(rows[:4], 1) == tuning.NEVER
    assert tune.bound_of(rows[4:], 1) is None  # of smaller ones nothing is known
    assert tune.bound_of([row(1024, "out", 2.0)], 1) == 0
    assert tune.bound_of([row(1024, "out", 2.0, direct=None)], 1) == tuning.NEVER


@pytest.mark.parametrize(
    ("bounds", "coalesced"),
    [
        ({"all_gather": 0, "coalesced": 0}, "of any size go direct"),
        (
            {"all_gather": 0, "coalesced": 64},
            "go direct from 64 bytes in the mean of the outputs on",
        ),
        (
            {"all_gather": 4096, "coalesced": 64},
            "go direct from 64 bytes in the mean of the outputs and 4096 bytes in all on",
        ),
        ({"all_gather": 4096, "coalesced": 0}, "go direct from 4096 bytes in all on"),
        (
            {"all_gather": tuning.NEVER, "coalesced": 0},
            "go to the inner backend, as all-gathers do",
        ),
    ],
)
def test_what_is_said_of_coalesced_calls_is_what_groups_do(
    bounds: dict[str, int | str], coalesced: str
) -> None:
    assert tune.in_words(bounds)[1] == f"coalesced all-gathers {coalesced}"
    least, mean = (tuning.LARGEST if b == tuning.NEVER else int(b) for b in bounds.values())
    for tensors, total in ((4, 4), (4, 256), (4, 4096), (64, 4096), (128, 4096)):
        refused = _C._static_refusal(
            total_bytes=total, tensors=tensors, min_bytes=least, min_mean_bytes=mean
        )
        numbers = [int(word) for word in coalesced.split() if word.isdecimal()]
        in_mean = total // tensors >= numbers[0] if "mean" in coalesced else True
        in_all = total >= numbers[-1] if "in all" in coalesced else True
        direct = "inner" not in coalesced and in_mean and in_all
        assert (refused == "") == direct


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--file", "/proc/none/tuning.json"], "/proc/none/tuning.json cannot be written: "),
        (["--file", "/"], "/ cannot be written: give another --file"),
        (["--dry-run", "--json", "/"], "/ cannot be written: give another --json"),
        (["--dry-run", "-b", "8K", "-e", "4K"], "-b 8192 is above -e 4096"),
        ([], "no tuning file is in use here (PG_SDMA_TUNING=off?): give --file"),
    ],
)
def test_what_cannot_come_to_anything_is_refused_before_measuring(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", "--device", "cpu", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_nothing_is_written_where_nothing_went_direct_or_bytes_were_wrong() -> None:
    right = row(1024, "out", 2.0)
    assert tune._objection([right, row(4096, "out", 2.0, direct=0.0)]) == ""
    inner = dataclasses.replace(right, route="inner: no engine", direct=0.0)
    assert tune._objection([inner]) == (
        "nothing is written: no call went direct (inner: no engine)"
    )
    for wrong in ({"wrong": 2}, {"vs_wrong": 2}):
        spoilt = dataclasses.replace(right, **wrong)
        assert tune._objection([right, spoilt]) == "nothing is written: 2 elements were wrong"


def test_what_is_measured_follows_the_device_and_pg_sdma_ops() -> None:
    both = ("all_gather", "reduce_scatter")
    assert [part.name for part in tune.parts("cuda", both)] == list(tuning.BOUNDS)
    assert [part.name for part in tune.parts("cpu", both)] == ["all_gather", "coalesced"]
    assert tune.parts("cpu", ("reduce_scatter",)) == []
    assert [part.name for part in tune.parts("cuda", ("reduce_scatter",))] == ["reduce_scatter"]
