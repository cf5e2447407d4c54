"""Runs a trainer again over one backend, in a fresh process of each rank.

DeepSpeed keeps its groups and its communication backend in module globals. So two runs over
different backends need two processes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence

import torch.distributed as dist

# With it, a group would join the launcher's store, which has the keys of an earlier run.
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def require_launcher() -> None:
    """Exits with how to start the program, where no launcher has."""
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise SystemExit(
            "start this program with torchrun, or with DeepSpeed's launcher, for example:\n"
            "    torchrun --standalone --nproc-per-node 2 examples/train_zero3.py --compare"
        )


def run_in_turn(command_lines: Iterable[Sequence[str]]) -> int:
    """Runs this program once with each of the command lines, every rank at the same time.

    Returns this process' rank. Exits with the status of the first run that fails here.
    """
    store, rank, _ = next(dist.rendezvous("env://"))
    for number, arguments in enumerate(command_lines):
        key = f"port of run {number}"
        if rank == 0:
            store.set(key, str(_free_port()))
        port = store.get(key).decode()
        environment = {k: v for k, v in os.environ.items() if k != AGENT_STORE}
        done = subprocess.run(
            [sys.executable, sys.argv[0], *arguments], env={**environment, "MASTER_PORT": port}
        )
        if done.returncode:
            sys.exit(done.returncode)
    return rank


def _free_port() -> int:
    """A port of this host, where rank 0 is, that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
