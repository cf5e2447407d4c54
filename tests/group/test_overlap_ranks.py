"""`pg-sdma bench overlap` over real groups, with a stand-in for the GPU's streams and clocks."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from harness import Ranks

Start = Callable[..., Ranks]
GATHERS = 3


class SideBySide:
    """Makes the calls one after another; products take 1 ms, calls 2 ms, and both at a time 2.1."""

    def __init__(self, world: Any, gate: object, product: object) -> None:
        self._world = world

    def timeline(self, call: Callable[[int], object], gathers: int, gemms: int) -> Any:
        from pg_sdma.bench.overlap import Timeline

        self._world.barrier()
        for i in range(gathers):
            call(i)
        each = 2.1e-3 if gemms else 2e-3
        return Timeline(
            [1e-3 * (i + 1) for i in range(gemms)], [each * (i + 1) for i in range(gathers)]
        )

    def wall(self, call: Callable[[int], object], gathers: int, gemms: int) -> float:
        return self.timeline(call, gathers, gemms).end


def measured(path: Path, *given: str) -> tuple[str, int]:
    """What a rank of the benchmark prints, and its exit status."""
    from pg_sdma.bench import beside, overlap
    from pg_sdma.bench.launch import World
    from pg_sdma.cli import parser
    from pg_sdma.cli.bench_overlap import complete

    command = ["bench", "overlap", "--sizes", "4K,64K", "--gathers", str(GATHERS), "--rounds", "2"]
    options = parser().parse_args([*command, "--json", str(path), *given])
    complete(options)
    status = 0
    with (
        mock.patch.object(beside, "Gate", lambda device: None),
        mock.patch.object(overlap, "Products", lambda n, device: None),
        mock.patch.object(overlap, "SideBySide", SideBySide),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        try:
            beside.run(World("cpu"), options)
        except SystemExit as ended:
            status = ended.code  # type: ignore[assignment]
    return printed.getvalue(), status


def corrupted(path: Path, *given: str) -> tuple[str, int]:
    """The same where what rank 1 gets is lost."""
    import torch.distributed as dist

    from pg_sdma.bench import contenders

    if dist.get_rank() != 1:
        return measured(path, *given)
    made = contenders.OverGroup.prepare

    def prepare(self: Any, case: Any, wanted: int) -> Any:
        calls = made(self, case, wanted)

        def call(i: int) -> Any:
            output = calls.call(i)
            output.zero_()
            return output

        return contenders.Calls(calls.own, call, calls.operation)

    with mock.patch.object(contenders.OverGroup, "prepare", prepare):
        return measured(path, *given)


@pytest.mark.parametrize(
    ("operation", "noun", "absent"),
    [
        ("all_gather", "all-gather", {"zero-CTA", "low-contention", "peer copy"}),
        ("reduce_scatter", "reduce-scatter", {"peer copy"}),
    ],
)
def test_either_operation_is_checked_goes_direct_and_fills_the_table(
    ranks: Start, tmp_path: Path, operation: str, noun: str, absent: set[str]
) -> None:
    path = tmp_path / "numbers.json"
    # The benchmark itself lets reduce-scatters go direct.
    found = ranks(2, "gloo", {"PG_SDMA_OPS": "all_gather"}).run(
        measured, path, "--operation", operation, "--models", "none"
    )
    (printed, status), other = found
    assert status == 0
    assert other == ("", 0)
    result = json.loads(path.read_text())
    assert (result["operation"], result["collective"]) == ("overlap", operation)
    assert set(result["absent"]) == absent
    rows = result["chains"]
    assert [(row["contender"], row["size"], row["route"]) for row in rows] == [
        (name, size, route)
        for size in (4096, 65536)
        for name, route in (("sdma", "direct"), ("gloo", "-"))
    ]
    for row in rows:
        assert row["gather_alone"] == pytest.approx(2e-3)
        assert row["gather_beside"] == pytest.approx(2.1e-3)
        assert row["gemms"] >= 1.5 * GATHERS * 2
    assert f" {noun} alone " in printed
    assert "WRONG" not in printed
    table = [line.split()[:2] for line in printed.splitlines() if not line.startswith("#")]
    assert table == [[str(row["size"]), row["contender"]] for row in rows]


def test_wrong_sums_of_one_rank_end_the_benchmark_with_a_status_on_all(
    ranks: Start, tmp_path: Path
) -> None:
    found = ranks(2, "gloo", {"PG_SDMA_OPS": "all_gather"}).run(
        corrupted, tmp_path / "numbers.json", "--operation", "reduce_scatter"
    )
    assert [status for _, status in found] == [1, 1]
    said = [line for line in found[0][0].splitlines() if line.startswith("# WRONG: sdma")]
    assert len(said) == 2  # sizes
    # Of the sums of two ranks' numbers from -3 to 3 a seventh are zeros.
    wrong = int(said[1].split()[-2])
    assert 0.7 * 16384 < wrong < 16384
