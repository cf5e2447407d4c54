"""What a rank does when its peer is killed in mid-gather.

    python benchmarks/gpu/kill.py
    python benchmarks/gpu/kill.py --device cpu --bytes 16M --repetitions 3

Each time two fresh processes gather in a loop. Rank 1 has several large gathers under way when it
sends itself SIGKILL. Printed are how rank 0 ended, how long after that, and what it said. It has to
end by itself within the bound, with an error that names rank 1; the group's timeout is far longer.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import IO

import torch
import torch.distributed as dist

import pg_sdma
from pg_sdma.bench.all_gather import all_gather
from pg_sdma.bench.table import parse_size

BACKENDS = {"cpu": "cpu:sdma", "cuda": "cpu:gloo,cuda:sdma"}
MOST_GATHERS = 6  # under way at a time
ROUNDS_BEFORE = 3
GROUP_TIMEOUT = timedelta(minutes=10)
READY = "before the kill: "


@dataclass(frozen=True)
class Plan:
    """How one repetition goes."""

    gathers: int  # of rank 1 when it dies
    delay: float  # seconds from the last call to the signal

    @classmethod
    def draw(cls, seed: int) -> Plan:
        draw = random.Random(seed)
        return cls(draw.randint(2, MOST_GATHERS), draw.choice((0.0, 0.001, 0.003)))


@dataclass(frozen=True)
class Outcome:
    """What became of rank 0."""

    plan: Plan
    code: int | None  # exit code, negative for a signal; None: it had to be killed
    seconds: float  # from rank 1's death to rank 0's
    said: str  # on both of its streams
    bound: float

    @property
    def direct(self) -> bool:
        """Whether its gathers before the kill were."""
        return any(
            line.startswith(READY) and "inner" not in line and "direct" in line
            for line in self.said.splitlines()
        )

    @property
    def message(self) -> str:
        """The line in which rank 0 names rank 1; empty where there is none."""
        lines = (line.strip() for line in self.said.splitlines())
        return next((line for line in lines if re.search(r"\brank 0: .*\brank 1\b", line)), "")

    @property
    def failure(self) -> str:
        """Why this is not what ought to happen; empty where it is."""
        if self.code is None:
            return f"rank 0 was still there after {self.bound:g} s"
        if self.code == 0:
            return "rank 0 ended without an error"
        if self.seconds > self.bound:
            return f"rank 0 took longer than {self.bound:g} s"
        if not self.direct:
            return "the gathers were not direct, so nothing is shown"
        return "" if self.message else "no message of rank 0 names rank 1"

    @property
    def ended_by(self) -> str:
        if self.code is None:
            return "nothing"
        return signal.Signals(-self.code).name if self.code < 0 else f"exit code {self.code}"


def rank_main(options: argparse.Namespace) -> None:
    """One rank: a few rounds of gathers, and those in which rank 1 dies."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would take its time
    plan = Plan.draw(options.seed)
    rank, cuda = options.rank, options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", options.port)
    dist.init_process_group(
        BACKENDS[options.device], store=store, rank=rank, world_size=2, timeout=GROUP_TIMEOUT
    )
    outputs = [
        torch.zeros(options.bytes, dtype=torch.uint8, device=device) for _ in range(MOST_GATHERS)
    ]

    def start(count: int) -> list[dist.Work]:
        return [
            all_gather(output, output.chunk(2)[rank], async_op=True) for output in outputs[:count]
        ]

    def finish(works: list[dist.Work]) -> None:
        for work in works:
            work.wait()
        if cuda:
            torch.cuda.synchronize(device)

    for _ in range(ROUNDS_BEFORE):
        finish(start(MOST_GATHERS))
    print(f"{READY}{pg_sdma.stats()}", flush=True)
    works = start(plan.gathers)
    if rank == 1:
        time.sleep(plan.delay)
        os.kill(os.getpid(), signal.SIGKILL)
    finish(works)
    finish(start(MOST_GATHERS))  # should all have been over by then


