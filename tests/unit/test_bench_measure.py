"""What a benchmark takes from many calls: order, gate, and what may run where."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pg_sdma.bench import launch, measure, sweep
from pg_sdma.bench.launch import UsageError
from pg_sdma.bench.measure import LONGEST_GATE, SHORTEST_GATE, behind_gate, time_calls
from pg_sdma.bench.routes import route_since
from pg_sdma.settings import Settings


class Alone:
    """A world of one rank."""

    def barrier(self) -> None:
        pass

    def total(self, count: int) -> int:
        return count

    def largest(self, value: float) -> float:
        return value

    def median_of_means(self, samples: list[float]) -> float:
        return float(len(samples))


def test_kinds_alternate_in_rounds_of_which_the_first_call_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "CALLS_PER_ROUND", 2)
    made: list[str] = []
    calls = [lambda i: made.append(f"a{i}"), lambda i: made.append(f"b{i}")]
    times = time_calls(calls, Alone(), iterations=3, warmup=1, gate=None)  # type: ignore[arg-type]
    assert made == ["a0", "b0", "a0", "a0", "a1", "b0", "b0", "b1", "b2", "b2", "a2", "a2"]
    assert [t.time for t in times] == [3, 3]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A gate on a device that opens after `opens_after` seconds of the host's work, which takes
    `works` seconds."""
    clock = SimpleNamespace(now=0.0)
    gate = SimpleNamespace(seconds=SHORTEST_GATE, device=None, held=[], works=0.0, clock=clock)
    gate.hold = lambda: gate.held.append(gate.seconds)
    event = SimpleNamespace(record=lambda: None, query=lambda: gate.works > gate.held[-1])
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)
    return gate


def work(gate: Any) -> str:
    gate.clock.now += gate.works
    return "enqueued"


def test_a_gate_that_opens_early_is_held_longer(gate: Any) -> None:
    gate.works = 0.1
    assert behind_gate(gate, Alone(), lambda: work(gate)) == "enqueued"
    assert gate.held == [SHORTEST_GATE, 0.2]


def test_a_gate_comes_back_to_what_is_needed(gate: Any) -> None:
    gate.seconds, gate.works = LONGEST_GATE, 0.01
    behind_gate(gate, Alone(), lambda: work(gate))
    assert gate.seconds == pytest.approx(0.02)


def test_calls_that_wait_for_the_device_are_given_up(gate: Any) -> None:
    gate.works = 10 * LONGEST_GATE
    assert behind_gate(gate, Alone(), lambda: work(gate)) is None
    assert gate.held[-1] == LONGEST_GATE


def counts(direct: int, inner: int) -> dict[str, Any]:
    routes = {"direct": direct, "inner: late": inner}
    return {"all_gather": {route: {"calls": 1, "bytes": b} for route, b in routes.items() if b}}


def test_the_route_is_of_what_was_gathered_since() -> None:
    assert route_since(counts(100, 50), counts(300, 50)) == "direct"
    assert route_since({}, counts(0, 50)) == "inner: late"
    assert route_since(counts(100, 0), counts(400, 100)) == "75% direct, 25% inner: late"
    assert route_since({}, {}) == "-"


@pytest.mark.parametrize(("ranks", "gpus", "shared"), [(2, 2, False), (2, 1, True), (1, 4, False)])
def test_ranks_that_fit_the_gpus_may_start(ranks: int, gpus: int, shared: bool) -> None:
    launch.check_gpus(ranks, gpus, Settings(allow_same_device=shared))


@pytest.mark.parametrize(
    ("ranks", "gpus", "shared", "says"),
    [(2, 1, False, "2 ranks want a GPU each and torch sees 1"), (2, 0, True, "sees no GPU")],
)
def test_ranks_without_gpus_are_refused(ranks: int, gpus: int, shared: bool, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        launch.check_gpus(ranks, gpus, Settings(allow_same_device=shared))


def options(**changed: int) -> Namespace:
    given = {"groups": 1, "coalesced": 1, "dtype": "float", "begin": 1, "end": 64, "factor": 2}
    return Namespace(**{**given, **changed})


def test_the_smallest_size_gives_every_rank_an_element_of_each_tensor() -> None:
    assert sweep.sizes_of(options(), ranks=2) == [8, 16, 32, 64]
    assert sweep.sizes_of(options(coalesced=3), ranks=4) == [48]
    assert sweep.sizes_of(options(groups=2), ranks=4) == [8, 16, 32, 64]


@pytest.mark.parametrize("changed", [{"end": 7}, {"groups": 2}, {"groups": 3}])
def test_options_that_leave_nothing_to_measure_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        sweep.sizes_of(options(**changed), ranks=2)


@pytest.mark.parametrize(
    ("vs", "device", "names"),
    [
        ("inner", "cpu", ["sdma", "gloo"]),
        ("inner", "cuda", ["sdma", "ucc"]),
        ("none", "cuda", ["sdma"]),
        ("mpi", "cpu", ["sdma", "mpi"]),
    ],
)
def test_inner_is_the_backend_that_sdma_wraps(
    vs: str, device: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "read_settings", lambda: Settings(inner={"cuda": "ucc"}))
    found = launch.measured_backends(Namespace(backend="sdma", vs=vs, device=device))
    assert found == names
