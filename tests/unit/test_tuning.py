"""The tuning file: found, read, refused, written."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pg_sdma import machine, tuning
from pg_sdma.settings import Settings, read_settings

BOUNDS = {"all_gather": 65536, "coalesced": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "tuning.json"


def settings_with(path: Path, **environ: str) -> Settings:
    return read_settings({"PG_SDMA_TUNING": str(path), **environ})


def entry(bounds: Any = BOUNDS, ranks: int = 2) -> tuning.Entry:
    return tuning.entry_here(Settings(), "cpu", ranks, bounds, "2026-01-31T12:00:00+00:00")


def test_what_is_written_is_found_by_groups_of_that_kind_alone(path: Path) -> None:
    tuning.write(path, entry())
    settings = settings_with(path)
    found = tuning.look_up(settings, "cpu", 2)
    assert (found.entry, found.path, found.why_none, found.ignored) == (entry(), path, "", False)
    for other, device, ranks in (
        (settings, "cpu", 4),
        (settings, "cuda", 2),
        (settings_with(path, PG_SDMA_INNER="cpu=mpi"), "cpu", 2),
        (settings_with(path, PG_SDMA_TRANSPORT="peer"), "cpu", 2),
    ):
        found = tuning.look_up(other, device, ranks)
        assert found.entry is None and not found.ignored
        assert found.why_none.startswith(f"no entry for {ranks} ranks on {device}")


def test_an_entry_for_gpus_where_torch_sees_none(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    on_gpus = dataclasses.replace(entry(), device="cuda", device_name="GPU X", inner="nccl")
    tuning.write(path, on_gpus)
    assert tuning.bounds_for(settings_with(path), ["cpu", "cuda"], 2) == {}
    assert "(no GPU, nccl, " in tuning.look_up(settings_with(path), "cuda", 2).why_none
    assert not caplog.records


def test_an_entry_for_gpus(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU X")
    monkeypatch.setattr(machine, "NVIDIA_MODULE", path.parent / "none")
    facts = {"device": "cuda", "device_name": "GPU X", "inner": "nccl", "driver": "unknown"}
    on_gpus = dataclasses.replace(entry({"reduce_scatter": 64}), **facts)
    tuning.write(path, on_gpus)
    tuning.write(path, entry())
    assert tuning.bounds_for(settings_with(path), ["cpu", "cuda"], 2) == {
        "cpu": {"min_bytes": 65536, "min_mean_bytes": 0, "text": " tuned=" + entry().in_words()},
        "cuda": {"min_sum_bytes": 64, "text": " tuned=reduce_scatter:64"},
    }


@pytest.mark.parametrize("name", ["host", "device_name"])
def test_another_machine_s_entry_is_no_entry(
    path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    tuning.write(path, dataclasses.replace(entry(), **{name: "another"}))
    assert tuning.look_up(settings_with(path), "cpu", 2).why_none.startswith("no entry for 2 ranks")
    assert tuning.bounds_for(settings_with(path), ["cpu"], 2) == {}
    assert not caplog.records


def test_an_entry_replaces_that_of_the_same_groups_alone(path: Path) -> None:
    tuning.write(path, entry())
    tuning.write(path, entry(ranks=4))
    newer = entry({"all_gather": tuning.NEVER})
    tuning.write(path, newer)
    assert tuning.read(path) == [entry(ranks=4), newer]
    assert {file.name for file in path.parent.iterdir()} == {path.name, f".{path.name}.lock"}


def test_writers_at_the_same_time_lose_no_entry(path: Path) -> None:
    start = threading.Barrier(4)

    def write(number: int) -> None:
        start.wait()
        for i in range(10):
            tuning.write(path, entry(ranks=2 + 10 * number + i))

    # A lock on a file is its opener's: threads stand for processes.
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(write, range(4)))
    assert sorted(found.ranks for found in tuning.read(path)) == list(range(2, 42))


def test_who_may_read_the_file_stays_and_a_link_stays_one(path: Path, tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        tuning.write(path, entry())
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644  # other users' groups read it
    path.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    tuning.write(link, entry(ranks=4))
    assert link.is_symlink() and len(tuning.read(path)) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["torch", "driver", "pg_sdma"])
def test_a_stale_entry_is_warned_about_once_and_ignored(
    path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    tuning.write(path, dataclasses.replace(entry(), **{name: "0.0.1"}))
    with caplog.at_level(logging.WARNING, logger="pg_sdma"):
        for _ in range(2):
            assert tuning.bounds_for(settings_with(path), ["cpu"], 2) == {}
    (record,) = caplog.records
    assert str(path) in record.message
    assert f"stale: measured with {name} 0.0.1, this is " in record.message


def broken(**changes: Any) -> str:
    """A file with one entry, of which `changes` are made; a None leaves the field out."""
    changed = dataclasses.asdict(entry()) | changes
    kept = {name: value for name, value in changed.items() if value is not None}
    return json.dumps({"version": 1, "entries": [kept]})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is no JSON"),
        ('{"version": 1, "entr', "it is no JSON"),
        ("[" * 200_000, "it is no JSON"),  # deeper than Python recurses
        ("[]", "it has no version"),
        ('{"entries": []}', "it has no version"),
        ('{"version": 2, "entries": []}', "it has version 2, this pg_sdma reads 1"),
        ('{"version": "1", "entries": []}', "it has version '1'"),
        ('{"version": 1}', "it has no list of entries"),
        ('{"version": 1, "entries": {}}', "it has no list of entries"),
        ('{"version": 1, "entries": [[]]}', "entry 0 of it is no object"),
        (broken(driver=None), "entry 0 of it has no driver"),
        (broken(host=7), "entry 0 of it has host 7, not a text"),
        (broken(ranks=0), "entry 0 of it has ranks 0, not an integer from 1"),
        (broken(ranks=True), "entry 0 of it has ranks True"),
        (broken(ranks="2"), "entry 0 of it has ranks '2'"),
        (broken(bounds=[]), "has bounds that are no object"),
        (broken(bounds={"all_reduce": 1}), "has a bound for 'all_reduce', none of all_gather"),
        (broken(bounds={"all_gather": -1}), "has the bound -1 for all_gather"),
        (broken(bounds={"all_gather": 2**64}), "for all_gather, neither bytes nor 'never'"),
        (broken(bounds={"all_gather": 1.5}), "has the bound 1.5"),
        (broken(bounds={"all_gather": "64K"}), "has the bound '64K'"),
    ],
)
def test_a_file_that_is_not_right_is_ignored_whole_with_the_reason(
    path: Path, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING, logger="pg_sdma"):
        assert tuning.bounds_for(settings_with(path), ["cpu"], 2) == {}
    (record,) = caplog.records
    assert record.message.startswith(f"the tuning file {path} is ignored: ")
    assert why in record.message
    tuning.write(path, entry())  # and tuning anew cures it
    assert tuning.read(path) == [entry()]


def test_a_file_that_cannot_be_read_is_ignored(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir(parents=True)
    with caplog.at_level(logging.WARNING, logger="pg_sdma"):
        assert tuning.bounds_for(settings_with(path), ["cpu"], 2) == {}
    (record,) = caplog.records
    assert "it cannot be read" in record.message


def test_a_pipe_is_not_waited_for(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    found = tuning.look_up(settings_with(path), "cpu", 2)
    assert found.ignored and found.why_none == "it cannot be read (it is no regular file)"


def test_a_gpu_that_torch_cannot_name_is_no_reason_to_fail(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises() -> str:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", raises)
    tuning.write(path, dataclasses.replace(entry(), device="cuda"))
    with caplog.at_level(logging.WARNING, logger="pg_sdma"):
        assert tuning.bounds_for(settings_with(path), ["cuda"], 2) == {}
    (record,) = caplog.records
    assert "what cuda is here cannot be told (Cannot re-initialize CUDA" in record.message


def test_a_missing_file_is_warned_about_only_where_it_was_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(path.parent))
    with caplog.at_level(logging.WARNING, logger="pg_sdma"):
        assert tuning.bounds_for(read_settings({}), ["cpu"], 2) == {}
        assert not caplog.records
        assert tuning.bounds_for(settings_with(path), ["cpu"], 2) == {}
    (record,) = caplog.records
    assert "there is no such file" in record.message


def test_no_file_is_read_where_the_bound_is_set_or_tuning_or_sdma_is_off(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_text("no JSON")
    with caplog.at_level(logging.WARNING, logger="pg_sdma"):
        for settings in (
            settings_with(path, PG_SDMA_MIN_BYTES="7"),
            settings_with(path, PG_SDMA="off"),
            read_settings({"PG_SDMA_TUNING": "off"}),
        ):
            assert tuning.bounds_for(settings, ["cpu"], 2) == {}
    assert not caplog.records
    set_by_hand = tuning.look_up(settings_with(path, PG_SDMA_MIN_BYTES="0"), "cpu", 2)
    assert set_by_hand.why_none == "PG_SDMA_MIN_BYTES is set"
    off = tuning.look_up(read_settings({"PG_SDMA_TUNING": "off"}), "cpu", 2)
    assert (off.path, off.why_none) == (None, "PG_SDMA_TUNING=off")


def test_what_the_extension_is_given(path: Path) -> None:
    tuning.write(path, entry({"all_gather": 4096, "reduce_scatter": tuning.NEVER}))
    assert tuning.bounds_for(settings_with(path), ["cpu"], 2) == {
        "cpu": {
            "min_bytes": 4096,
            "min_sum_bytes": 2**63 - 1,
            "text": " tuned=all_gather:4096,reduce_scatter:never",
        }
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CONFIG_HOME": "/etc/xdg", "HOME": "/home/a"}, "/etc/xdg/pg_sdma/tuning.json"),
        ({"XDG_CONFIG_HOME": "", "HOME": "/home/a"}, "/home/a/.config/pg_sdma/tuning.json"),
        ({"XDG_CONFIG_HOME": "here", "HOME": "/home/a"}, "/home/a/.config/pg_sdma/tuning.json"),
        ({}, None),
    ],
)
def test_the_default_place(environ: dict[str, str], expected: str | None) -> None:
    found = tuning.default_path(environ)
    assert (None if found is None else str(found)) == expected


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\nGCC 13.3", "580.95.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  R", "570.86.15"),
        ("6.12.12\n", "6.12.12"),
        ("", "unknown"),
    ],
)
def test_a_driver_s_version_is_read_off_its_module(
    text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "version"
    if text:
        module.write_text(text)
    monkeypatch.setattr(machine, "NVIDIA_MODULE", module)
    monkeypatch.setattr(machine, "AMD_MODULE", module)
    assert machine.driver("cuda") == version
