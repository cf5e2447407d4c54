"""The vote over drivers that work, and over some that do not do what they say: on the stand-in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cpp_program import SANITIZE
from standin_programs import CUDA, HIP, OUT, built, run

__all__ = ["built"]  # a fixture


@pytest.mark.parametrize("driver", [CUDA, HIP], ids=["cuda", "hip"])
def test_a_vote_over_drivers_that_work(driver: str, tmp_path: Path) -> None:
    [found] = vote(tmp_path, driver, ranks=3)
    assert found.startswith("direct, ")


def test_a_vote_of_one_rank(tmp_path: Path) -> None:
    [found] = vote(tmp_path, CUDA, ranks=1)
    assert found.startswith("direct, ")


@pytest.mark.parametrize(
    ("engines", "ways"), [(1, "one way at a time"), (0, "both ways at once")], ids=["one", "two"]
)
def test_the_vote_measures_what_copies_take(engines: int, ways: str, tmp_path: Path) -> None:
    """8 MiB in 20 ms; through one engine, as of an H200, or one for each stream."""
    env = {"STANDIN_PEER_COPY_US": "20000", "STANDIN_PEER_ENGINES": str(engines)}
    [found] = vote(tmp_path, CUDA, ranks=2, **env)
    told = re.fullmatch(r"direct, copies at (\S+) bytes/s, (.*)", found)
    assert told, found
    # Not faster than that, and slower where this machine does other things.
    assert 0 < float(told[1]) <= (8 << 20) / 20e-3
    assert told[2] == ways


def test_hips_late_calls_are_the_inners_and_nothing_is_measured(tmp_path: Path) -> None:
    [found] = vote(tmp_path, HIP, ranks=2)
    assert float(found.split()[3]) == 0, found


FAULTS = {
    "silent": "got nothing from rank",
    "silent:16384:16384": "got nothing from rank . at shards of 16384 bytes",
    "silent:1048577": "got nothing from rank . at shards of 1048577 bytes",
    "late": "got nothing from rank",
    "local": "the self-test got .* from rank",
    # Sanitized programs are so slow that a rank may have missed the bytes before.
    "stuck": "(have not ended after|the self-test got nothing from rank)"
    if SANITIZE
    else "have not ended after",
    "early": "streams do not wait for counters",
    # After the 2 of the probe: found by the bytes of a gather, mostly.
    "early:2": "(the self-test|a wait in the stream of rank .) ",
    # And after those of 18 gathers and of one in which a rank is held back. Not sooner: enqueuing
    # behind a broken wait waits for those before it, and so for the rank that is held.
    "early:80": "(the self-test got nothing from|a wait in the stream of) rank",
}


@pytest.mark.parametrize("victim", [2, -1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_hip_sends_the_group_to_the_inner(fault: str, victim: int, tmp_path: Path) -> None:
    """On one rank, or on all: every rank has the same reason, and ends."""
    patience = 1500 if fault == "stuck" else 60000
    [found] = vote(tmp_path, HIP, ranks=3, victim=victim, patience_ms=patience, STANDIN_FAULT=fault)
    assert re.search(f"inner: rank .*{FAULTS[fault]}", found), found


# CUDA's sizes have no switches of path between them, and its waits are not held back.
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if ":" not in fault])
def test_a_broken_cuda_sends_the_group_to_the_inner(fault: str, tmp_path: Path) -> None:
    patience = 1500 if fault == "stuck" else 60000
    [found] = vote(tmp_path, CUDA, ranks=3, victim=1, patience_ms=patience, STANDIN_FAULT=fault)
    assert re.search(f"inner: rank .*{FAULTS[fault]}", found), found


def test_copies_that_hang_are_given_up_while_the_ranks_can_still_agree(tmp_path: Path) -> None:
    """A timeout below the patience must not make some ranks raise and others use the inner."""
    [found] = vote(tmp_path, HIP, ranks=3, victim=2, timeout_ms=6000, STANDIN_FAULT="stuck")
    assert re.search(f"inner: rank .*{FAULTS['stuck']}", found), found


def test_an_export_that_fails_on_one_rank_sends_all_to_the_inner(tmp_path: Path) -> None:
    [found] = vote(tmp_path, HIP, ranks=3, victim=1, STANDIN_FAIL="hipIpcGetMemHandle:1")
    assert re.search("inner: rank 1: .*hipIpcGetMemHandle: .*999", found), found


@pytest.mark.parametrize("call", ["hipIpcOpenMemHandle:1", "hipIpcOpenMemHandle:4"])
def test_an_import_that_fails_once_is_tried_again(call: str, tmp_path: Path) -> None:
    [found] = vote(tmp_path, HIP, ranks=3, victim=1, STANDIN_FAIL=call)
    assert found.startswith("direct, "), found


@pytest.mark.parametrize("call", ["hipMemcpyAsync:1", "hipMemcpyAsync:6", "hipStreamWaitValue64:7"])
def test_a_call_that_fails_in_the_self_test_sends_all_to_the_inner(
    call: str, tmp_path: Path
) -> None:
    [found] = vote(tmp_path, HIP, ranks=3, victim=1, STANDIN_FAIL=call)
    assert re.search(f"inner: rank 1: .*{call.partition(':')[0]}: .*999", found), found


def vote(
    folder: Path,
    driver: str,
    *,
    ranks: int,
    victim: int = -1,
    timeout_ms: int = 60000,
    patience_ms: int = 60000,
    **env: str,
) -> set[str]:
    """What the ranks of a group say of its route; `env` is that of rank `victim`, or of all."""
    pairs = [f"{name}={value}" for name, value in env.items()]
    numbers = [str(number) for number in (ranks, victim, patience_ms, timeout_ms)]
    done = run([OUT / "vote", driver, folder, *numbers, *pairs])
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"^rank \d: (.*)$", done.stdout, re.MULTILINE)
    assert len(said) == ranks, done.stdout
    return set(said)
