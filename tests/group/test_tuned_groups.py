"""Tuned bounds move the route, on all ranks or on none; `pg-sdma tune` writes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import init_group, run_ranks
from test_bench import pg_sdma as command_line
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d as c10d

from pg_sdma import stats, tuning
from pg_sdma.settings import Settings

NEVER = "inner: the tuning file leaves it to the inner at every size"
SMALL_MEAN = "inner: the mean of its tensors is below 4096 bytes (PG_SDMA_MIN_BYTES)"


def below(bound: int) -> str:
    return f"inner: below {bound} bytes (PG_SDMA_MIN_BYTES)"


def write(path: Path, bounds: dict[str, int | str], **changes: str) -> None:
    entry = tuning.entry_here(Settings(), "cpu", 2, bounds)
    tuning.write(path, tuning.Entry(**{**vars(entry), **changes}))


def routes_of_gathers(files: Sequence[Path], sizes: Sequence[int]) -> list[str]:
    """The routes of in-place gathers with outputs of `sizes` bytes, one coalesced call of all
    last, in a group whose rank r reads files[r]."""
    rank = int(os.environ["RANK"])
    os.environ["PG_SDMA_TUNING"] = str(files[rank])
    init_group("cpu:sdma")
    taken = []
    for calls in (*([size] for size in sizes), sizes):
        before = stats()
        whole = [torch.full((size,), 255, dtype=torch.uint8) for size in calls]
        own = [t.chunk(2)[rank] for t in whole]
        for t in own:
            t.fill_(rank)
        if len(calls) == 1:
            dist.all_gather_into_tensor(whole[0], own[0])
        else:
            with dist._coalescing_manager():
                for output, shard in zip(whole, own, strict=True):
                    dist.all_gather_into_tensor(output, shard)
        for t in whole:
            assert torch.equal(t, torch.arange(2, dtype=torch.uint8).repeat_interleave(len(t) // 2))
        taken += [
            route
            for operation, by_route in stats().items()
            for route, count in by_route.items()
            if count != before.get(operation, {}).get(route)
        ]
    return taken


def test_the_tuned_bounds_decide(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, {"all_gather": 4096, "coalesced": 4096})
    taken = run_ranks(2, routes_of_gathers, [path, path], [1024, 4096, 4096], backend=None)
    assert taken == [[below(4096), "direct", "direct", SMALL_MEAN]] * 2


def test_pg_sdma_min_bytes_wins(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, {"all_gather": tuning.NEVER, "coalesced": tuning.NEVER})
    env = {"PG_SDMA_MIN_BYTES": "2048"}
    taken = run_ranks(2, routes_of_gathers, [path, path], [1024, 4096], backend=None, env=env)
    assert taken == [[below(2048), "direct", "direct"]] * 2


@pytest.mark.parametrize("other", ["bound", "stale", "absent"])
def test_ranks_that_find_different_bounds_use_the_inner(tmp_path: Path, other: str) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    write(one, {"all_gather": 512})
    if other == "bound":
        write(two, {"all_gather": 8192})
    elif other == "stale":
        write(two, {"all_gather": 512}, torch="1.0")
    taken = run_ranks(2, routes_of_gathers, [one, two], [1024], backend=None)
    assert taken[0] == taken[1]
    for route in taken[0]:
        assert route.startswith(
            "inner: settings differ: rank 0 has tuned=all_gather:512, rank 1 has"
        )
        assert route.endswith("tuned=all_gather:8192") == (other == "bound")


def test_a_stale_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, {"all_gather": tuning.NEVER}, driver="0")
    taken = run_ranks(2, routes_of_gathers, [path, path], [1024], backend=None)
    assert taken == [["direct", "direct"]] * 2


def gathers_of_halves(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    os.environ["PG_SDMA_TUNING"] = str(path)
    init_group("cpu:sdma")
    groups = [dist.new_group([r, r ^ 1]) for r in (0, 2)]
    group = groups[int(os.environ["RANK"]) // 2]
    for g in (group, dist.group.WORLD):
        own = torch.ones(1024, dtype=torch.uint8)
        dist.all_gather_into_tensor(own.new_empty(1024 * g.size()), own, group=g)
    return {**stats(group), "world": stats()["all_gather_into_tensor"]}


def test_an_entry_is_for_groups_of_its_size(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, {"all_gather": 1 << 20})
    for found in run_ranks(4, gathers_of_halves, path, backend=None):
        assert list(found["all_gather_into_tensor"]) == [below(1 << 20)]
        assert list(found["world"]) == ["direct"]


def gathers_of_a_merged_group(path: Path) -> list[str]:
    os.environ["PG_SDMA_TUNING"] = str(path)
    init_group("cpu:sdma")
    mine = dist.new_group([int(os.environ["RANK"])], use_local_synchronization=True)
    store = dist.PrefixStore("merge", c10d._get_default_store())
    merged = mine.merge_remote_group(store, 2, group_name="merged")
    own = torch.ones(1024, dtype=torch.uint8)
    for group in (merged, dist.group.WORLD):
        work = group._allgather_base(own.new_empty(2048), own, AllgatherOptions())
        if work is not None:
            work.wait()
    dist.barrier()
    return [*stats(merged)["all_gather_into_tensor"], *stats()["all_gather_into_tensor"]]


def test_a_group_made_from_another_has_the_untuned_bounds(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    for ranks in (1, 2):  # of the groups that are merged, and of what they become
        entry = tuning.entry_here(Settings(), "cpu", ranks, {"all_gather": tuning.NEVER})
        tuning.write(path, entry)
    taken = run_ranks(2, gathers_of_a_merged_group, path, backend=None)
    assert taken == [["direct", NEVER]] * 2


def test_tune_writes_what_groups_then_read(tmp_path: Path) -> None:
    path = tmp_path / "config" / "pg_sdma" / "tuning.json"
    tune = ("tune", "--device", "cpu", "-b", "4K", "-e", "256K", "-n", "3", "-w", "1")
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "PG_SDMA_TUNING": ""}
    command_line(*tune, "--dry-run", **environ)
    assert not path.exists()
    # What the user has set for programs must not keep sizes from being measured.
    numbers = tmp_path / "numbers.json"
    printed = command_line(*tune, "--json", str(numbers), **environ, PG_SDMA_MIN_BYTES="1048576")
    (entry,) = tuning.read(path)
    assert (entry.device, entry.ranks, entry.inner) == ("cpu", 2, "gloo")
    assert set(entry.bounds) == {"all_gather", "coalesced"}
    assert f"# written to {path}" in printed
    found = tuning.look_up(Settings(tuning=str(path)), "cpu", 2)
    assert found.entry == entry
