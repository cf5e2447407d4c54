"""What pg_sdma.mori_transport makes of mori's all-gathers, over a stand-in with mori's hazards."""

from __future__ import annotations

import os

import pytest
import torch
from harness import RanksFailed, run_ranks
from mori_ranks import LEAST, join, placed, shard

RANKS = 3


def gathers(count, sizes, options):
    """The first of `count` gathers that came wrong, or None; and calls that held up the host."""
    gather = join(**options)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    random = torch.Generator().manual_seed(count)
    first_wrong = None
    for number in range(count):
        size = int(torch.randint(*sizes, (1,), generator=random))
        expected = torch.stack([shard(r, number, size) for r in range(world)])
        own = placed(expected[rank], number % 4)
        outputs = ~expected
        if number % 3 == 0:
            gather.gather(own, outputs)
        else:
            apart = [placed(output, number % 4) for output in outputs]
            gather.gather(own, apart)
            outputs = torch.stack(apart)
        if not torch.equal(outputs, expected) and first_wrong is None:
            first_wrong = number
    from mori.ccl.collective import AllgatherSdma

    return first_wrong, AllgatherSdma.host_waits


def run(count, sizes=(1, 30000), ranks=RANKS, env=(), **options):
    """The gathers that first came wrong, of the ranks that had one."""
    results = run_ranks(
        ranks, gathers, count, sizes, options, backend=None, env=dict(env), timeout=200
    )
    assert {waits for _, waits in results} == {0}
    return [wrong for wrong, _ in results if wrong is not None]


RACE = {"FAKE_MORI_RACE": "0.05"}


def test_every_size_and_place_comes_right():
    assert not run(60, ranks=4)


def test_five_thousand_gathers_stay_right_while_ranks_race():
    assert not run(5000, sizes=(1, 3000), env=RACE)


def test_without_the_second_handle_such_gathers_come_wrong():
    assert run(500, sizes=(1, 3000), env=RACE, handles=1)


def test_the_pieces_of_one_gather_are_guarded_too():
    often = {"FAKE_MORI_RACE": "0.2"}
    assert not run(20, sizes=(100_000, 150_000), env=often)
    assert run(20, sizes=(100_000, 150_000), env=often, handles=1)


def test_a_class_of_older_moris_serves_too():
    assert not run(60, env={"FAKE_MORI_ONLY": "AllGatherIntoTensor", **RACE})


def test_what_one_packet_cannot_hold_is_never_asked_of_it():
    # The stand-in cuts shards short at 16 KiB here. Chunks of the least memory are smaller.
    packet = {"FAKE_MORI_PACKET": str(1 << 14)}
    assert not run(10, sizes=(20_000, 40_000), env=packet, budget=LEAST)
    assert run(10, sizes=(20_000, 40_000), env=packet, budget=4 * LEAST)


def test_a_rank_that_does_not_come_is_an_error_on_the_others():
    with pytest.raises(RanksFailed, match="no data of PE 1"):
        run_ranks(2, _leave_alone, backend=None, timeout=60)


def _leave_alone():
    gather = join()
    import mori.cpp

    mori.cpp.TIMEOUT = 1.0
    if os.environ["RANK"] == "0":
        gather.gather(torch.zeros(64, dtype=torch.uint8), torch.zeros(2, 64, dtype=torch.uint8))
