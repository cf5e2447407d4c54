"""`pg-sdma bench overlap` as far as it goes without a GPU: streams and events do nothing here."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pg_sdma.bench import beside, layers, measure, overlap
from pg_sdma.bench.contenders import Calls
from pg_sdma.bench.layers import Forward, Model
from pg_sdma.bench.overlap import Timeline

CPU = torch.device("cpu")
MODEL = Model(4, ((4, 6), (6, 4)))


class Nothing:
    """A stream or an event."""

    def __init__(self, *args: object, **keywords: object) -> None:
        pass

    def record(self) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


class World:
    """Rank 1 of two."""

    size, rank, device = 2, 1, CPU

    def barrier(self) -> None:
        pass

    def total(self, count: int) -> int:
        return 2 * count

    def largest(self, value: float) -> float:
        return value

    def median_of_means(self, samples: list[float]) -> float:
        return sorted(samples)[len(samples) // 2]

    def gathered(self, value: object) -> list[object]:
        return [value, value]


def forward_of(numbers: int) -> Forward:
    world: Any = World()
    return Forward(world, MODEL, numbers, seq=3)


def gathers_for(forward: Forward, broken: bool = False, fresh: bool = False) -> Calls:
    """What rank 0 would send comes from its seeds; calls have two buffers, or new ones each."""
    outputs = [torch.zeros(48, dtype=torch.bfloat16) for _ in range(2)]
    own = [torch.zeros(24, dtype=torch.bfloat16) if fresh else o[24:] for o in outputs]
    peers = [forward._shard(0, i) for i in range(3)]
    mine = [forward._shard(1, i) for i in range(3)]

    def call(i: int) -> torch.Tensor:
        output = torch.empty_like(outputs[i]) if fresh else outputs[i]
        output[24:] = own[i]
        found = [k for k in range(3) if torch.equal(own[i], mine[k])]
        if found and not broken:
            output[:24] = peers[found[0]]
        return output

    return Calls(own, call)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("numbers", [2, 3, 7])
def test_each_layer_has_its_own_weights(numbers: int, fresh: bool) -> None:
    forward = forward_of(numbers)
    assert forward.count_wrong(gathers_for(forward, fresh=fresh)) == 0


def test_a_peer_s_half_that_does_not_come_is_wrong() -> None:
    forward = forward_of(5)
    assert forward.count_wrong(gathers_for(forward, broken=True)) == 2 * 24


def test_the_products_take_what_was_gathered() -> None:
    forward = forward_of(4)
    forward.step(gathers_for(forward), compute=True)
    weights = torch.cat([forward._shard(rank, 3 % 3) for rank in range(2)])
    last = weights[24:48].view(6, 4)
    assert torch.equal(forward._outputs[4], forward._inputs[6] @ last)
    forward.step(None, compute=True)
    assert not forward._outputs[4].any()


def test_what_moves_other_bytes_is_not_checked_but_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layers.MODELS, "tiny", MODEL)
    world: Any = World()
    forward = forward_of(2)
    copies = Calls(
        [torch.zeros(24, dtype=torch.bfloat16)] * 2, gathers_for(forward).call, operation=None
    )
    rows = layers.measure(world, {"a": gathers_for(forward), "copy": copies}, "tiny", 2, 3, 2, 3)
    assert [(row.contender, row.wrong) for row in rows] == [("a", 0), ("copy", None)]
    assert all(row.both > 0 and row.gathers_alone > 0 for row in rows)
    assert layers.line(rows[1]).endswith("       -")


class Side:
    """Products of 1 s, and gathers whose calls say how long they take."""

    def timeline(self, call: Callable[[int], float], gathers: int, gemms: int) -> Timeline:
        seconds = call(0)
        return Timeline(
            [float(i + 1) for i in range(gemms)], [seconds * (i + 1) for i in range(gathers)]
        )

    def wall(self, call: Callable[[int], float], gathers: int, gemms: int) -> float:
        return 10.0


def blocks(i: int) -> float:
    raise RuntimeError("an all-gather blocked the host")


def test_the_chain_outlasts_the_slowest_that_can_be_measured() -> None:
    side: Any = Side()
    world: Any = World()
    calls = {"bad": blocks, "fast": lambda i: 0.5, "slow": lambda i: 2.0}
    rows, failed = overlap.measure(side, calls, 64, world, gathers=4, rounds=3)
    assert failed == {"bad": "rank 0: RuntimeError: an all-gather blocked the host"}
    assert [(row.contender, row.gather_alone, row.gemms) for row in rows] == [
        ("fast", 0.5, 12),
        ("slow", 2.0, 12),
    ]
    assert all(row.gemm_slowdown == 0 for row in rows)


def test_nobody_who_can_be_measured_gives_no_rows() -> None:
    side: Any = Side()
    world: Any = World()
    rows, failed = overlap.measure(side, {"bad": blocks}, 64, world, gathers=4, rounds=3)
    assert (rows, list(failed)) == ([], ["bad"])


def test_cases_are_in_place_where_the_contender_has_that() -> None:
    world: Any = World()
    for places, in_place in ((("in", "out"), True), (("in",), True), (("out",), False)):
        contender: Any = SimpleNamespace(places=places)
        case = overlap.case_for(world, contender, 7)
        assert (case.in_place, case.count, case.dtype) == (in_place, 4, torch.bfloat16)


def test_two_buffers_of_the_largest_fit() -> None:
    options = Namespace(sizes=[3], models=["gpt-7b"])
    numel = layers.MODELS["gpt-7b"].layer_numel
    assert numel == 12 * 4096**2  # of a block of GPT, as in the table of the papers
    assert beside.largest(options) >= 2 * numel + 2 * 8
    assert beside.largest(Namespace(sizes=[2**30], models=[])) > 2**30 + 8 * 2


def test_on_cpu_there_is_no_stream_to_enter() -> None:
    world: Any = World()
    with measure.own_stream(world) as stream:
        assert stream is None
