"""The device engine's own code, on the stand-in for the drivers of CUDA and HIP: no GPU, no torch.

tests/standin holds the stand-in and the programs run here; ASSUMPTIONS.md there says what it takes
for granted of CUDA, and of HIP.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from cpp_program import SANITIZE
from standin_programs import CUDA, HIP, LIBRARY, OUT, ROOT, STANDIN, built, run

__all__ = ["built"]  # a fixture

CHECKS = [
    name
    for source in sorted(STANDIN.glob("check_*.cpp"))
    for name in re.findall(r"^CHECK\((\w+)\)", source.read_text(), re.MULTILINE)
    if not name.startswith("an_import_that")
]
CUDA_CHECKS = [name for name in CHECKS if not name.startswith("hip_")]
# HIP has no contexts, and none of the chunks of expandable segments is shared.
HIP_CHECKS = [name for name in CHECKS if not re.search("chunk|descriptors|context", name)]


def check(name: str, driver: str = CUDA, **env: str) -> None:
    done = run([OUT / "checks", driver, name], **env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", CUDA_CHECKS)
def test_check(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", HIP_CHECKS)
def test_check_by_hip(name: str) -> None:
    check(name, HIP)


def test_replaced_chunks_on_a_driver_without_block_ids() -> None:
    check("a_replaced_chunk_is_another_export", STANDIN_BLOCK_IDS="0")


@pytest.mark.parametrize("driver", [CUDA, HIP], ids=["cuda", "hip"])
@pytest.mark.parametrize("link", ["nvlink", "pcie", "none"])
def test_links(link: str, driver: str) -> None:
    check("links_are_told_apart", driver, STANDIN_LINK=link)


@pytest.mark.parametrize(
    "call",
    [
        "cuMemAddressReserve:1",
        "cuMemImportFromShareableHandle:3",
        "cuMemMap:2",
        "cuMemSetAccess:1",
    ],
)
def test_an_import_that_fails_leaves_nothing_mapped(call: str) -> None:
    check("an_import_that_fails_leaves_nothing_mapped", IMPORTER_FAIL=call)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"STANDIN_MIG": "1"}, "MIG instance"),
        ({"STANDIN_64BIT": "0"}, "no 64-bit stream memory operations"),
        ({"STANDIN_QUEUES": "1"}, "holds up the others"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ({"STANDIN_FAIL": "cuMemHostRegister_v2:1:800"}, "cuMemHostRegister_v2: .*800"),
    ],
)
def test_devices_that_cannot_take_part_say_why(env: dict[str, str], reason: str) -> None:
    assert re.search(reason, run([OUT / "checks", LIBRARY, "refusal"], **env).stdout)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"STANDIN_64BIT": "0"}, "no stream memory operations"),
        ({"STANDIN_QUEUES": "1"}, "holds up the others"),
        ({"GPU_STREAMOPS_CP_WAIT": "1"}, "GPU_STREAMOPS_CP_WAIT is set"),
        (
            {"STANDIN_FAIL": "hipDeviceEnablePeerAccess:2:1"},
            "hipDeviceEnablePeerAccess: .*result 1",
        ),
        ({"STANDIN_FAULT": "early"}, "do not wait for counters"),
    ],
)
def test_hip_devices_that_cannot_take_part_say_why(env: dict[str, str], reason: str) -> None:
    assert re.search(reason, run([OUT / "checks", HIP, "refusal"], **env).stdout)


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("hip:libc.so.6", "has no hipInit: it is too old"),
        ("libc.so.6", "has no cuInit: it is too old"),
        ("none.so", "cannot be opened: none.so"),
    ],
)
def test_drivers_that_cannot_be_used_say_why(library: str, reason: str) -> None:
    assert reason in run([OUT / "checks", library, "refusal"]).stdout


@pytest.mark.parametrize("queues", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gathers(ranks: int, queues: int, tmp_path: Path) -> None:
    """Bytes are right and nothing hangs, also where all streams share one or two queues.

    2016 random gathers over the three numbers of ranks with no queue shared, and with one for all.
    """
    output = stress(tmp_path, ranks=ranks, queues=queues, seed=ranks + queues, batches=84)
    assert set(re.findall(r"\d+ inner", output)) == {"0 inner"}, output
    assert min(int(n) for n in re.findall(r"(\d+) batched", output)) > 0, output


@pytest.mark.parametrize("queues", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gathers_by_hip(ranks: int, queues: int, tmp_path: Path) -> None:
    """2016 random gathers in all, beside the table: with HIP's few queues, and a stream a peer."""
    output = stress(tmp_path, HIP, ranks=ranks, queues=queues, seed=ranks + queues, batches=28)
    assert set(re.findall(r"\d+ inner", output)) == {"0 inner"}, output


