"""Environment variables: every one parsed, refused and documented."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from pg_sdma.settings import Settings, read_settings, settings_page, variables

ROOT = Path(__file__).parents[2]


def test_nothing_set_gives_the_defaults() -> None:
    assert read_settings({}) == Settings()
    assert read_settings({"PG_SDMA": "", "PG_SDMA_RING": " ", "PATH": "/bin"}) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("PG_SDMA", "off", "enabled", False),
        ("PG_SDMA", " on ", "enabled", True),
        ("PG_SDMA_TRANSPORT", "peer", "transport", "peer"),
        ("PG_SDMA_TRANSPORT", "mori", "transport", "mori"),
        ("PG_SDMA_MORI_BYTES", "131072", "mori_bytes", 131072),
        ("PG_SDMA_MORI_ON_CPU", "1", "mori_on_cpu", True),
        ("PG_SDMA_INNER", "gloo", "inner", {"cuda": "gloo"}),
        ("PG_SDMA_INNER", "cpu=mpi, cuda=ucc", "inner", {"cpu": "mpi", "cuda": "ucc"}),
        ("PG_SDMA_OPS", "reduce_scatter", "ops", ("reduce_scatter",)),
        ("PG_SDMA_OPS", "reduce_scatter, all_gather", "ops", ("all_gather", "reduce_scatter")),
        ("PG_SDMA_LANDING_BYTES", "4096", "landing_bytes", 4096),
        ("PG_SDMA_MIN_BYTES", "0", "min_bytes", 0),
        ("PG_SDMA_MIN_BYTES", "65536", "min_bytes", 65536),
        ("PG_SDMA_MIN_BYTES", "64K", "min_bytes", 65536),
        ("PG_SDMA_LANDING_BYTES", "4m", "landing_bytes", 4 << 20),
        ("PG_SDMA_TUNING", "/etc/tuning.json", "tuning", "/etc/tuning.json"),
        ("PG_SDMA_PATIENCE_MS", "0.5", "patience_ms", 0.5),
        ("PG_SDMA_LATE", "inner", "late", "inner"),
        ("PG_SDMA_STRICT", "1", "strict", True),
        ("PG_SDMA_PTRACER", "0", "ptracer", False),
        ("PG_SDMA_RING", "2", "ring", 2),
        ("PG_SDMA_ALLOW_SAME_DEVICE", "1", "allow_same_device", True),
        ("PG_SDMA_ALLOW_PCIE", "1", "allow_pcie", True),
        ("PG_SDMA_DRIVER", "/opt/lib/standin.so", "driver", "/opt/lib/standin.so"),
        ("PG_SDMA_TRACE_ENTRIES", "0", "trace_entries", 0),
        ("PG_SDMA_TRACE_FILE", "/tmp/record-", "trace_file", "/tmp/record-"),
        ("PG_SDMA_INJECT", "memfd=refuse@0", "inject", ("memfd=refuse@0",)),
        ("PG_SDMA_INJECT", "a=die#2, b=late:0.5", "inject", ("a=die#2", "b=late:0.5")),
    ],
)
def test_a_variable_sets_its_field_alone(name: str, text: str, field: str, value: Any) -> None:
    assert read_settings({name: text}) == dataclasses.replace(Settings(), **{field: value})


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("PG_SDMA", "1", "`on` or `off`"),
        ("PG_SDMA_TRANSPORT", "push", "`auto`, `peer` or `mori`"),
        ("PG_SDMA_MORI_BYTES", "131071", "bytes from 131072"),
        ("PG_SDMA_INNER", "sdma", "a backend for GPU tensors"),
        ("PG_SDMA_INNER", "cuda=sdma", "a backend for GPU tensors"),
        ("PG_SDMA_INNER", "tpu=gloo", "a backend for GPU tensors"),
        ("PG_SDMA_INNER", "cuda=", "a backend for GPU tensors"),
        ("PG_SDMA_OPS", "all_reduce", "one or both of `all_gather` and `reduce_scatter`"),
        ("PG_SDMA_OPS", "all_gather,", "one or both of `all_gather` and `reduce_scatter`"),
        ("PG_SDMA_LANDING_BYTES", "4095", "bytes from 4096"),
        ("PG_SDMA_MIN_BYTES", "-1", "bytes from 0"),
        ("PG_SDMA_MIN_BYTES", "64T", "with K, M or G as `64K`"),
        ("PG_SDMA_PATIENCE_MS", "0", "milliseconds, above 0"),
        ("PG_SDMA_PATIENCE_MS", "nan", "milliseconds, above 0"),
        ("PG_SDMA_PATIENCE_MS", "inf", "milliseconds, above 0"),
        ("PG_SDMA_STRICT", "yes", "`1` or `0`"),
        ("PG_SDMA_RING", "1", "an integer from 2"),
        ("PG_SDMA_TRACE_ENTRIES", "-1", "an integer from 0"),
        ("PG_SDMA_INJECT", "memfd", "`point=action`"),
        ("PG_SDMA_INJECT", "memfd=explode", "`point=action`"),
        ("PG_SDMA_INJECT", "memfd=die#0", "`point=action`"),
    ],
)
def test_a_bad_value_is_refused_by_name_with_what_is_allowed(
    name: str, text: str, allowed: str
) -> None:
    with pytest.raises(ValueError) as refused:
        read_settings({name: text})
    message = str(refused.value)
    assert message.startswith(f"{name}='{text}' is not allowed: give ")
    assert allowed in message


def test_an_unknown_variable_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"PG_SDMA_PATIENCE": "5", "PG_SDMA_SANITIZE": "address"}
    with caplog.at_level(logging.WARNING, logger="pg_sdma"):
        assert read_settings(environ) == read_settings(environ) == Settings()
    (record,) = caplog.records
    assert "PG_SDMA_PATIENCE is no setting" in record.message
    assert record.message.endswith("did you mean PG_SDMA_PATIENCE_MS?")


def test_agreed_settings_are_told_apart_and_the_others_are_not() -> None:
    others = {
        "PG_SDMA": "off",
        "PG_SDMA_TRANSPORT": "peer",
        "PG_SDMA_MORI_BYTES": "131072",
        "PG_SDMA_MORI_ON_CPU": "1",
        "PG_SDMA_INNER": "gloo",
        "PG_SDMA_OPS": "reduce_scatter",
        "PG_SDMA_LANDING_BYTES": "8192",
        "PG_SDMA_MIN_BYTES": "0",
        "PG_SDMA_TUNING": "off",
        "PG_SDMA_PATIENCE_MS": "7",
        "PG_SDMA_LATE": "inner",
        "PG_SDMA_STRICT": "1",
        "PG_SDMA_PTRACER": "0",
        "PG_SDMA_RING": "4",
        "PG_SDMA_ALLOW_SAME_DEVICE": "1",
        "PG_SDMA_ALLOW_PCIE": "1",
        "PG_SDMA_DRIVER": "/opt/lib/standin.so",
        "PG_SDMA_TRACE_ENTRIES": "7",
        "PG_SDMA_TRACE_FILE": "/tmp/record-",
        "PG_SDMA_INJECT": "memfd=refuse",
    }
    default = Settings().agreed()
    for variable in variables().values():
        changed = read_settings({variable.name: others[variable.name]}).agreed()
        assert (changed != default) == variable.agreed, variable.name


def test_agreed_is_the_same_for_two_spellings_of_one_setting() -> None:
    spelled_out = read_settings({"PG_SDMA_INNER": "cuda=nccl,cpu=gloo", "PG_SDMA_RING": "16"})
    assert spelled_out.agreed() == Settings().agreed()
    there = read_settings({"PG_SDMA_OPS": "all_gather,reduce_scatter"}).agreed()
    assert there == read_settings({"PG_SDMA_OPS": "reduce_scatter , all_gather"}).agreed()
    assert "PG_SDMA_OPS=all_gather,reduce_scatter" in there
    assert "PG_SDMA_INNER=cpu=gloo,cuda=nccl" in Settings().agreed()


def test_inner_backend_falls_back_to_the_vendors() -> None:
    settings = read_settings({"PG_SDMA_INNER": "ucc"})
    assert (settings.inner_backend("cpu"), settings.inner_backend("cuda")) == ("gloo", "ucc")
    assert Settings().inner_backend("cuda") == "nccl"


def test_the_documentation_is_what_the_declarations_give() -> None:
    written = (ROOT / "docs" / "settings.md").read_text()
    assert written == settings_page(), "run: python -m pg_sdma.settings > docs/settings.md"


def test_what_is_injected_where() -> None:
    settings = read_settings({"PG_SDMA_INJECT": "memfd=refuse@0,agree=die#2@1,carry=late:1"})
    assert settings.inject_on(0) == "memfd=refuse,carry=late:1"
    assert settings.inject_on(1) == "agree=die#2,carry=late:1"
    assert settings.inject_on(2) == "carry=late:1"
