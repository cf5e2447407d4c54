"""The options, tables and sums of benchmarks/fsdp2_step.py."""

from __future__ import annotations

import argparse
import os

import fsdp2_step
import pytest
import torch.distributed as dist
from fsdp2_host import COLLECTIVES, Host, observed
from fsdp2_profile import kind_of
from fsdp2_step import Result, Shape, environment, notes, since, table


def result(contestant: str, number: int, free: float, sync: float, **changed: object) -> Result:
    step = {"free": free, "sync": sync}
    rest = {"routes": {}, "calls": {}, "device_ms": None, **changed}
    return Result(contestant, number, step, step, **rest)


def test_a_shape_has_heads_of_128() -> None:
    shape = Shape.parse("16x4096x2048")
    assert (shape.layers, shape.hidden, shape.seq, shape.heads) == (16, 4096, 2048, 32)
    assert shape.arguments() == [
        "--layers",
        "16",
        "--hidden",
        "4096",
        "--heads",
        "32",
        "--seq",
        "2048",
    ]
    assert Shape.parse("2x64x32").heads == 1


@pytest.mark.parametrize(
    "text", ["", "16", "16x4096", "0x4096x2048", "axbxc", "1x257x8", "1x2x3x4"]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        Shape.parse(text)


def test_the_trainer_gets_the_common_options_and_those_that_are_its_own() -> None:
    own, rest = fsdp2_step.parse(
        [
            "--device",
            "cpu",
            "--shapes",
            "2x64x32,1x128x8",
            "--steps",
            "9",
            "--warmup",
            "3",
            "--seed",
            "5",
            "--contestants",
            "sdma,inner",
        ]
    )
    assert own.shapes == [Shape(2, 64, 32), Shape(1, 128, 8)]
    assert own.contestants == ["sdma", "inner"]
    assert rest == [
        "--seed",
        "5",
        "--device",
        "cpu",
        "--batch",
        "1",
        "--steps",
        "9",
        "--warmup",
        "3",
    ]


def test_each_contestant_but_the_first_is_compared_with_it_in_every_round() -> None:
    results = [
        result("inner", 0, 100, 200),
        result("sdma", 0, 80, 210),
        result("sdma", 1, 50, 100),
        result("inner", 1, 100, 100),
    ]
    assert table(results, {"inner": "nccl", "sdma": "sdma"}) == [
        "| round | host | nccl | sdma | time saved |",
        "| --- | --- | --- | --- | --- |",
        "| 0 | runs ahead of the device | 100.0 ms | 80.0 ms | +20.0% |",
        "| 0 | synchronises before every step | 200.0 ms | 210.0 ms | -5.0% |",
        "| 1 | runs ahead of the device | 100.0 ms | 50.0 ms | +50.0% |",
        "| 1 | synchronises before every step | 100.0 ms | 100.0 ms | +0.0% |",
    ]


def test_notes_tell_how_many_calls_were_late() -> None:
    late = {"direct": {"calls": 3, "bytes": 75}, "inner: late": {"calls": 1, "bytes": 25}}
    routes = {"free": {"all_gather": late}, "sync": {}}
    host = Host({"reduce-scatter": [100.0, 300.0, 200.0, 200.0]}, [30.0], [9.0], [], 5)
    said = notes(
        result(
            "sdma",
            0,
            1,
            2,
            routes=routes,
            calls={"free": host, "sync": Host()},
            device_ms={"GEMM": 5.0},
        )
    )
    assert any("75.0% of bytes direct; calls: 3 direct, 1 inner: late" in line for line in said)
    assert any("GEMM 5.0" in line for line in said)
    told = "reduce-scatter: 4 calls, median 200 us, mean 200 us, longest 300 us"
    assert any(told in line for line in said)
    assert any("free: host, agreeing: 1 calls, median 30 us" in line for line in said)
    assert any("sync: host, 0 allocations by the driver" in line for line in said)


def test_what_was_counted_before_is_left_out() -> None:
    before = {
        "gather": {"direct": {"calls": 2, "bytes": 20}, "inner: late": {"calls": 1, "bytes": 9}}
    }
    after = {
        "gather": {"direct": {"calls": 5, "bytes": 50}, "inner: late": {"calls": 1, "bytes": 9}}
    }
    assert since(before, after) == {"gather": {"direct": {"calls": 3, "bytes": 30}}}
    assert since({}, after) == after


def test_the_host_is_timed_in_collectives_for_the_length_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gather(*_: object, **__: object) -> str:
        return "work"

    name = next(name for name in COLLECTIVES["all-gather"] if hasattr(dist, name))
    monkeypatch.setattr(dist, name, gather)
    with observed() as host:
        assert getattr(dist, name)("output", "input", group=None) == "work"
    assert getattr(dist, name) is gather
    [microseconds] = host.calls["all-gather"]
    assert microseconds > 0
    assert host.calls["reduce-scatter"] == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce-scatter"),
        ("_sum_slices", "sum of a direct reduce-scatter"),
        ("Memcpy PtoP (Device -> Device)", "peer copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("nvjet_tst_256x128_64x4", "GEMM"),
        ("elementwise_kernel", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_environment_is_as_before_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_SDMA_OPS", "all_gather")
    monkeypatch.delenv("PG_SDMA_RING", raising=False)
    with environment({"PG_SDMA_OPS": "reduce_scatter", "PG_SDMA_RING": "4"}):
        assert (os.environ["PG_SDMA_OPS"], os.environ["PG_SDMA_RING"]) == ("reduce_scatter", "4")
    assert os.environ["PG_SDMA_OPS"] == "all_gather"
    assert "PG_SDMA_RING" not in os.environ
