"""Sizes, bandwidths and columns of `pg-sdma bench all_gather`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pg_sdma.bench import reduce_scatter
from pg_sdma.bench.all_gather import OPERATION
from pg_sdma.bench.measure import Times
from pg_sdma.bench.peak import Peak
from pg_sdma.bench.sweep import summary
from pg_sdma.bench.table import Row, columns, explanation, heading, line, parse_size, sizes

ROW = Row(
    size=8_000_000,
    count=500_000,
    type="float",
    redop="none",
    place="out",
    ranks=4,
    times=Times(time=1e-3, wall=None),
    vs=Times(time=2e-3, wall=None),
    wrong=0,
    vs_wrong=0,
    route="direct",
    direct=1.0,
)
ON_GPU = replace(ROW, times=Times(1e-3, 4e-3), vs=Times(2e-3, 6e-3))


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("1000", 1000), ("4K", 4096), ("16m", 2**24), ("2G", 2**31)]
)
def test_a_size_counts_in_powers_of_two(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1.5M", "4T", "4KB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def test_sizes_grow_by_the_factor_up_to_the_end() -> None:
    assert sizes(1024, 16384, 4) == [1024, 4096, 16384]
    assert sizes(1000, 8000, 2) == [1000, 2000, 4000, 8000]
    assert sizes(1000, 7999, 2) == [1000, 2000, 4000]
    assert sizes(8, 7, 2) == []


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert ROW.algbw == pytest.approx(8)  # 8e6 bytes in 1e-3 s
    assert ROW.busbw == pytest.approx(6)  # three of four shares come from elsewhere
    assert ROW.vs_busbw == pytest.approx(3)
    assert ROW.ratio == pytest.approx(2)


def test_without_a_device_time_the_host_s_counts() -> None:
    row = replace(ON_GPU, times=Times(None, 4e-3))
    assert row.algbw == pytest.approx(2)
    assert row.ratio == pytest.approx(0.5)
    assert row.wall_ratio == pytest.approx(1.5)


def test_one_backend_alone_has_no_ratio() -> None:
    row = replace(ROW, vs=None)
    assert row.ratio is row.vs_busbw is row.wall_ratio is None


def cells(device: str, backends: list[str], row: Row) -> dict[str, str]:
    """The cells by their titles; the second of two equal titles counts."""
    shown = columns(device, backends, OPERATION)
    return dict(zip(heading(shown)[0][1:].split(), line(row, shown).split(), strict=True))


def test_a_line_on_cpu_has_the_columns_of_nccl_tests_and_the_comparison() -> None:
    assert cells("cpu", ["sdma", "gloo"], ROW) == {
        "size": "8000000",
        "count": "500000",
        "type": "float",
        "redop": "none",
        "root": "-1",
        "place": "out",
        "time": "1000.00",
        "algbw": "8.00",
        "busbw": "6.00",
        "#wrong": "0",
        "vs": "2000.00",
        "ratio": "2.00",
        "route": "direct",
    }


def test_a_line_on_gpu_adds_what_the_host_sees() -> None:
    found = cells("cuda", ["sdma", "nccl"], ON_GPU)
    assert (found["wall"], found["vswall"], found["ratio"]) == ("4000.00", "6000.00", "1.50")


def test_a_line_without_a_comparison_has_none_of_its_columns() -> None:
    assert not cells("cuda", ["sdma"], ON_GPU).keys() & {"vs", "ratio", "vswall"}


def test_what_was_not_measured_is_not_a_number() -> None:
    found = cells("cpu", ["sdma", "gloo"], replace(ROW, wrong=None, vs=Times(None, 1e-3)))
    assert (found["#wrong"], found["vs"]) == ("N/A", "-")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_titles_units_and_cells_end_in_one_place(device: str) -> None:
    shown = columns(device, ["sdma", "inner"], OPERATION)[:-1]  # the route is ragged by intent
    titles, units = heading(shown)
    cell = line(ON_GPU, shown)
    end = 1
    for column in shown:
        end += column.width
        assert titles[:end].endswith(column.title)
        assert units[:end].rstrip().endswith(column.unit)
        assert cell[end - column.width] == " ", f"{column.title} touches its neighbour"
    assert len(cell) == end


def test_every_column_is_explained() -> None:
    shown = columns("cuda", ["sdma", "nccl"], OPERATION)
    text = explanation(shown)
    assert len(text) == len(shown) + 1
    assert all(column.meaning in found for column, found in zip(shown, text, strict=False))


def test_a_reduce_scatter_s_size_is_its_input() -> None:
    shown = columns("cpu", ["sdma", "gloo"], reduce_scatter.OPERATION)
    text = "\n".join(explanation(shown))
    assert "input of one rank, all ranks' shares" in text
    assert "output of one rank, a tensor" in text
    row = line(replace(ROW, redop="sum"), shown).split()
    assert row[3] == "sum"


def test_json_holds_what_the_line_shows() -> None:
    row = ON_GPU.as_json()
    assert row["times"] == {"time": 1e-3, "wall": 4e-3}
    assert (row["busbw"], row["ratio"], row["wrong"]) == (ON_GPU.busbw, 2, 0)


def test_the_summary_has_the_mean_bandwidth_and_who_is_faster_from_where() -> None:
    rows = [
        replace(ROW, size=8_000_000),
        replace(ROW, size=8_000_000, place="in", vs=Times(0.5e-3, None)),
        replace(ROW, size=16_000_000, vs=Times(3e-3, None)),
        replace(ROW, size=16_000_000, place="in", vs=Times(0.5e-3, None)),
    ]
    assert summary(rows, ["sdma", "gloo"]) == [
        "Avg bus bandwidth: 9.00 GB/s",  # of 6, 6, 12 and 12
        "out of place, sdma is never slower than gloo from 8000000 bytes on",
        "in place, sdma is slower than gloo at the largest size",
    ]
    assert summary(rows[:1], ["sdma"]) == ["Avg bus bandwidth: 6.00 GB/s"]


def test_the_peak_tells_the_share_of_both_places() -> None:
    rows = [
        replace(ROW, size=4_000_000, times=Times(1e-6, None)),
        ROW,
        replace(ROW, place="in", times=Times(0.8e-3, None)),
    ]
    peak = Peak("a copy", ROW.size, 0.6e-3)
    assert peak.shares(rows) == pytest.approx({"out": 0.6, "in": 0.75})
    assert peak.sentence("sdma", rows) == (
        "peak: a copy takes 600.00 us on all ranks at once; of its speed sdma reaches "
        "60% out of place and 75% in place"
    )
    assert Peak("one GPU", ROW.size, None).sentence("sdma", rows) == "peak not measured: one GPU"
    assert Peak("one GPU", ROW.size, None).shares(rows) == {}
