"""`pg-sdma info`: what it says of this machine, and what its exit status says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_bench import pg_sdma

from pg_sdma import tuning
from pg_sdma.settings import Settings

QUICK = ("info", "--seconds", "0")


def by_name(printed: str) -> dict[str, str]:
    return {line[:16].strip(): line[16:] for line in printed.splitlines()}


def test_a_machine_on_which_the_direct_route_works(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    tuning.write(path, tuning.entry_here(Settings(), "cpu", 2, {"all_gather": 4096}, "today"))
    environ = {"PG_SDMA_TUNING": str(path), "PG_SDMA_RING": "8"}
    found = json.loads(pg_sdma(*QUICK, "--json", **environ))
    assert found["direct_works"] is True
    settings = {s["name"]: (s["value"], s["from"]) for s in found["settings"]}
    assert settings["PG_SDMA_RING"] == ("8", "environment")
    assert settings["PG_SDMA_STRICT"] == ("0", "default")
    (route,) = found["routes"]
    test = route["self_test"]
    # Gathers under the tuned bound too: the test is of the route.
    assert (test["device"], test["ranks"], test["route"]) == ("cpu", 2, "direct")
    assert test["wrong"] == 0 and test["gathers"] >= 6
    assert test["time"] > 0 and test["inner_time"] > 0 and test["inner"] == "gloo"
    assert route["bounds"]["bytes"] == {"all_gather": 4096, "coalesced": 0}
    assert route["bounds"]["from"] == f"{path}, measured today"
    enough_cores = len(os.sched_getaffinity(0)) >= 2
    assert test["transport"] == ("slots" if enough_cores else "pull")
    assert route["auto"].startswith("slots of " if enough_cores else "each rank pulls")
    assert bool(route["why_not_faster"]) != enough_cores


def test_what_people_read_tells_settings_and_why_not_direct() -> None:
    # A strict group would raise where the test has to tell the reason.
    environ = {"PG_SDMA_STRICT": "1", "PG_SDMA_INJECT": "engine=refuse@1"}
    printed = pg_sdma(*QUICK, "--ranks", "3", status=1, **environ, PG_SDMA_MIN_BYTES="7")
    found = by_name(printed)
    why = found["CPU tensors"].removeprefix("inner: ").removesuffix(", with 3 ranks")
    assert why.startswith("rank 1: ")
    assert found["not faster"] == f"gloo carries all-gathers: {why}"
    assert "PG_SDMA_MIN_BYTES=7 (from the environment)" in printed
    assert found["go direct"] == (
        "all-gathers from 7 bytes on, the mean of coalesced all-gathers from 0 bytes on "
        "(from: PG_SDMA_MIN_BYTES)"
    )
    assert found["tuning file"] == "none: PG_SDMA_MIN_BYTES is set"
    assert found["result"] == "the direct route does not work here for CPU tensors"
    assert "built for torch" in found["pg_sdma"]


def test_what_is_switched_off_is_not_said_to_fail() -> None:
    found = by_name(pg_sdma(*QUICK, status=1, PG_SDMA="off"))
    assert found["CPU tensors"] == "not tried: PG_SDMA=off"
    assert found["result"].startswith("the direct route is off, and was not tried, here for ")


@pytest.mark.nightly
def test_a_rank_that_dies_is_told_of() -> None:
    found = by_name(pg_sdma(*QUICK, status=1, PG_SDMA_INJECT="carry=die@1"))
    assert found["CPU tensors"].startswith("the self-test failed: ")
    assert found["result"] == "the direct route does not work here for CPU tensors"
