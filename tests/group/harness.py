"""Runs a test's function on several ranks, one process each.

    def sums_ranks():
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x)
        return x.item()

    def test_sums_ranks(ranks):
        assert ranks(3).run(sums_ranks) == [3.0, 3.0, 3.0]

The function must be importable (module level), its arguments and result picklable. The processes
of a `Ranks` outlive a run, so a module's tests share them through the `ranks` fixture of
conftest.py; `run_ranks` takes fresh ones. A run whose ranks raise, die or take too long raises
`RanksFailed` with each rank's traceback and output, and its processes are gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Each rank's process is forked from a server that has torch imported and nothing running: a rank
# then starts at once. torch._dynamo is what the first functional collective imports.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed.tensor", "torch._dynamo"])

GRACE_SECONDS = 3.0  # for the peers of a rank that failed, and for a stuck rank to say where it is


class RanksFailed(AssertionError):
    """A rank raised, died or took too long; the message holds every rank's report."""


class Ranks:
    """`size` processes that are ranks of one group.

    `backend` is what they give to init_process_group (None: the function does that itself, with
    `init_group`). `env` is added to each rank's environment before the group is made.
    """

    def __init__(
        self, size: int, backend: str | None = "cpu:sdma", env: Mapping[str, str] | None = None
    ) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self._folder.name)
        self._outputs = [folder / f"rank{rank}.out" for rank in range(size)]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank, output in enumerate(self._outputs):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve,
                args=(there, rank, size, backend, dict(env or {}), folder / "store", output),
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Calls `function(*args)` on every rank and returns the results in rank order."""
        call = pickle.dumps((function, args))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # dead already: _replies will see it
                pipe.send_bytes(call)
        replies = self._replies(timeout)
        if all(reply.startswith(b"+") for reply in replies.values()) and len(replies) == self.size:
            return [_unpack(replies[rank][1:]) for rank in range(self.size)]
        report = self._report(replies, timeout)
        self.kill()
        raise RanksFailed(report)

    def close(self) -> None:
        """Lets the ranks destroy their group and exit. Raises when one does not exit cleanly."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
        codes = [process.exitcode for process in self._processes]
        outputs = "\n".join(self._output(rank) for rank in range(self.size))
        self.kill()
        if any(code != 0 for code in codes):
            raise RanksFailed(f"exit codes of the ranks: {codes} (None: did not exit)\n{outputs}")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def _replies(self, timeout: float) -> dict[int, bytes]:
        """What the ranks send back: b"+" and a result, or b"-" and a traceback. A rank that dies or
        is silent for `timeout` seconds has no reply; nor has one still silent GRACE_SECONDS after
        a peer failed."""
        replies: dict[int, bytes] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        end = time.monotonic() + timeout
        while waiting and time.monotonic() < end:
            for pipe in wait(list(waiting), timeout=end - time.monotonic()):
                rank = waiting.pop(pipe)
                try:
                    replies[rank] = pipe.recv_bytes()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(1)
                if not replies.get(rank, b"").startswith(b"+"):
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        return replies

    def _report(self, replies: dict[int, bytes], timeout: float) -> str:
        silent = [rank for rank in range(self.size) if rank not in replies]
        for rank in silent:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)  # faulthandler prints the stack
        time.sleep(0.3 if silent else 0)
        lines = []
        for rank in range(self.size):
            code = self._processes[rank].exitcode
            if rank in replies:
                text = "passed" if replies[rank].startswith(b"+") else replies[rank][1:].decode()
            elif code is not None:
                text = f"died with exit code {code}"
            else:
                text = f"did not finish (timeout {timeout} s)"
            lines += [f"--- rank {rank}: {text}", self._output(rank)]
        return "\n".join(lines)

    def _output(self, rank: int) -> str:
        text = self._outputs[rank].read_text(errors="replace")
        return f"output of rank {rank}:\n{text[-8000:]}" if text.strip() else ""


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str | None = "cpu:sdma",
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> list[Any]:
    """Calls `function(*args)` on `size` fresh ranks and returns the results in rank order."""
    ranks = Ranks(size, backend, env)
    try:
        results = ranks.run(function, *args, timeout=timeout)
    except BaseException:
        ranks.kill()
        raise
    ranks.close()
    return results


def init_group(backend: str, **options: Any) -> None:
    """init_process_group with this rank's place and a new store."""
    import torch.distributed as dist

    if "sdma" in backend:
        import pg_sdma  # noqa: F401  an installed one is registered already

    dist.init_process_group(backend, store=new_store(), rank=_rank, world_size=_size, **options)


def new_store() -> Any:
    """A store that all ranks share; each call, which all ranks make, gives another."""
    import torch.distributed as dist

    global _stores
    _stores += 1
    return dist.FileStore(f"{_path}{_stores}", _size)


def _pack(result: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(result, buffer)  # plain pickle cannot bring back tensors of the newer dtypes
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


# Of this process, where it is a rank.
_rank = _size = -1
_path = ""
_stores = 0


def _serve(
    pipe: Connection,
    rank: int,
    size: int,
    backend: str | None,
    env: dict[str, str],
    path: Path,
    output: Path,
) -> None:
    global _rank, _size, _path
    _rank, _size, _path = rank, size, str(path)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)
    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))

    import torch.distributed as dist

    if backend is not None:
        init_group(backend)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            reply = b"+" + _pack(function(*args))
        except BaseException:
            reply = b"-" + traceback.format_exc().encode()
        pipe.send_bytes(reply)
    if dist.is_initialized():
        dist.destroy_process_group()