def test_random_gathers_by_hip_of_late_ranks(tmp_path: Path) -> None:
    delay = {"STANDIN_DELAY_US": "100"}
    output = stress(tmp_path, HIP, ranks=3, queues=2, patience_us=5000, seed=5, **delay)
    assert len(set(re.findall(r"\d+ direct, \d+ inner", output))) == 1, output


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_groups_in_one_hardware_queue_do_not_wait_for_one_another(
    ranks: int, tmp_path: Path
) -> None:
    """Without enqueue_alone() this hangs: two ranks enqueue two operations in different orders."""
    done = run([OUT / "two_groups", HIP, tmp_path, str(ranks), "100", str(ranks)])
    assert done.returncode == 0, done.stdout + done.stderr
    direct = [int(n) for n in re.findall(r"(\d+) direct", done.stdout)]
    assert len(direct) == ranks and len(set(direct)) == 1 and direct[0] > 0, done.stdout


@pytest.mark.parametrize(("ranks", "queues", "room"), [(2, 1, 4096), (3, 4, 1024)])
def test_reduce_scatters_by_hip(ranks: int, queues: int, room: int, tmp_path: Path) -> None:
    """Down to hipModuleLaunchKernel; test_reduction_kernel_for_amd.py has what it launches."""
    output = reduce(
        tmp_path, HIP, ranks=ranks, queues=queues, room=room, seed=ranks + queues, cases=20
    )
    assert set(re.findall(r"\d+ direct, \d+ inner", output)) == {"20 direct, 0 inner"}, output


REDUCTIONS = [(2, 0, 1024), (2, 1, 4096), (3, 0, 4096), (3, 1, 1024), (4, 0, 1 << 16), (4, 2, 1024)]


@pytest.mark.parametrize(("ranks", "queues", "room"), REDUCTIONS)
def test_reduce_scatters(ranks: int, queues: int, room: int, tmp_path: Path) -> None:
    """504 of them: sums are right to the bit and nothing hangs, also where streams share queues."""
    output = reduce(tmp_path, ranks=ranks, queues=queues, room=room, seed=ranks + queues, cases=84)
    assert set(re.findall(r"\d+ direct, \d+ inner", output)) == {"84 direct, 0 inner"}, output
    assert min(int(n) for n in re.findall(r"(\d+) launches", output)) > 84


def test_random_reduce_scatters_with_random_delays(tmp_path: Path) -> None:
    env = {"STANDIN_DELAY_US": "300"}
    reduce(tmp_path, ranks=3, queues=0, room=4096, seed=7, cases=20, **env)


def test_random_reduce_scatters_of_late_ranks(tmp_path: Path) -> None:
    env = {"STANDIN_DELAY_US": "100"}
    output = reduce(
        tmp_path, ranks=3, queues=0, room=4096, seed=8, cases=40, patience_us=5000, **env
    )
    assert len(set(re.findall(r"\d+ direct, \d+ inner", output))) == 1, output


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "queues", "room"), REDUCTIONS)
def test_5000_random_reduce_scatters(ranks: int, queues: int, room: int, tmp_path: Path) -> None:
    reduce(tmp_path, ranks=ranks, queues=queues, room=room, seed=99 + ranks, cases=836)


