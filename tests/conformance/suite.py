"""Runs tests of torch's own DistributedTest, on gloo and on sdma.

torch decides by environment variables, while it defines those tests, which of them run: so each
combination of backend and number of ranks has a process of its own, the worker. It imports torch
once and forks the ranks of every test, where torch would spawn them and import it in each.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import unittest
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

TIMEOUT_SECONDS = 120  # a test's; its ranks are killed then, and it has failed
IMPORT_SECONDS = 60  # what the worker may take besides, to import torch for one


class Outcome(NamedTuple):
    """How a test ended; `text` is the reason of a skip, or what the ranks of a failure printed."""

    status: Literal["passed", "skipped", "failed"]
    text: str = ""


class Suite:
    """torch's DistributedTest with `size` ranks, on gloo and on sdma."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: dict[tuple[str, str], Worker] = {}

    def on_gloo(self, name: str) -> Outcome:
        return self._run(name, "gloo", "gloo")

    def on_sdma(self, name: str) -> tuple[Outcome, str]:
        """The outcome, and the backend name that torch's test was given for it.

        That is gloo where torch keeps the test to gloo by name: its groups are sdma's all the same.
        """
        outcome = self._run(name, "sdma", "sdma")
        if outcome.status != "skipped":
            return outcome, "sdma"
        return self._run(name, "gloo", "sdma"), "gloo"

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    def _run(self, name: str, backend: str, creates: str) -> Outcome:
        if (backend, creates) not in self._workers:
            self._workers[backend, creates] = Worker(backend, self.size, creates)
        return self._workers[backend, creates].run(name)


class Worker:
    """A process that runs tests by name, with `size` ranks.

    `backend` is what torch's tests take for their backend's name, and `creates` the backend that
    their `init_process_group` really makes: two names differ for a test that torch runs for gloo
    only.
    """

    def __init__(self, backend: str, size: int, creates: str) -> None:
        self._pipe, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(there, backend, size, creates)
        )
        self._process.start()
        there.close()
        self._name = f"the worker for {backend}, {size} ranks, process {self._process.pid},"

    def run(self, name: str) -> Outcome:
        """Runs the test `name`. Raises RuntimeError where the worker itself dies or is stuck."""
        try:
            self._pipe.send(name)
            if self._pipe.poll(TIMEOUT_SECONDS + IMPORT_SECONDS):
                return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise RuntimeError(
                f"{self._name} died in {name}, exit code {self._process.exitcode}"
            ) from None
        os.killpg(self._process.pid, signal.SIGKILL)
        raise RuntimeError(f"{self._name} did not answer for {name}, and was killed")

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


# What gloo says where a rank is done with a group, and gone, while a peer still connects to it.
# Some of torch's tests end so; it says nothing of what they test.
GLOO_RACE = "Gloo connectFullMesh failed"


def _serve(pipe: Connection, backend: str, size: int, creates: str) -> None:
    os.setsid()  # so that the ranks can be killed with it
    os.environ.update(
        BACKEND=backend,
        WORLD_SIZE=str(size),
        INIT_METHOD="file://",  # some tests are defined for files only
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TIMEOUT_SECONDS),
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        OMP_NUM_THREADS="1",
        # An all-gather that quietly took gloo would prove nothing.
        PG_SDMA_STRICT="1",
    )
    case = _test_case(backend, creates)
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        outcome = _run(case(name))
        if GLOO_RACE in outcome.text:
            outcome = _run(case(name))
        pipe.send(outcome)


def _test_case(backend: str, creates: str) -> type[unittest.TestCase]:
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import TIMEOUT_OVERRIDE, DistTestCases

    if creates == "sdma":
        import pg_sdma  # noqa: F401  an installed one is registered already
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("sdma")
    TIMEOUT_OVERRIDE.clear()

    from torch.testing._internal.distributed import distributed_test

    if creates != backend:
        _create_instead(backend, creates)

    class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]  # a file of this test's
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            super()._check_return_codes(fn, elapsed_time)  # looks at the first rank only
            if fn not in self.skip_return_code_checks:
                self.assertEqual([p.exitcode for p in self.processes], [0] * len(self.processes))

    return Case


def _create_instead(backend: str, creates: str) -> None:
    import torch.distributed as dist

    real = dist.init_process_group

    def init_process_group(**options: Any) -> None:
        assert options.pop("backend") == backend
        real(backend=creates, **options)

    dist.init_process_group = init_process_group


def _run(test: unittest.TestCase) -> Outcome:
    result = unittest.TestResult()
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        output = Path(folder, "output")
        with _output_to(output):
            test.run(result)
        text = output.read_text(errors="replace")
    if result.skipped:
        return Outcome("skipped", result.skipped[0][1])
    problems = result.failures + result.errors
    if problems:
        return Outcome("failed", "\n".join([*(trace for _, trace in problems), text]))
    return Outcome("passed")


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Sends what this process and its children print into a file."""
    saved = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    with path.open("w") as file:
        for descriptor in saved:
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)
