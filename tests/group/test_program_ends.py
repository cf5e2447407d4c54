"""How whole programs end, to the end of their interpreters, and what a fork of one may do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

PRELUDE = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import pg_sdma
rank, world = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group(
    "cpu:sdma", store=dist.FileStore(sys.argv[3], world), rank=rank, world_size=world
)
input, output = torch.full((4,), float(rank)), torch.empty(4 * world)
def gather(async_op=False):
    return dist.all_gather_into_tensor(output, input, async_op=async_op)
gather()
gather(async_op=True).wait()  # starts the worker
print("ready", flush=True)
"""


class Programs:
    """Two ranks that run PRELUDE and `body`, in interpreters of their own."""

    def __init__(self, folder, body):
        code = PRELUDE + textwrap.dedent(body)
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code, str(rank), "2", str(folder / "store")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]

    def wait(self):
        """[(exit code, output, errors)] of the ranks; none may have ended by accident."""
        try:
            outputs = [process.communicate(timeout=240) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        for _, errors in outputs:
            assert "terminate called" not in errors and "Fatal" not in errors, errors
        codes = [process.returncode for process in self.processes]
        return [(code, *output) for code, output in zip(codes, outputs, strict=True)]


def test_exit_without_destroy(tmp_path):
    for result in Programs(tmp_path, "work = gather(async_op=True); time.sleep(0.5)").wait():
        assert result == (0, "ready\n", "")


@pytest.mark.nightly
def test_exit_with_a_gather_pending(tmp_path):
    """Without destroy: the peer counts on it, however late it is."""
    body = """
        if rank == 0:
            work = gather(async_op=True)
            sys.exit(3)
        time.sleep(4)
        gather()
        print(output.tolist() == [0.0] * 4 + [1.0] * 4)
    """
    first, second = Programs(tmp_path, body).wait()
    assert first == (3, "ready\n", "")
    assert second == (0, "ready\nTrue\n", "")


def test_exit_with_a_gather_pending_that_the_peer_never_makes(tmp_path):
    body = """
        if rank == 0:
            work = gather(async_op=True)
            sys.exit(3)
        time.sleep(1)
    """
    first, second = Programs(tmp_path, body).wait()
    assert first == (3, "ready\n", "")
    assert second == (0, "ready\n", "")


def test_exit_leaves_all_groups_at_the_same_time(tmp_path):
    """Were it one after the other, both ranks would wait for each other in different groups."""
    body = """
        other = dist.new_group()
        dist.all_gather_into_tensor(output, input, other)
        if rank == 0:
            work = gather(async_op=True)
            sys.exit(0)
        try:
            dist.all_gather_into_tensor(output, input, other)
        except dist.DistBackendError as error:
            print("which has destroyed the group or is exiting" in str(error))
        gather()
        print(output.tolist() == [0.0] * 4 + [1.0] * 4)
    """
    first, second = Programs(tmp_path, body).wait()
    assert first == (0, "ready\n", "")
    assert second == (0, "ready\nTrue\nTrue\n", "")


@pytest.mark.parametrize("way", ["sys.exit(0)", "dist.destroy_process_group()"])
def test_leaving_with_a_callback_pending(way, tmp_path):
    """It runs on a thread that needs the interpreter, which leaving must not hold."""
    body = f"""
        if rank == 0:
            future = gather(async_op=True).get_future().then(lambda done: print("called"))
            {way}
            sys.exit(0)
        time.sleep(1)
        gather()
    """
    (code, output, errors), _ = Programs(tmp_path, body).wait()
    assert (code, output, errors) == (0, "ready\ncalled\n", "")


def test_exit_beside_a_callback(tmp_path):
    body = """
        begun = []
        def then(done):
            begun.append(done.wait())
            time.sleep(1)
            gather()
            print("over", flush=True)
        future = gather(async_op=True).get_future().then(then)
        while not begun:
            time.sleep(0.01)
    """
    for result in Programs(tmp_path, body).wait():
        assert result == (0, "ready\nover\n", "")


@pytest.mark.nightly
def test_exit_by_an_exception(tmp_path):
    body = """
        if rank == 0:
            time.sleep(0.3)
            raise ZeroDivisionError("on rank 0 alone")
        gather()
    """
    (code, _, errors), (peers_code, _, peers_errors) = Programs(tmp_path, body).wait()
    assert (code, peers_code) == (1, 1)
    assert "ZeroDivisionError: on rank 0 alone" in errors
    assert "DistBackendError: rank 1: all_gather_into_tensor (operation " in peers_errors
    assert " waits for rank 0, " in peers_errors


def test_sigterm_ends_a_rank_that_waits(tmp_path):
    programs = Programs(tmp_path, "time.sleep(60) if rank == 1 else gather()")
    for process in programs.processes:
        process.stdout.readline()
    time.sleep(0.3)
    for process in programs.processes:
        process.terminate()
    assert [code for code, _, _ in programs.wait()] == [-signal.SIGTERM] * 2


def test_a_forked_child_can_neither_use_nor_harm_the_group(tmp_path):
    body = """
        def in_child(function):
            pid = os.fork()
            if pid:
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            function()
            sys.exit(0)  # with all destructors

        def use():
            signal.alarm(60)
            for call in (
                gather,
                lambda: gather(async_op=True),
                lambda: dist.all_reduce(input),
                lambda: dist.send(input, 1 - rank),
                lambda: dist.barrier(),
            ):
                try:
                    call()
                except RuntimeError as error:
                    assert f"rank {rank}: group " in str(error), error
                    assert "before this process was forked" in str(error), error
                else:
                    raise AssertionError("did not raise")

        def end():
            signal.alarm(60)
            dist.distributed_c10d._abort_process_group()

        def destroy():
            signal.alarm(60)
            dist.destroy_process_group()

        print([in_child(function) for function in (use, end, destroy, lambda: None)])
        pending = gather(async_op=True) if rank == 0 else None
        print(in_child(use))  # while the worker and the group's locks are busy
        if rank == 1:
            gather()
        else:
            pending.wait()
        print(output.tolist() == [0.0] * 4 + [1.0] * 4)
        dist.barrier()
        dist.destroy_process_group()
    """
    for result in Programs(tmp_path, body).wait():
        assert result == (0, "ready\n[0, 0, 0, 0]\n0\nTrue\n", "")