def test_random_gathers_of_late_ranks(tmp_path: Path) -> None:
    """Some operations go to the inner, because a rank's patience ends."""
    output = stress(tmp_path, ranks=3, queues=0, patience_us=5000, seed=5, STANDIN_DELAY_US="100")
    assert len(set(re.findall(r"\d+ direct, \d+ inner", output))) == 1, output


@pytest.mark.parametrize("queues", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_gathers_in_order_of_arrival(ranks: int, queues: int, tmp_path: Path) -> None:
    output = stress(tmp_path, ranks=ranks, queues=queues, seed=ranks + queues, late=True)
    assert len(set(re.findall(r"\d+ direct, \d+ inner", output))) == 1, output
    assert min(int(n) for n in re.findall(r"(\d+) deferred", output)) > 30, output


@pytest.mark.nightly
@pytest.mark.parametrize("queues", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_20000_random_gathers_in_order_of_arrival(ranks: int, queues: int, tmp_path: Path) -> None:
    """In all, beside the table. Lists go to the inner where they are late."""
    output = stress(tmp_path, ranks=ranks, queues=queues, seed=50 + ranks, late=True, batches=420)
    assert min(int(n) for n in re.findall(r"(\d+) deferred", output)) > 1000, output


@pytest.mark.parametrize(
    "case",
    [
        "run-ahead",
        "unreachable",
        "first",
        "tickets",
        "unmapped",
        "parts",
        "held",
        "empty",
        "retry",
        "leave",
        "places",
    ],
)
def test_no_host_waits_for_one_that_is_late(case: str, tmp_path: Path) -> None:
    done = run([OUT / "late", LIBRARY, tmp_path, case])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("case", "theirs"),
    [
        ("mismatch", "Rank 1: gather of 1 uint8 tensor, 1000 bytes of output. Rank 0: gather"),
        ("invalid", "Bad arguments on rank 1: made badly on purpose. "),
        ("other-kind", "Rank 1: list of 1 uint8 tensor, 2000 bytes of output. The others' is an"),
        ("import", "the output of rank 0 cannot be reached: import refused"),
    ],
)
def test_a_late_call_that_does_not_fit_ends_the_group(
    case: str, theirs: str, tmp_path: Path
) -> None:
    done = run([OUT / "late", LIBRARY, tmp_path, case])
    assert done.returncode == 1
    for says in ("rank 1 raised: rank 1: ", "pg_sdma: rank 1: "):
        assert re.search(f"^{says}.*{re.escape(theirs)}", done.stderr, re.MULTILINE), done.stderr


def test_two_late_ranks_that_cannot_share_are_told_at_the_timeout(tmp_path: Path) -> None:
    done = run([OUT / "late", LIBRARY, tmp_path, "strangers"])
    assert done.returncode == 1
    assert re.search(r"^rank 1 raised: .* timed out", done.stderr, re.MULTILINE), done.stderr
    assert re.search(r"^rank 2 raised: .* timed out", done.stderr, re.MULTILINE), done.stderr


def test_random_gathers_with_random_delays(tmp_path: Path) -> None:
    stress(tmp_path, ranks=3, queues=0, seed=6, STANDIN_DELAY_US="300")


def test_a_late_rank_is_waited_for_while_that_costs_nothing(tmp_path: Path) -> None:
    done = run([OUT / "patience", LIBRARY, tmp_path])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("ranks", "driver", "late"), [(2, CUDA, False), (4, CUDA, True), (3, HIP, False)]
)
def test_a_rank_that_is_killed_ends_the_others(
    ranks: int, driver: str, late: bool, tmp_path: Path
) -> None:
    lose(tmp_path, driver, ranks=ranks, fate="killed", seed=ranks, late=late)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    """In the middle of an operation, whose streams wait for it on all other ranks."""
    told = lose(tmp_path, ranks=3, fate="none", seed=1, PG_SDMA_INJECT="carry=die#9")
    assert "2 aborted" in told
    names = set(re.findall(r"the process of (rank \d) has ended", told))
    assert len(names) == 1
    [name] = names
    assert "(operation 9 of group faults, 49152 bytes of output) cannot complete: the " in told
    assert f"Called but not started by {name}" in told
    assert f"Culprit: {name}. Ending this process." in told


