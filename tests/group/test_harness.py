"""The harness itself: a rank that fails must never pass for one that did not, nor hang the run."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, RanksFailed, run_ranks


def reduce_rank():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def raise_on_rank_1():
    if int(os.environ["RANK"]) == 1:
        raise ZeroDivisionError("only here")
    time.sleep(60)


def die_on_rank_1():
    print("last words", file=sys.stderr)
    if int(os.environ["RANK"]) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_here():
    time.sleep(60)


def read_environment():
    return os.environ["OMP_NUM_THREADS"], os.environ.get("OF_THIS_RUN")


def break_the_teardown():
    dist.is_initialized = None


def test_the_processes_of_a_module_are_reused(ranks):
    assert ranks(3, "cpu:gloo").run(reduce_rank) == [3.0, 3.0, 3.0]
    pids = ranks(3, "cpu:gloo").run(os.getpid)
    assert ranks(3, "cpu:gloo").run(os.getpid) == pids


def test_environment_reaches_the_ranks():
    results = run_ranks(2, read_environment, backend=None, env={"OF_THIS_RUN": "yes"})
    assert results == [("1", "yes")] * 2


@pytest.mark.parametrize(
    ("function", "timeout", "words"),
    [
        (raise_on_rank_1, 30.0, ["rank 1: Traceback", "ZeroDivisionError: only here"]),
        (die_on_rank_1, 30.0, ["rank 1: died with exit code -9", "last words"]),
        (sleep_here, 1.0, ["did not finish (timeout 1.0 s)", "in sleep_here"]),
    ],
)
def test_a_failure_is_reported_and_ends_the_run(function, timeout, words):
    ranks = Ranks(2, backend=None)
    with pytest.raises(RanksFailed) as failure:
        ranks.run(function, timeout=timeout)
    assert not ranks.alive
    for word in words:
        assert word in str(failure.value)


def test_an_unclean_exit_fails_the_run():
    with pytest.raises(RanksFailed, match=r"exit codes of the ranks: \[1, 1\]"):
        run_ranks(2, break_the_teardown, backend=None)
