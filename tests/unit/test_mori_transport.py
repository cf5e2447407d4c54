"""What is decided about mori without it."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest

from pg_sdma import mori_transport
from pg_sdma.mori_library import Refused, find
from pg_sdma.mori_transport import MOST_AT_ONCE, Offer, Where, chunk_bytes, where
from pg_sdma.settings import Settings

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_ENABLE_SDMA", "")
    monkeypatch.delenv("MORI_ENABLE_SDMA")
    monkeypatch.setattr(mori_transport, "_taken_by", "")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mori"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("settings", "hip", "expected"),
    [
        ({}, None, Where(("cpu", "cuda"), (), "")),
        ({}, "7.1", Where(("cpu", "cuda"), ("cuda",), "")),
        ({"transport": "peer"}, "7.1", Where(("cpu", "cuda"), (), "")),
        ({"transport": "mori"}, "7.1", Where(("cpu",), ("cuda",), "")),
        (
            {"transport": "mori"},
            None,
            Where(("cpu",), (), "PG_SDMA_TRANSPORT=mori, and this torch is not built for ROCm"),
        ),
        ({"mori_on_cpu": True}, None, Where(("cpu", "cuda"), ("cpu",), "")),
        ({"transport": "mori", "mori_on_cpu": True}, "7.1", Where((), ("cuda", "cpu"), "")),
    ],
)
def test_which_tensors_may_be_moris(
    settings: dict[str, Any], hip: str | None, expected: Where
) -> None:
    assert where(Settings(**settings), hip) == expected


@pytest.mark.parametrize("world", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("budget", [1 << 17, 1 << 20, 512 << 20, 40 * GIB, 400 * GIB])
def test_a_chunk_fits_the_memory_and_the_packet(world: int, budget: int) -> None:
    chunk = chunk_bytes(budget, world, handles=2)
    assert 0 < chunk <= MOST_AT_ONCE == GIB
    assert chunk % 4096 == 0
    assert 2 * (world + 1) * chunk + chunk <= budget
    # As much as there is, to a page a part.
    assert chunk == MOST_AT_ONCE or (2 * (world + 1) + 1) * (chunk + 4096) > budget


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"whole_job": False}, "a group of part of the job"),
        ({"world": 9}, "9 ranks: mori's kernel sends to at most 8"),
    ],
)
def test_groups_that_mori_cannot_have(changed: dict[str, Any], reason: str) -> None:
    arguments = {"device": "cpu", "group": "g", "rank": 0, "world": 2} | {
        "whole_job": True,
        "budget": 1 << 20,
    }
    with pytest.raises(Refused, match=reason):
        Offer(**(arguments | changed)).prepare()


def mori_of(monkeypatch: pytest.MonkeyPatch, gather: type | None, **shmem: Any) -> None:
    """Makes a mori with AllgatherSdma `gather` what is found by import."""
    ccl = types.ModuleType("mori.ccl")
    if gather is not None:
        ccl.AllgatherSdma = gather  # type: ignore[attr-defined]
    found = types.ModuleType("mori.shmem")
    whole = {
        "shmem_get_unique_id": lambda: b"",
        "shmem_mype": lambda: 0,
        "shmem_npes": lambda: 1,
        "shmem_init_attr": lambda flags, rank, nranks, unique_id: 0,
        "MORI_SHMEM_INIT_WITH_UNIQUEID": 1,
    }
    for name, value in (whole | shmem).items():
        if value is not None:
            setattr(found, name, value)
    for name, module in (("mori", types.ModuleType("mori")), ("mori.ccl", ccl)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "mori.shmem", found)


class Whole:
    def __init__(self, my_pe, npes, input_buffer_size, output_buffer_size, copy_output_to_user):
        pass

    def __call__(self, input_data, output_data, count, stream=None, capturing=False):
        pass

    def get_output_transit_buffer(self, dtype=None, device=None):
        pass


class HoldsUpTheHost(Whole):
    def __call__(self, input_data, output_data, count, stream=None):
        pass


class Renamed(Whole):
    def __init__(self, my_pe, npes, input_buffer, output_buffer_size, copy_output_to_user):
        pass


class KeepsItsBuffer(Whole):
    get_output_transit_buffer = None  # type: ignore[assignment]


def test_a_mori_that_has_it_all_is_found_and_told_to_use_sdma(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mori_of(monkeypatch, Whole)
    library = find()
    assert library.collective is Whole
    assert library.dtype is None
    assert os.environ["MORI_ENABLE_SDMA"] == "1"


@pytest.mark.parametrize(
    ("gather", "shmem", "reason"),
    [
        (HoldsUpTheHost, {}, "AllgatherSdma's call does not take capturing"),
        (Renamed, {}, "ccl.AllgatherSdma does not take input_buffer_size"),
        (KeepsItsBuffer, {}, "no ccl.AllgatherSdma.get_output_transit_buffer"),
        (None, {}, "no ccl.AllgatherSdma; this mori has no ccl.AllGatherIntoTensor"),
        (Whole, {"shmem_mype": None}, "no shmem.shmem_mype"),
        (Whole, {"shmem_init_attr": lambda flags, rank: 0}, "does not take nranks, unique_id"),
        (Whole, {"MORI_SHMEM_INIT_WITH_UNIQUEID": None}, "no shmem.MORI_SHMEM_INIT_WITH_UNIQUEID"),
    ],
)
def test_a_mori_that_lacks_something_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, gather: type | None, shmem: dict[str, Any], reason: str
) -> None:
    mori_of(monkeypatch, gather, **shmem)
    with pytest.raises(Refused, match=reason):
        find()


def test_no_mori_is_refused_with_what_the_import_says() -> None:
    with pytest.raises(Refused, match="ModuleNotFoundError: No module named 'mori'"):
        find()


@pytest.mark.parametrize("off", ["0", "false", "OFF", "no"])
def test_whoever_turned_sdma_off_is_heard(monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    monkeypatch.setenv("MORI_ENABLE_SDMA", off)
    with pytest.raises(Refused, match=f"MORI_ENABLE_SDMA={off}"):
        find()
