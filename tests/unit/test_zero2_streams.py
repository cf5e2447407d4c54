"""How CUDA work is ordered: a stand-in for streams and events records who waits for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pg_sdma.zero2 import reduction
from pg_sdma.zero2.reduction import Buffer, StreamReducer


class Stream:
    """Work with a place on the stream: what it has been made to come after."""

    current: Stream

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.after: set[str] = set()  # everything that is done before what comes next here

    def wait_stream(self, other: Stream) -> None:
        self.after |= other.after

    def wait_event(self, event: Event) -> None:
        self.after |= event.after

    def run(self, name: str) -> None:
        self.after.add(name)


class Event:
    def __init__(self) -> None:
        self.after: set[str] = set()

    def record(self, stream: Stream) -> None:
        self.after = set(stream.after)


@contextmanager
def entered(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


class Work:
    """Instead of a Reduction: notes what it comes after, and that it is done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.after: set[str] = set()

    def reduce_scatter(self, async_op: bool) -> None:
        assert not async_op
        self.after = set(Stream.current.after)

    def accumulate(self) -> None:
        Stream.current.run(self.name)


@pytest.fixture
def reducer(monkeypatch: pytest.MonkeyPatch) -> StreamReducer:
    Stream.current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.current)
    # Whatever else would reach for CUDA, such as a synchronisation, fails on this name.
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    return StreamReducer(torch.device("cuda", 0))


def buffer() -> Buffer:
    return Buffer(1, torch.float32, torch.device("cpu"))


def block(reducer: StreamReducer, into: Buffer, name: str, stream: Stream | None = None) -> Work:
    """A block's backward and its reduction."""
    with entered(stream or Stream.current):
        reducer.arriving(into)
        Stream.current.run(f"backward {name}")
    work = Work(f"reduction {name}")
    reducer.launch(into, work)  # type: ignore[arg-type]
    return work


def test_a_reduction_runs_beside_the_next_block_and_before_the_one_after(
    reducer: StreamReducer,
) -> None:
    first, second = buffer(), buffer()
    assert "backward 3" in block(reducer, first, "3").after
    block(reducer, second, "2")
    assert "reduction 3" not in Stream.current.after
    reducer.arriving(first)
    assert "reduction 3" in Stream.current.after
    assert "reduction 2" not in Stream.current.after


def test_a_reduction_comes_after_gradients_of_every_stream(reducer: StreamReducer) -> None:
    one = buffer()
    side = Stream()
    with entered(side):
        reducer.arriving(one)
        side.run("on the side")
    work = block(reducer, one, "0")
    assert {"on the side", "backward 0"} <= work.after
    with entered(side):
        reducer.arriving(one)
    assert "reduction 0" in side.after


def test_what_follows_finish_comes_after_all_reductions(reducer: StreamReducer) -> None:
    block(reducer, buffer(), "1")
    block(reducer, buffer(), "0")
    reducer.finish()
    assert {"reduction 0", "reduction 1"} <= Stream.current.after


def test_a_buffer_used_again_is_waited_for_again(reducer: StreamReducer) -> None:
    one = buffer()
    for name in ("2", "1", "0"):
        assert f"reduction {name}" not in Stream.current.after
        block(reducer, one, name)
        reducer.arriving(one)
        assert f"reduction {name}" in Stream.current.after


def test_every_stream_that_writes_waits_for_the_reduction_before(reducer: StreamReducer) -> None:
    one = buffer()
    block(reducer, one, "1")
    for side in (Stream(), Stream()):
        with entered(side):
            reducer.arriving(one)
        assert "reduction 1" in side.after


def test_cpu_tensors_need_no_streams() -> None:
    assert isinstance(reduction.reducer_for(torch.device("cpu")), reduction.HostReducer)
