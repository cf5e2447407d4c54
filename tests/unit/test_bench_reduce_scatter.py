"""The check that a reduce-scatter's benchmark makes of the sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pg_sdma.bench import reduce_scatter
from pg_sdma.bench.buffers import DTYPES, Arena, Buffers, Case, make_buffers
from pg_sdma.bench.reduce_scatter import count_wrong, numbers

CPU = torch.device("cpu")


def made(case: Case) -> Buffers:
    return make_buffers(case, Arena(1 << 16, CPU), Arena(1 << 16, CPU), 1)[0]


def perfect(case: Case, dtype: torch.dtype | None = None, reverse: bool = False) -> Any:
    """A reduce-scatter of the known numbers that needs no peers, summed in `dtype`."""

    def reduce(buffers: Buffers, group: object) -> None:
        for t, own in enumerate(buffers.shards):
            given = [numbers(case, t, rank, case.rank, CPU) for rank in case.ranks]
            total = torch.zeros(case.count, dtype=dtype or case.dtype)
            for numbers_of_one in reversed(given) if reverse else given:
                total += numbers_of_one
            own.copy_(total)

    return reduce


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("in_place", [False, True])
def test_right_sums_are_right_in_any_order_and_precision(
    dtype: torch.dtype, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(dtype, 50, 2, in_place, ranks=tuple(range(32)), rank=3)
    for wide, reverse in ((dtype, False), (dtype, True), (torch.float64, False)):
        monkeypatch.setattr(reduce_scatter, "reduce", perfect(case, wide, reverse))
        assert count_wrong(case, made(case), None) == 0  # type: ignore[arg-type]


def test_what_was_not_summed_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.float32, 50, 2, False, ranks=(0, 1, 2), rank=1)
    monkeypatch.setattr(reduce_scatter, "reduce", lambda buffers, group: None)
    assert count_wrong(case, made(case), None) == 100  # type: ignore[arg-type]


def test_in_place_an_output_that_kept_its_input_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.bfloat16, 500, 1, True, ranks=(0, 1), rank=1)
    monkeypatch.setattr(reduce_scatter, "reduce", lambda buffers, group: None)
    # A seventh of the peer's numbers are zeros.
    assert count_wrong(case, made(case), None) > 300  # type: ignore[arg-type]


def test_a_neighbour_s_slice_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.float32, 500, 1, False, ranks=(0, 1), rank=1)
    other = Case(torch.float32, 500, 1, False, ranks=(0, 1), rank=0)
    monkeypatch.setattr(reduce_scatter, "reduce", perfect(other))
    assert count_wrong(case, made(case), None) > 300  # type: ignore[arg-type]


def test_inputs_are_as_they_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.int32, 6, 1, False, ranks=(4, 7), rank=1)
    seen = []
    monkeypatch.setattr(
        reduce_scatter, "reduce", lambda buffers, group: seen.append(buffers.whole[0].clone())
    )
    count_wrong(case, made(case), None)  # type: ignore[arg-type]
    expected = torch.cat([numbers(case, 0, 7, slot, CPU) for slot in range(2)])
    assert torch.equal(seen[0], expected)
