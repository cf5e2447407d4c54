"""The tensors that a benchmark gathers, and its own check of what arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from pg_sdma.bench import all_gather
from pg_sdma.bench.buffers import Arena, Buffers, Case, make_buffers

CPU = torch.device("cpu")


def made(case: Case, wanted: int = 1, room: int = 1 << 16) -> list[Buffers]:
    return make_buffers(case, Arena(room, CPU), Arena(room, CPU), wanted)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tensors", [1, 3])
def test_buffers_have_the_shapes_of_the_case(in_place: bool, tensors: int) -> None:
    case = Case(torch.bfloat16, 5, tensors, in_place, ranks=(0, 1, 2), rank=1)
    (buffer,) = made(case)
    assert [tuple(t.shape) for t in buffer.whole] == [(15,)] * tensors
    assert [tuple(t.shape) for t in buffer.shards] == [(5,)] * tensors
    assert sum(t.nbytes for t in buffer.whole) == case.size
    for output, own in zip(buffer.whole, buffer.shards, strict=True):
        inside = own.data_ptr() == output[5:].data_ptr()
        assert inside == in_place


def test_buffers_of_successive_calls_do_not_overlap() -> None:
    case = Case(torch.uint8, 300, 1, False, ranks=(0, 1), rank=0)
    several = made(case, wanted=5)
    assert len(several) == 5
    starts = [b.whole[0].data_ptr() for b in several]
    assert all(b - a >= 600 for a, b in pairwise(starts))


def test_a_case_as_large_as_the_arena_gets_one_buffer() -> None:
    case = Case(torch.uint8, 300, 1, False, ranks=(0, 1), rank=0)
    assert len(made(case, wanted=5, room=600)) == 1


def perfect(case: Case) -> Callable[..., None]:
    """An all-gather of known bytes that needs no peers."""

    def gather(buffer: Buffers, group: object) -> None:
        for t, output in enumerate(buffer.whole):
            shards = [all_gather.shard(case, t, rank, CPU) for rank in case.ranks]
            output.view(torch.uint8).copy_(torch.cat(shards))

    return gather


def count_wrong(case: Case, gather: Callable[..., None]) -> int:
    """Elements that the benchmark's check finds wrong of what `gather` does."""
    operation = replace(all_gather.OPERATION, call=gather)
    return operation.count_wrong(case, made(case)[0], None)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_element_that_did_not_arrive_is_wrong(dtype: torch.dtype, in_place: bool) -> None:
    case = Case(dtype, 7, 2, in_place, ranks=(0, 1, 2), rank=1)
    assert count_wrong(case, perfect(case)) == 0
    # In place the own share is there without a gather.
    assert count_wrong(case, lambda buffer, group: None) == 2 * 7 * (2 if in_place else 3)


def test_a_single_wrong_element_counts_once() -> None:
    case = Case(torch.float32, 7, 1, False, ranks=(0, 1), rank=0)

    def almost(buffer: Buffers, group: object) -> None:
        perfect(case)(buffer, group)
        buffer.whole[0].view(torch.int32)[9] ^= 0x0101  # two bytes of one element

    assert count_wrong(case, almost) == 1


def test_two_shares_in_each_other_s_place_are_wrong() -> None:
    case = Case(torch.int64, 7, 1, False, ranks=(0, 1), rank=0)

    def swapped(buffer: Buffers, group: object) -> None:
        perfect(case)(buffer, group)
        buffer.whole[0].copy_(buffer.whole[0].roll(7))

    assert count_wrong(case, swapped) == 14
