"""The examples' training loop, on a group of one rank, and its progress without rich."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import loop
from common.loop import Run, run_steps
from common.progress import progress
from common.text import ByteBatches

BATCHES = ByteBatches(
    torch.arange(100, dtype=torch.uint8), batch=2, seq=5, seed=0, rank=0, world_size=1
)


@pytest.fixture(autouse=True)
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(losses: list[float], first: int = 0, transport: str = "inner", **options: Any) -> Run:
    remaining = iter(losses)
    return run_steps(
        lambda inputs, targets: torch.tensor(next(remaining)),
        BATCHES,
        torch.device("cpu"),
        transport=transport,
        backend="cpu:gloo",
        steps=range(first, first + len(losses)),
        **options,
    )


def test_losses_are_the_steps_own() -> None:
    result = run([3.0, 2.5, 2.25], first=7)
    assert result.losses == [3.0, 2.5, 2.25]
    assert result.first_step == 7
    assert result.peak_memory_bytes is None


@pytest.mark.parametrize(("share", "reported"), [(0.75, 0.75), (float("nan"), None)])
def test_the_fast_path_share_is_the_packages(
    share: float, reported: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "fast_path_share", lambda: share)
    assert run([1.0], transport="sdma").fast_path_share == reported
    assert run([1.0], transport="inner").fast_path_share is None


def test_each_step_trains_on_its_own_batch() -> None:
    seen = []

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(inputs)
        return torch.tensor(0.0)

    run_steps(step, BATCHES, torch.device("cpu"), transport="inner", backend="", steps=range(4, 6))
    assert torch.equal(seen[0], BATCHES(4)[0])
    assert torch.equal(seen[1], BATCHES(5)[0])


def test_after_step_counts_from_the_start_of_training() -> None:
    done: list[int] = []
    run([1.0, 1.0], first=4, after_step=done.append)
    assert done == [5, 6]


def test_a_loss_that_is_not_finite_is_named() -> None:
    with pytest.raises(FloatingPointError, match="loss of step 11 over cpu:gloo"):
        run([1.0, float("nan"), 1.0], first=10)


def test_times_are_the_median_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = iter([0.0, 9.0, 9.1, 9.3, 9.6])  # steps of 9000, 100, 200 and 300 ms
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(marks))
    result = run([1.0] * 4, warmup=1)
    assert result.ms_per_step == pytest.approx(200)
    assert result.tokens_per_s == pytest.approx(2 * 5 / 0.2)


def test_a_run_shorter_than_the_warm_up_still_has_a_time() -> None:
    assert run([1.0, 1.0], warmup=5).ms_per_step > 0


def test_progress_without_rich_prints_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with progress("inner", range(30, 60)) as advance:
        for step in range(30):
            advance(float(step))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "inner: step 60/60, loss 29.0000"
