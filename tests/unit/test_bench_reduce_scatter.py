"""The check that a reduce-scatter's benchmark makes of the sums."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pg_sdma.bench.buffers import DTYPES, Arena, Buffers, Case, make_buffers
from pg_sdma.bench.reduce_scatter import OPERATION, numbers
from pg_sdma.settings import read_settings

CPU = torch.device("cpu")


def test_every_size_goes_direct_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    OPERATION.go_direct()
    settings = read_settings(environ)
    assert (settings.min_bytes, settings.ops) == (0, ("all_gather", "reduce_scatter"))
    environ["PG_SDMA_MIN_BYTES"] = "4096"
    OPERATION.go_direct()
    assert read_settings(environ).min_bytes == 4096


def made(case: Case) -> Buffers:
    return make_buffers(case, Arena(1 << 16, CPU), Arena(1 << 16, CPU), 1)[0]


def perfect(
    case: Case, dtype: torch.dtype | None = None, reverse: bool = False
) -> Callable[..., None]:
    """A reduce-scatter of the known numbers that needs no peers, summed in `dtype`."""

    def reduce(buffers: Buffers, group: object) -> None:
        for t, own in enumerate(buffers.shards):
            given = [numbers(case, t, rank, case.rank, CPU) for rank in case.ranks]
            total = torch.zeros(case.count, dtype=dtype or case.dtype)
            for numbers_of_one in reversed(given) if reverse else given:
                total += numbers_of_one
            own.copy_(total)

    return reduce


def count_wrong(case: Case, reduce: Callable[..., None]) -> int:
    """Elements that the benchmark's check finds wrong of what `reduce` does."""
    return replace(OPERATION, call=reduce).count_wrong(case, made(case), None)  # type: ignore[arg-type]


def nothing(buffers: Buffers, group: object) -> None:
    pass


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("in_place", [False, True])
def test_right_sums_are_right_in_any_order_and_precision(
    dtype: torch.dtype, in_place: bool
) -> None:
    case = Case(dtype, 50, 2, in_place, ranks=tuple(range(32)), rank=3)
    for wide, reverse in ((dtype, False), (dtype, True), (torch.float64, False)):
        assert count_wrong(case, perfect(case, wide, reverse)) == 0


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_what_was_not_summed_is_wrong(dtype: torch.dtype) -> None:
    case = Case(dtype, 50, 2, False, ranks=(0, 1, 2), rank=1)
    assert count_wrong(case, nothing) == 100


def test_in_place_an_output_that_kept_its_input_is_wrong() -> None:
    case = Case(torch.bfloat16, 500, 1, True, ranks=(0, 1), rank=1)
    # A seventh of the peer's numbers are zeros.
    assert count_wrong(case, nothing) > 300


def test_a_neighbour_s_slice_is_wrong() -> None:
    case = Case(torch.float32, 500, 1, False, ranks=(0, 1), rank=1)
    other = Case(torch.float32, 500, 1, False, ranks=(0, 1), rank=0)
    assert count_wrong(case, perfect(other)) > 300


def test_inputs_are_as_they_are_said_to_be() -> None:
    case = Case(torch.int32, 6, 1, False, ranks=(4, 7), rank=1)
    seen = []
    count_wrong(case, lambda buffers, group: seen.append(buffers.whole[0].clone()))
    expected = torch.cat([numbers(case, 0, 7, slot, CPU) for slot in range(2)])
    assert torch.equal(seen[0], expected)
