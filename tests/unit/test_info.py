"""What `pg-sdma info` makes of the facts."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pg_sdma import info
from pg_sdma.bench.probe import Outcome, not_tried
from pg_sdma.cli.info import _gpu_line
from pg_sdma.settings import DEFAULT_BOUNDS, Settings, read_settings

ROOT = Path(__file__).parents[2]
OFF = {"PG_SDMA_TUNING": "off"}


def test_the_default_bounds_are_the_engine_s() -> None:
    source = (ROOT / "csrc" / "engine" / "device.cpp").read_text()
    found = dict(re.findall(r"constexpr uint64_t (k\w+) = uint64_t\{(\d+)\} << 20;", source))
    least, least_sum = (int(found[name]) << 20 for name in ("kLeastBytes", "kLeastSumBytes"))
    assert DEFAULT_BOUNDS["cuda"] == {
        "all_gather": least,
        "coalesced": least,
        "reduce_scatter": least_sum,
    }


@pytest.mark.parametrize(
    ("environ", "device", "expected"),
    [
        (OFF, "cpu", {"all_gather": 0, "coalesced": 0}),
        (OFF, "cuda", {"all_gather": 4 << 20, "coalesced": 4 << 20}),
        (
            {**OFF, "PG_SDMA_OPS": "all_gather,reduce_scatter"},
            "cuda",
            {"all_gather": 4 << 20, "coalesced": 4 << 20, "reduce_scatter": 64 << 20},
        ),
        ({"PG_SDMA_MIN_BYTES": "9"}, "cuda", {"all_gather": 9, "coalesced": 0}),
        (
            {"PG_SDMA_MIN_BYTES": "9", "PG_SDMA_OPS": "reduce_scatter"},
            "cpu",
            {"reduce_scatter": 9},
        ),
    ],
)
def test_bounds_without_a_tuning_file(
    environ: dict[str, str], device: str, expected: dict[str, int]
) -> None:
    assert info.bounds_in_force(read_settings(environ), device, 2)["bytes"] == expected


def outcome(device: str, ranks: int, **facts: object) -> Outcome:
    return Outcome(
        device, ranks, **({"route": "direct", "works": True, "transport": "pull"} | facts)
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "test", "cores", "auto", "why"),
    [
        ({}, outcome("cpu", 2, transport="slots"), 2, "slots of 64256 bytes", []),
        ({}, outcome("cpu", 6, transport="slots"), 8, "slots of ", []),
        (
            {},
            outcome("cpu", 4),
            2,
            "each rank pulls",
            ["no slots of shared memory: 4 ranks share 2 cores, and each would need its own"],
        ),
        (
            {},
            outcome("cpu", 64),
            64,
            "each rank pulls",
            ["no slots of shared memory: of 2 MiB, 64 ranks would have too little each"],
        ),
        (
            {"PG_SDMA_TRANSPORT": "peer"},
            outcome("cpu", 2),
            2,
            "each rank pulls",
            ["no slots of shared memory: PG_SDMA_TRANSPORT=peer"],
        ),
        ({}, outcome("cuda", 2), 2, "each rank's copy engine", []),
        (
            {},
            outcome("cuda", 8, transport="mori"),
            2,
            "mori, by the copy engines of AMD GPUs",
            ["no peer copies: the vote refused them (docs/mori.md)"],
        ),
        (
            {"PG_SDMA_TRANSPORT": "mori"},
            outcome("cuda", 8, transport="mori"),
            2,
            "mori, by the copy engines of AMD GPUs",
            ["no peer copies: PG_SDMA_TRANSPORT=mori"],
        ),
        (
            {},
            outcome("cuda", 2, route="98% direct, 2% inner: late"),
            2,
            "each rank's copy engine",
            ["not all calls went direct: 98% direct, 2% inner: late"],
        ),
        (
            {},
            outcome("cuda", 2, route="inner: no peer access", works=False),
            2,
            "",
            ["nccl carries all-gathers: no peer access"],
        ),
        (
            {},
            outcome("cpu", 2, wrong=3, works=False),
            2,
            "",
            ["bytes were wrong: set PG_SDMA=off, and report this"],
        ),
        ({}, not_tried("cuda", "one GPU"), 2, "", []),
    ],
)
def test_what_auto_takes_and_why_not_something_faster(
    environ: dict[str, str],
    test: Outcome,
    cores: int,
    auto: str,
    why: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(info, "bounds_in_force", lambda *unused: {})
    found = info._route(read_settings(environ), test)
    assert found["why_not_faster"] == why
    assert found["auto"].startswith(auto) and bool(found["auto"]) == bool(auto)


@pytest.mark.parametrize(
    ("gpus", "ranks", "environ", "plan"),
    [
        (0, None, {}, [("cpu", 2, "")]),
        (0, 4, {}, [("cpu", 4, "")]),
        (8, None, {}, [("cpu", 2, ""), ("cuda", 8, "")]),
        (8, 4, {}, [("cpu", 4, ""), ("cuda", 4, "")]),
        (2, 4, {}, [("cpu", 4, ""), ("cuda", 2, "")]),
        (1, None, {}, [("cpu", 2, ""), ("cuda", 2, "torch sees one GPU, and a group needs two")]),
        (
            1,
            None,
            {"PG_SDMA_ALLOW_SAME_DEVICE": "1"},
            [("cpu", 2, ""), ("cuda", 2, "")],
        ),
    ],
)
def test_what_is_tried(
    gpus: int,
    ranks: int | None,
    environ: dict[str, str],
    plan: list[tuple[str, int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert info._plan(read_settings(environ), ranks, "") == plan
    broken = info._plan(read_settings(environ), ranks, "not built")
    assert {why for _, _, why in broken} == {"not built"}


def test_a_gpu_in_one_line() -> None:
    gpu = {
        "name": "GPU X",
        "memory_bytes": 80 << 30,
        "copy_engines": 3,
        "links": {"1": "NVLink", "2": "NVLink", "3": "PCIe"},
    }
    assert _gpu_line(gpu) == "GPU X, 80 GiB, 3 copy engines, NVLink to GPU 1 2, PCIe to GPU 3"


def test_settings_come_with_where_they_are_from() -> None:
    found = {s["name"]: s for s in info.settings_in_force({"PG_SDMA_RING": " 4 ", "PG_SDMA": ""})}
    assert found["PG_SDMA_RING"] == {"name": "PG_SDMA_RING", "value": "4", "from": "environment"}
    assert found["PG_SDMA"] == {"name": "PG_SDMA", "value": "on", "from": "default"}
    assert len(found) == len(vars(Settings()))
