"""The options, tables and sums of benchmarks/fsdp2_step.py."""

from __future__ import annotations

import argparse
import contextlib
import os
import time

import fsdp2_step
import pytest
import torch
import torch.distributed as dist
from fsdp2_contestants import (
    Gathers,
    NoGathers,
    OwnSlices,
    Scatters,
    baseline,
    communicate,
    environment,
)
from fsdp2_host import COLLECTIVES, Host, name_of, observed
from fsdp2_pairs import compare, losers, summary
from fsdp2_profile import kind_of
from fsdp2_step import Shape, since
from fsdp2_table import GONE, Result, not_finite, notes, share_gone, table


def result(contestant: str, number: int, free: float, sync: float, **changed: object) -> Result:
    step = {"free": free, "sync": sync}
    calls = {"free": Host(), "sync": Host()}
    loss = {"free": 5.0, "sync": 5.0}
    rest = {"routes": {}, "calls": calls, "loss": loss, "device_ms": None, **changed}
    return Result(contestant, number, step, step, **rest)


def test_a_shape_has_heads_of_128() -> None:
    shape = Shape.parse("16x4096x2048")
    assert (shape.layers, shape.hidden, shape.seq, shape.heads) == (16, 4096, 2048, 32)
    assert " ".join(shape.arguments()) == "--layers 16 --hidden 4096 --heads 32 --seq 2048"
    assert Shape.parse("2x64x32").heads == 1


