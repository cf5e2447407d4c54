"""The flight record: what it holds, on demand and when a group breaks."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import init_group, run_ranks

RANKS = 2


def gather(size=4, dtype=torch.float32, async_op=False):
    output = torch.empty(size * dist.get_world_size(), dtype=dtype)
    return dist.all_gather_into_tensor(output, torch.ones(size, dtype=dtype), async_op=async_op)


def the_lane(record):
    [lane] = record["lanes"]
    return lane


def record_everything():
    import pg_sdma

    before = time.time_ns()
    gather(3, torch.int16)
    gather(5, async_op=True).wait()
    dist.all_reduce(torch.ones(7, dtype=torch.float64))
    dist.all_gather([torch.empty(2) for _ in range(RANKS)], torch.ones(2))
    with pytest.raises(RuntimeError, match="Bad arguments"):
        dist.all_gather_into_tensor(torch.empty(1), torch.ones(4))
    return before, pg_sdma.flight_record(), time.time_ns()


def test_it_holds_every_collective():
    for rank, (before, record, after) in enumerate(run_ranks(RANKS, record_everything)):
        assert (record["version"], record["rank"], record["reason"]) == (1, rank, "")
        lane = the_lane(record)
        assert (lane["device"], lane["inner"], lane["rank"]) == ("cpu", "gloo", rank)
        assert lane["global_ranks"] == [0, 1]
        assert lane["fault"] == ""
        assert lane["recorded"] == 5
        told = [
            (e["operation"], e["route"], e["state"], e["dtype"], e["input_elements"])
            for e in lane["entries"]
        ]
        assert told == [
            ("all_gather_into_tensor", "direct", "completed", "Short", 3),
            ("all_gather_into_tensor", "direct", "completed", "Float", 5),
            ("allreduce", "inner", "issued", "Double", 7),
            ("all_gather", "direct", "completed", "Float", 2),
            ("all_gather_into_tensor", "", "failed", "Float", 4),
        ]
        assert [e["id"] for e in lane["entries"]] == [1, 2, 3, 4, 5]
        # The vote's self-test has taken the first three numbers.
        assert [e["number"] for e in lane["entries"]] == [4, 5, 0, 6, 7]
        assert [e["async_op"] for e in lane["entries"]] == [False, True, False, False, False]
        assert lane["entries"][0]["output_elements"] == 6
        for e in lane["entries"]:
            assert before <= e["created_ns"] <= after
            if e["state"] == "completed":
                times = [e[f"{what}_ns"] for what in ("created", "started", "decided", "issued")]
                assert times == sorted(times)
                assert times[-1] == e["ended_ns"] <= after
        for peer, progress in enumerate(lane["ranks"]):
            assert progress["rank"] == peer
            assert progress["called"] >= 6
            assert (progress["departed"], progress["ended"]) == (False, False)


def record_many(calls):
    import pg_sdma

    works = [gather(async_op=True) for _ in range(calls)]
    for work in works:
        work.wait()
    return pg_sdma.flight_record()


def test_it_keeps_the_last_ones():
    for record in run_ranks(RANKS, record_many, 30, env={"PG_SDMA_TRACE_ENTRIES": "8"}):
        lane = the_lane(record)
        assert (lane["capacity"], lane["recorded"]) == (8, 30)
        assert [e["id"] for e in lane["entries"]] == list(range(23, 31))
        assert {e["state"] for e in lane["entries"]} == {"completed"}


def test_it_keeps_nothing_where_that_was_asked_for():
    for record in run_ranks(RANKS, record_many, 3, env={"PG_SDMA_TRACE_ENTRIES": "0"}):
        lane = the_lane(record)
        assert (lane["capacity"], lane["recorded"], lane["entries"]) == (0, 0, [])
        assert [r["called"] for r in lane["ranks"]] == [6, 6]


def look_while_it_hangs():
    import pg_sdma

    gather()
    if dist.get_rank() == 1:
        time.sleep(0.8)
        gather()
        return None
    seen = []
    looker = threading.Timer(0.4, lambda: seen.append(pg_sdma.flight_record()))
    looker.start()
    gather()
    looker.join()
    return seen[0]


def test_it_can_be_asked_for_while_a_call_hangs():
    record, _ = run_ranks(RANKS, look_while_it_hangs)
    lane = the_lane(record)
    assert lane["entries"][-1]["state"] == "started"
    assert [r["called"] for r in lane["ranks"]] == [5, 4]


def groups_come_and_go():
    import pg_sdma

    gather()
    group = dist.new_group()
    with_it = len(pg_sdma.flight_record()["lanes"])
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    return with_it, len(pg_sdma.flight_record()["lanes"])


def test_it_has_the_groups_that_there_are():
    assert run_ranks(RANKS, groups_come_and_go) == [(2, 1)] * RANKS


# -- when a group breaks


def diverge():
    """Rank 1 makes another call than rank 0."""
    init_group("cpu:sdma")
    gather()
    gather(6)
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    with pytest.raises(RuntimeError):
        if dist.get_rank() == 0:
            gather()
        else:
            dist.all_reduce(torch.ones(4))
            gather()  # gloo may have been content with less than all


def test_a_broken_group_leaves_its_record_in_files(tmp_path):
    prefix = str(tmp_path / "record-")
    run_ranks(RANKS, diverge, backend=None, env={"PG_SDMA_TRACE_FILE": prefix})
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files][:1] == ["record-0.json"]
    record = json.loads(files[0].read_text())
    lane = the_lane(record)
    assert "timed out after 1000 ms: rank 1 has not made this call" in record["reason"]
    assert lane["fault"] == record["reason"]
    last = lane["entries"][-1]
    assert (last["state"], last["number"], last["ended_ns"]) == ("started", 6, 0)
    assert lane["ranks"][1]["other"] == "allreduce"
    assert files[0].stat().st_mode & 0o777 == 0o600

    done = subprocess.run(
        [sys.executable, "-m", "pg_sdma", "trace", files[0]], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "started: all_gather_into_tensor (collective 3, operation 6) of 8 Float" in done.stdout
    assert "rank 1: called 5, started 0, finished 5, 1 others (last allreduce)" in done.stdout


def test_a_link_in_its_way_is_not_followed(tmp_path):
    """In a folder that others can write to, whose names they can guess."""
    folder, secret = tmp_path / "folder", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("kept")
    for name in ("record-0.json", "record-0.json.partial"):
        (folder / name).symlink_to(secret)
    prefix = str(folder / "record-")
    run_ranks(RANKS, diverge, backend=None, env={"PG_SDMA_TRACE_FILE": prefix})
    assert secret.read_text() == "kept"
    assert json.loads((folder / "record-0.json").read_text())["rank"] == 0
    assert not (folder / "record-0.json").is_symlink()


def test_a_file_that_cannot_be_written_changes_nothing_else(tmp_path):
    prefix = str(tmp_path / "missing" / "record-")
    run_ranks(RANKS, diverge, backend=None, env={"PG_SDMA_TRACE_FILE": prefix})
    assert list(tmp_path.iterdir()) == []


# -- torch's own tool reads it


def record_a_difference():
    import pg_sdma

    init_group("cpu:sdma", timeout=timedelta(seconds=20))
    gather()
    dist.all_reduce(torch.ones(2))
    work = gather(4 + dist.get_rank(), async_op=True)  # does not fit together
    with pytest.raises(RuntimeError, match="do not fit together"):
        work.wait()
    record = pg_sdma.flight_record()
    dist.barrier()
    return record


def analyze(folder):
    tool = "torch.distributed.flight_recorder.fr_trace"  # what `torchfrtrace` runs
    done = subprocess.run(
        [sys.executable, "-m", tool, folder, "-p", "sdma_"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_torchs_analyzer_finds_the_difference(tmp_path):
    records = run_ranks(RANKS, record_a_difference, backend=None)
    for rank, record in enumerate(records):
        (tmp_path / f"{rank}.json").write_text(json.dumps(record))
    files = [str(tmp_path / f"{rank}.json") for rank in range(RANKS)]
    folder = tmp_path / "torch"
    done = subprocess.run(
        [sys.executable, "-m", "pg_sdma", "trace", *files, "--torch", folder],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = analyze(str(folder))
    assert "SIZE_OR_SYNTAX_MISMATCH" in told, told
    assert "nccl:_all_gather_base" in told, told