def repetition(options: argparse.Namespace, seed: int) -> Outcome:
    """Starts both ranks and watches them end. Raises SystemExit where rank 1 ends otherwise."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as last_words:
        survivor = start_rank(options, 0, seed, store.port, said)
        victim = start_rank(options, 1, seed, store.port, last_words)
        try:
            killed = wait_for(victim, options.start)
            died = time.monotonic()
            if killed == -signal.SIGKILL:
                code = wait_for(survivor, options.bound)
                return Outcome(
                    Plan.draw(seed), code, time.monotonic() - died, text_of(said), options.bound
                )
        finally:
            for process in (survivor, victim):
                process.kill()
                process.wait()
        raise SystemExit(
            f"rank 1 did not come to kill itself (exit code {killed}):\n{text_of(last_words)}\n"
            f"rank 0:\n{text_of(said)}"
        )


def wait_for(process: subprocess.Popen[str], seconds: float) -> int | None:
    """Its exit code, or None where it is still there after that."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def text_of(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def start_rank(
    options: argparse.Namespace, rank: int, seed: int, port: int, said: IO[str]
) -> subprocess.Popen[str]:
    """A process of this script that is one rank and writes to `said`."""
    own = ("--rank", str(rank), "--port", str(port), "--seed", str(seed))
    common = ("--device", options.device, "--bytes", str(options.bytes))
    # Hosts wait for each other, so that no gather goes to the inner for being late.
    environ = {"PG_SDMA_PATIENCE_MS": "20000", **os.environ}
    command = (sys.executable, __file__, *common, *own)
    return subprocess.Popen(command, env=environ, stdout=said, stderr=said, text=True)


def table(outcomes: list[Outcome]) -> list[str]:
    """Lines of a Markdown table, and what all of it amounts to."""
    titles = ("repetition", "gathers under way", "rank 0 ended by", "after", "what it said")
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for i, outcome in enumerate(outcomes):
        text = outcome.message.replace("|", "\\|")
        said = f"NOT AS IT SHOULD: {outcome.failure}. {text}" if outcome.failure else text
        lines.append(
            f"| {i} | {outcome.plan.gathers} | {outcome.ended_by} | {outcome.seconds:.2f} s | "
            f"{said} |"
        )
    right = [outcome for outcome in outcomes if not outcome.failure]
    lines.append(
        f"\n{len(right)} of {len(outcomes)} times rank 0 ended by itself within "
        f"{outcomes[0].bound:g} s and named rank 1"
    )
    return lines


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(BACKENDS), default="cuda", help="(%(default)s)")
    parser.add_argument(
        "--bytes", type=parse_size, default="1G", help="of each gather's output (%(default)s)"
    )
    parser.add_argument("--repetitions", type=int, default=10, help="(%(default)s)")
    parser.add_argument(
        "--bound", type=float, default=5.0, help="seconds that rank 0 may take (%(default)s)"
    )
    parser.add_argument(
        "--start",
        type=float,
        default=120.0,
        help="seconds rank 1 may take to die (%(default)s)",
    )
    for name in ("--rank", "--port", "--seed"):  # of the processes that are started here
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.device == "cuda" and torch.cuda.device_count() < 2:
        parser.error(f"two ranks want a GPU each and torch sees {torch.cuda.device_count()}")
    if options.repetitions < 1 or options.bytes % 2:
        parser.error("give one repetition or more, and an even number of bytes")
    return options


def main() -> int:
    options = parse()
    if options.rank is not None:
        rank_main(options)
        return 0
    outcomes = []
    for seed in range(options.repetitions):
        outcomes.append(repetition(options, seed))
        print(f"# rank 0 in repetition {seed}:\n{outcomes[-1].said.rstrip()}\n", flush=True)
    print("\n".join(table(outcomes)))
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