@pytest.mark.parametrize(
    "text", ["", "16", "16x4096", "0x4096x2048", "axbxc", "1x257x8", "1x2x3x4"]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        Shape.parse(text)


def test_the_trainer_gets_the_common_options_and_those_that_are_its_own() -> None:
    sizes = "--device cpu --shapes 2x64x32,1x128x8 --steps 9 --warmup 3 --seed 5"
    own, rest = fsdp2_step.parse([*sizes.split(), "--contestants", "sdma,inner"])
    assert own.shapes == [Shape(2, 64, 32), Shape(1, 128, 8)]
    assert own.contestants == ["sdma", "inner"]
    assert " ".join(rest) == "--seed 5 --device cpu --batch 1 --steps 9 --warmup 3"


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


def test_the_floor_tells_which_share_of_the_communication_s_cost_is_gone() -> None:
    results = [
        result("none", 0, 60, 100),
        result("inner", 0, 100, 100),
        result("sdma", 0, 80, 90),
    ]
    assert table(results, {"inner": "nccl", "none": "none", "sdma": "sdma"}) == [
        f"| round | host | nccl | none | time saved | sdma | time saved | {GONE} |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 0 | runs ahead of the device | 100.0 ms | 60.0 ms | +40.0% "
        "| 80.0 ms | +20.0% | +50.0% |",
        "| 0 | synchronises before every step | 100.0 ms | 100.0 ms | +0.0% "
        "| 90.0 ms | +10.0% | - |",
    ]


@pytest.mark.parametrize(
    ("base", "step", "floor", "share"),
    [
        (100, 70, 50, 0.6),
        (100, 120, 50, -0.4),
        (100, 40, 50, 1.2),
        (100, 70, None, None),
        (100, 70, 100, None),
        (100, 70, 130, None),
    ],
)
def test_the_share_that_is_gone(
    base: float, step: float, floor: float | None, share: float | None
) -> None:
    assert share_gone(base, step, floor) == (share if share is None else pytest.approx(share))


def rounds(name: str, *times: float, **changed: object) -> list[Result]:
    return [result(name, number, t, 2 * t, **changed) for number, t in enumerate(times)]


def test_pairs_are_of_one_round_and_told_by_their_median_and_quartiles() -> None:
    host = Host(cpu={"all-gather": [300.0, 700.0], "reduce-scatter": [1000.0]})
    results = [
        *rounds("inner", 100, 200, 100, 200, 100),
        # In another order than the baseline's, as every other round has them.
        *reversed(rounds("sdma", 90, 190, 95, 180, 92, calls={"free": host, "sync": Host()})),
        *rounds("none", 80, 100, 80, 100, 80),
    ]
    found = compare(results, "inner", steps=2)
    free = found["sdma"]["free"]
    assert free.saved == pytest.approx(0.08)  # of 0.10, 0.05, 0.05, 0.10, 0.08
    assert free.quartiles == (pytest.approx(0.05), pytest.approx(0.10))
    assert free.spread == pytest.approx(0.05)
    assert (free.step, free.cpu) == (95, 1.0)
    assert free.gone == pytest.approx((100 - 95) / (100 - 80))
    assert found["inner"]["free"].saved == 0
    assert found["none"]["sync"].step == 160
    lines = summary(found, {"inner": "nccl", "none": "none", "sdma": "sdma"}, 5)
    assert lines[0].startswith(
        "| host | over | ms a step | time saved against nccl, median of 5 pairs | quartiles |"
    )
    assert lines[2] == "| runs ahead of the device | nccl | 100.0 | - | - | - | 0.00 |"
    assert lines[4] == (
        "| runs ahead of the device | sdma | 95.0 | +8.0% | +5.0% to +10.0% | +25.0% | 1.00 |"
    )


@pytest.mark.parametrize(
    ("times", "slower"),
    [
        ((103, 103.5, 103, 102.5, 103), True),  # by 3 %, and all agree
        ((103, 80, 103, 120, 130), False),  # by 3 %, and they do not
        ((97, 97, 97, 97, 97), False),
        ((100, 100, 100, 100, 100), False),
    ],
)
def test_who_is_slower_by_more_than_the_spread_is_named(
    times: tuple[float, ...], slower: bool
) -> None:
    results = [*rounds("inner", 100, 100, 100, 100, 100), *rounds("sdma", *times)]
    results += rounds("none", 500, 500, 500, 500, 500)
    said = losers(
        compare(results, "inner", steps=1), {"inner": "nccl", "sdma": "sdma", "none": "none"}
    )
    assert len(said) == (2 if slower else 0)  # modes
    assert all("sdma" in line and "3.0% slower than nccl" in line for line in said)


def test_the_first_that_communicates_is_what_the_others_are_compared_with() -> None:
    assert baseline(["none", "inner", "sdma"]) == "inner"
    assert baseline(["sdma", "none", "inner"]) == "sdma"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--contestants none", "one that communicates"),
        ("--contestants inner,sdma,inner", "name each once"),
        ("--check", "give --pairs"),
        ("--pairs 1", "2 or more"),
        ("--pairs 5 --steps 3", "more --steps than --warmup"),
    ],
)
def test_options_that_say_nothing_are_refused(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fsdp2_step.parse(["--device", "cpu", *arguments.split()])
    assert said in capsys.readouterr().err


def test_pairs_are_short_rounds() -> None:
    own, rest = fsdp2_step.parse(["--device", "cpu", "--pairs", "20", "--steps", "10"])
    assert (own.rounds, own.warmup) == (20, 3)
    assert rest[-2:] == ["--warmup", "3"]
    assert fsdp2_step.parse(["--device", "cpu"])[0].warmup == 10


class Group:
    """Two ranks, of which this is the second."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def test_the_floor_gathers_nothing_and_keeps_the_own_slice() -> None:
    output = torch.arange(4.0)
    assert NoGathers()(output, output[2:], group=Group(), async_op=False) is None
    assert output.tolist() == [0, 1, 2, 3]
    own = torch.empty(2)
    assert OwnSlices()(own, output, group=Group(), op=dist.ReduceOp.AVG) is None
    assert own.tolist() == [2, 3]
    buffer = OwnSlices().allocate((6,), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (buffer.shape, buffer.dtype) == ((6,), torch.bfloat16)


@pytest.mark.parametrize(
    ("collective", "kind"), [("all-gather", Gathers), ("reduce-scatter", Scatters)]
)
def test_a_contestant_s_group_carries_what_was_meant_for_the_mesh_s(
    monkeypatch: pytest.MonkeyPatch, collective: str, kind: type
) -> None:
    seen = []

    def carry(*tensors: object, **named: object) -> str:
        seen.append((tensors, named))
        return "work"

    monkeypatch.setattr(dist, name_of(collective), carry)
    op = {"op": "avg"} if kind is Scatters else {}
    named = {"output_tensor": "out", "input_tensor": "in", "group": "mesh", **op}
    with observed() as host:  # put there after the model was handed over
        assert kind("own")(**named, async_op=False) == "work"
    assert seen == [(("out", "in"), {"group": "own", "async_op": False, **op})]
    assert len(host.calls[collective]) == 1


def test_every_module_of_fsdp_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Part(torch.nn.Module):
        def set_custom_all_gather(self, comm: object) -> None:
            self.gathers = comm

        def set_custom_reduce_scatter(self, comm: object) -> None:
            self.scatters = comm

    monkeypatch.setattr("fsdp2_contestants.FSDPModule", Part)
    model = torch.nn.Sequential(Part(), torch.nn.ReLU(), Part())
    communicate(model, Group())
    assert all(isinstance(model[i].gathers, Gathers) for i in (0, 2))
    assert all(isinstance(model[i].scatters, Scatters) for i in (0, 2))
    communicate(model, None)
    assert all(isinstance(model[i].gathers, NoGathers) for i in (0, 2))
    assert all(isinstance(model[i].scatters, OwnSlices) for i in (0, 2))


def test_notes_tell_how_many_calls_were_late() -> None:
    late = {"direct": {"calls": 3, "bytes": 75}, "inner: late": {"calls": 1, "bytes": 25}}
    routes = {"free": {"all_gather": late}, "sync": {}}
    host = Host(
        {"reduce-scatter": [100.0, 300.0, 200.0, 200.0]},
        {"reduce-scatter": [50.0, 50.0, 50.0, 90.0]},
        [30.0],
        [9.0],
        [],
        5,
    )
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
    told = "reduce-scatter, CPU time: 4 calls, median 50 us, mean 60 us, longest 90 us"
    assert any(told in line for line in said)
    assert host.cpu_ms() == pytest.approx(0.24)
    assert any("free: host, agreeing: 1 calls, median 30 us" in line for line in said)
    assert any("sync: host, 0 allocations by the driver" in line for line in said)


def test_a_contestant_that_trained_on_nan_is_named() -> None:
    nan = {"free": 5.0, "sync": float("nan")}
    results = [result("inner", 0, 1, 2), *rounds("none", 1, 2, loss=nan)]
    [line] = not_finite(results)
    assert line.startswith("none: the last loss was not finite 2 times")


@pytest.mark.parametrize(("times", "code"), [((110.0, 111.0), 1), ((90.0, 91.0), 0)])
def test_check_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    times: tuple[float, ...],
    code: int,
) -> None:
    class Launch:
        rank, world_size, device_name = 0, 2, "CPU"

        def __init__(self, device: str) -> None:
            assert device == "cpu"

        def process_group(self, backend: str) -> contextlib.AbstractContextManager[None]:
            assert backend == "cpu:gloo"
            return contextlib.nullcontext()

    found = [*rounds("inner", 100, 100), *rounds("sdma", *times)]
    monkeypatch.setattr(fsdp2_step, "Launch", Launch)
    monkeypatch.setattr(fsdp2_step, "rounds", lambda *_: found)
    options = "--device cpu --shapes 1x64x16 --pairs 2 --steps 9 --check --contestants inner,sdma"
    monkeypatch.setattr("sys.argv", ["fsdp2_step.py", *options.split()])
    with pytest.raises(SystemExit) as ended:
        fsdp2_step.main()
    assert ended.value.code == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("sdma synchronises before every step and is 10.5% slower than gloo" in last) == code
    assert ("no contestant is slower than gloo" in last) != code


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
        time.sleep(0.1)
        return "work"

    name = name_of("all-gather")
    assert name in COLLECTIVES["all-gather"]
    monkeypatch.setattr(dist, name, gather)
    with observed() as host:
        assert getattr(dist, name)("output", "input", group=None) == "work"
    assert getattr(dist, name) is gather
    [microseconds] = host.calls["all-gather"]
    assert microseconds > 1e5
    [of_the_cpu] = host.cpu["all-gather"]
    assert 0 < of_the_cpu < microseconds  # asleep, it took none
    assert host.calls["reduce-scatter"] == host.cpu["reduce-scatter"] == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce-scatter"),
        ("_sum_slices", "sum of a direct reduce-scatter"),
        ("Memcpy PtoP (Device -> Device)", "peer copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("nvjet_tst_256x128_64x4", "GEMM"),
        ("multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float>>", "cast of shards"),
        ("multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", "optimizer"),
        ("split_with_sizes_copy_out_contiguous_no_cast_kernel", "copy-out of a gather"),
        ("chunk_cat_cuda_kernel<float, c10::BFloat16>", "copy-in of gradients"),
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