def test_a_rank_that_leaves_a_stream_waiting_for_a_dead_one_ends(tmp_path: Path) -> None:
    """The host is told by its next call and leaves the group; the driver would wait for ever.

    Where the machine is busy the watchdog may be first to tell: then once more.
    """
    for seed in range(1, 6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        told = lose(folder, ranks=3, fate="ignored", seed=seed, PG_SDMA_INJECT="carry=die#9")
        assert "2 aborted" in told
        assert told.count("Ending this process.") == 2
        if re.search(r"rank \d is told: .* waits for rank \d, whose process has ended", told):
            return
    pytest.fail("no rank was told by its next call")


def test_a_stalled_rank_is_named_after_the_timeout(tmp_path: Path) -> None:
    told = lose(tmp_path, ranks=3, fate="none", seed=2, PG_SDMA_INJECT="carry=stop#9")
    assert "2 aborted" in told
    assert "cannot complete: it timed out. Called but not started by rank" in told
    assert "Outstanding for 1." in told


def test_a_stopped_rank_ends_the_others(tmp_path: Path) -> None:
    lose(tmp_path, ranks=3, fate="stopped", seed=3)


def test_a_rank_that_leaves_early_is_named(tmp_path: Path) -> None:
    told = lose(tmp_path, ranks=3, fate="departs", seed=4)
    assert re.search(r"waits for rank \d, which has destroyed the group", told), told


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("late", [False, True])
def test_200_killed_ranks(late: bool, tmp_path: Path) -> None:
    aborted = 0
    for seed in range(200):
        folder = tmp_path / str(seed)
        folder.mkdir()
        told = lose(folder, ranks=2 + seed % 3, fate="killed", seed=seed, late=late)
        aborted += int(re.search(r"(\d+) aborted", told)[1])  # type: ignore[index]
    assert aborted > 0


def lose(
    folder: Path,
    driver: str = CUDA,
    *,
    ranks: int,
    fate: str,
    seed: int,
    late: bool = False,
    **env: str,
) -> str:
    """What the ranks print that lose one; the program fails where one hangs or gathers wrongly."""
    numbers = [str(ranks), fate, "1000", str(seed)]
    done = run([OUT / "faults", driver, folder, *numbers, *["late"] * late], **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def stress(
    folder: Path,
    driver: str = CUDA,
    *,
    ranks: int,
    queues: int,
    seed: int,
    batches: int = 10,
    patience_us: int = 60_000_000,
    late: bool = False,
    **env: str,
) -> str:
    numbers = [str(n) for n in (ranks, batches, queues, patience_us, seed)]
    done = run([OUT / "stress", driver, folder, *numbers, *["late"] * late], **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reduce(
    folder: Path,
    driver: str = CUDA,
    *,
    ranks: int,
    queues: int,
    room: int,
    seed: int,
    cases: int,
    patience_us: int = 60_000_000,
    **env: str,
) -> str:
    numbers = [str(n) for n in (ranks, cases, queues, room, patience_us, seed)]
    done = run([OUT / "reductions", driver, folder, *numbers], **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(bool(SANITIZE), reason="Python cannot load a library built with sanitizers")
def test_the_stand_in_is_what_we_assume_of_cuda() -> None:
    """The tests that a GPU answers for CUDA, asked of the stand-in."""
    tests = sorted((ROOT / "tests" / "gpu").glob("test_assumptions_of_*.py"))
    options = ["-q", "-m", "gpu", "--noconftest", "-p", "no:cacheprovider"]
    done = run(
        [sys.executable, "-m", "pytest", *options, *tests], seconds=240, PG_SDMA_DRIVER=str(LIBRARY)
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
