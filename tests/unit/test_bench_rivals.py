"""Who takes part in `pg-sdma bench rivals`, and what it prints."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pg_sdma.bench import reduce_scatter, rivals
from pg_sdma.bench.buffers import Arena, Case
from pg_sdma.bench.contenders import Calls, PeerCopy, SetUp, count_wrong, room_for
from pg_sdma.bench.field import CONTENDERS, CONTENDERS_OF, OPERATIONS, agreed, field, set_ups
from pg_sdma.bench.measure import Times
from pg_sdma.bench.rivals import Row, heading, line, on_device, remarks
from pg_sdma.bench.trace import Activity

CPU = torch.device("cpu")


class WithPeer:
    """Rank 0 of two, whose peer says of each thing tried what `peer` has in turn."""

    size, rank, device = 2, 0, CPU

    def __init__(self, *peer: str) -> None:
        self.peer = list(peer)

    def gathered(self, value: str) -> list[str]:
        return [value, self.peer.pop(0) if self.peer else ""]


def raises(error: Exception) -> Callable[[], object]:
    def make() -> object:
        raise error

    return make


def test_what_both_ranks_make_is_agreed() -> None:
    assert agreed(WithPeer(), lambda: 5) == (5, "")  # type: ignore[arg-type]


def test_what_one_rank_cannot_make_no_rank_has() -> None:
    none, why = agreed(WithPeer("OSError: no"), lambda: 5)  # type: ignore[arg-type]
    assert (none, why) == (None, "rank 1: OSError: no")
    broken = raises(ValueError("first line\nsecond"))
    assert agreed(WithPeer(), broken) == (None, "rank 0: ValueError: first line")  # type: ignore[arg-type]


def stages(log: list[str], fails_at: int | None = None) -> SetUp:
    for stage in range(3):
        if stage == fails_at:
            raise RuntimeError("broken")
        log.append(f"stage {stage}")
        yield
    return SimpleNamespace(name="made")  # type: ignore[return-value]


def test_no_stage_is_entered_before_the_peer_has_passed_the_one_before() -> None:
    log: list[str] = []
    world: Any = WithPeer("", "KeyError: x")
    found = field(world, {"one": stages(log)})
    assert log == ["stage 0", "stage 1"]
    assert (found.contenders, found.absent) == ([], {"one": "rank 1: KeyError: x"})


def test_the_others_go_on_without_one_that_fails() -> None:
    world: Any = WithPeer()
    found = field(world, {"bad": stages([], fails_at=1), "good": stages([])})
    assert [contender.name for contender in found.contenders] == ["made"]
    assert found.absent == {"bad": "rank 0: RuntimeError: broken"}


def test_contenders_are_in_the_order_of_the_columns() -> None:
    world: Any = WithPeer()
    every = set_ups(CONTENDERS[::-1], world, room_for(1024, 2))
    assert list(every) == ["sdma", "gloo", "zero-CTA", "low-contention", "peer copy"]
    assert list(set_ups(["copy", "sdma"], world, room_for(1024, 2))) == ["sdma", "peer copy"]


@pytest.mark.parametrize("name", ["zero-cta", "low-contention", "copy"])
def test_what_needs_gpus_says_so_on_cpu(name: str) -> None:
    world: Any = WithPeer()
    (why,) = field(world, set_ups([name], world, room_for(1024, 2))).absent.values()
    assert "GPU" in why


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_peer_copy_leaves_the_own_shard(rank: int) -> None:
    case = Case(torch.int32, 5, 1, True, ranks=(0, 1, 2), rank=rank)
    source = torch.arange(64, dtype=torch.uint8)
    output = PeerCopy("copy", Arena(1024, CPU), source).prepare(case, 2).call(1)
    parts = output.view(torch.uint8).split(20)
    assert not parts[rank].any()
    peers = [part for i, part in enumerate(parts) if i != rank]
    assert torch.equal(torch.cat(peers), source[:40])


def test_a_gather_that_does_nothing_is_wrong_everywhere() -> None:
    case = Case(torch.float32, 7, 1, False, ranks=(0, 1), rank=1)
    output = torch.zeros(14)
    assert count_wrong(case, Calls([torch.zeros(7)], lambda i: output)) == 14


def test_a_copy_of_other_bytes_is_not_checked() -> None:
    case = Case(torch.float32, 7, 1, True, ranks=(0, 1), rank=1)
    copies = Calls([torch.zeros(7)], lambda i: torch.zeros(14), operation=None)
    assert count_wrong(case, copies) is None


def test_a_reduce_scatter_is_checked_by_its_sums() -> None:
    case = Case(torch.bfloat16, 7, 1, False, ranks=(0, 1), rank=1)
    given, output = torch.zeros(14, dtype=case.dtype), torch.zeros(7, dtype=case.dtype)
    peer = reduce_scatter.numbers(case, 0, 0, 1, CPU)

    def sums(i: int) -> torch.Tensor:
        return torch.add(given[7:], peer, out=output)

    assert count_wrong(case, Calls([given], sums, reduce_scatter.OPERATION)) == 0
    idle = Calls([given], lambda i: output, reduce_scatter.OPERATION)
    assert count_wrong(case, idle) == 7


def test_every_operation_has_contenders_that_are_known() -> None:
    assert list(CONTENDERS_OF) == list(OPERATIONS)
    assert CONTENDERS_OF["all_gather"] == CONTENDERS
    assert all(set(names) <= set(CONTENDERS) for names in CONTENDERS_OF.values())


NAMES = ["sdma", "nccl", "peer copy"]
ROW = Row(
    size=4096,
    count=512,
    place="out",
    times={"sdma": Times(10e-6, 20e-6), "nccl": Times(15e-6, 10e-6)},
    wrong={"sdma": 0, "nccl": 2},
    route="direct",
    failed={"peer copy": "rank 1: OutOfMemoryError: full"},
)


def test_a_line_has_each_contender_s_times_over_the_first_s() -> None:
    cells = dict(zip(_cells(heading(NAMES)[0]), _cells(line(ROW, NAMES)), strict=True))
    assert cells["sdma, time (us)"] == "10.0"
    assert _cells(line(ROW, NAMES)) == [
        *("4096", "out", "10.0", "20.0", "15.0", "1.50", "10.0", "0.50"),
        *("-", "-", "-", "-", "direct"),
    ]


def _cells(text: str) -> list[str]:
    return [cell.strip() for cell in text.strip("|").split("|")]


def test_remarks_name_who_was_wrong_and_who_failed() -> None:
    said = "\n".join(remarks([ROW]))
    assert "not measured: peer copy, 4096 B, out of place: rank 1: OutOfMemoryError: full" in said
    assert "WRONG: nccl, 4096 B, out of place: 2 elements" in said
    assert "2 elements were wrong, of nccl, sdma" in said


def test_kernels_are_told_from_copies_and_counted_by_call() -> None:
    first, second = (rivals.phase("zero-CTA", Row(s, 1, "in", {}, {}, "-")) for s in (1, 2))
    other = rivals.phase("nccl", Row(1, 1, "in", {}, {}, "-"))
    said = on_device(
        [
            Activity(first, "copy", "Memcpy PtoP", 1, 5.0),
            Activity(second, "copy", "Memcpy PtoP", 2, 9.0),
            Activity(other, "kernel", "ncclDevKernel_AllGather", 1, 8.0),
        ],
        ["sdma", "zero-CTA", "nccl"],
    )
    assert "  zero-CTA: no kernel at any size" in said
    assert "  zero-CTA: copy Memcpy PtoP, in 2 calls" in said
    assert "  nccl: kernel ncclDevKernel_AllGather, in 1 calls" in said
    assert "  nccl: no kernel at any size" not in said
    assert on_device([], ["sdma"]) == []


def test_the_environment_told_is_what_contenders_read() -> None:
    environ = {"NCCL_NVLS_ENABLE": "0", "HOME": "/", "PG_SDMA_MIN_BYTES": "1", "NCCL": "x"}
    found = rivals.related_environment(environ)
    assert found == {"NCCL_NVLS_ENABLE": "0", "PG_SDMA_MIN_BYTES": "1"}
