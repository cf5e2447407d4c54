"""What a rank does when its peer is killed during a gather.

    python benchmarks/gpu/kill.py --jobs 4
    python benchmarks/gpu/kill.py --backlog 8 --repetitions 20
    python benchmarks/gpu/kill.py --device cpu --bytes 16M --repetitions 3

Each time two fresh processes gather in a loop, with several large gathers under way. A random one
of them, the victim, gets SIGKILL at a random moment. It prints how the other ended, how long after
that, and what it said. The other has to end by itself within the bound, with an error that names
the victim; the group's timeout is far longer.

With --backlog the gathers lie behind other work of the device, for a random time of up to so many
seconds. Half of the times both ranks destroy the group while all of it is pending. The bound grows
by what such work has left to run.

On one GPU both ranks share it through an MPS daemon of each repetition's own. Its server may fault
when a client is killed, and take the survivor with it; that is printed, too. With --backlog the
ranks take turns on the GPU instead, because killing a client whose kernel runs ends the server.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))

import mps

import pg_sdma
from pg_sdma.bench.all_gather import all_gather
from pg_sdma.bench.table import parse_size

BACKENDS = {"cpu": "cpu:sdma", "cuda": "cpu:gloo,cuda:sdma"}
MOST_GATHERS = 6  # under way at a time
ROUNDS_BEFORE = 3
LONGEST_DELAY = 0.010  # seconds
MARGIN = 0.1  # seconds by which a rank dies before work that it must not live to see the end of
OVERTIME = 30.0  # seconds that a survivor gets which is late, so that one knows how late
GROUP_TIMEOUT = timedelta(minutes=10)
READY = "before the kill: "


@dataclass(frozen=True)
class Plan:
    """How one repetition goes."""

    victim: int
    gathers: int  # under way at a time
    delay: float  # seconds from the first of those calls to the signal
    backlog: float = 0.0  # seconds of the device's other work before them
    leaves: bool = False  # both ranks destroy the group while these are pending

    @classmethod
    def draw(cls, seed: int, longest_backlog: float = 0.0) -> Plan:
        draw = random.Random(seed)
        victim, gathers = draw.randrange(2), draw.randint(1, MOST_GATHERS)
        delay = draw.uniform(0, LONGEST_DELAY)
        if longest_backlog == 0:
            return cls(victim, gathers, delay)
        backlog = draw.uniform(0, longest_backlog)
        if backlog > 2 * MARGIN and draw.random() < 0.5:
            return cls(victim, gathers, draw.uniform(0, backlog - MARGIN), backlog, leaves=True)
        return cls(victim, gathers, draw.uniform(0, backlog + LONGEST_DELAY), backlog)

    @property
    def survivor(self) -> int:
        return 1 - self.victim


@dataclass(frozen=True)
class Outcome:
    """What became of both ranks."""

    plan: Plan
    killed: int | None  # the victim's exit code; None: it was still there
    code: int | None  # the survivor's, negative for a signal; None: it had to be killed
    seconds: float  # from the victim's death to the survivor's
    said: str  # by the survivor, on both of its streams
    victim_said: str
    bound: float

    @property
    def direct(self) -> bool:
        """Whether the survivor's gathers before the kill were."""
        return any(
            line.startswith(READY) and "inner" not in line and "direct" in line
            for line in self.said.splitlines()
        )

    @property
    def message(self) -> str:
        """The line in which the survivor names the victim; empty where there is none."""
        naming = re.compile(rf"\brank {self.plan.survivor}: .*\brank {self.plan.victim}\b")
        lines = (line.strip() for line in self.said.splitlines())
        return next((line for line in lines if naming.search(line)), "")

    @property
    def failure(self) -> str:
        """Why this is not what ought to happen; empty where it is."""
        survivor, victim = f"rank {self.plan.survivor}", f"rank {self.plan.victim}"
        if self.killed != -signal.SIGKILL:
            return f"{victim} did not come to kill itself: ended by {end(self.killed)}"
        if self.code is None:
            return f"{survivor} was still there after {self.seconds:.1f} s"
        if self.code == 0:
            return f"{survivor} ended without an error"
        if self.seconds > self.bound:
            return f"{survivor} took longer than {self.bound:g} s"
        if not self.direct:
            return "the gathers were not direct, so nothing is shown"
        return "" if self.message else f"no message of {survivor} names {victim}"

    @property
    def report(self) -> str:
        """All that was said: by the victim, too, where it did not die as planned."""
        parts = [f"# survivor (rank {self.plan.survivor}):", self.said.rstrip()]
        if self.killed != -signal.SIGKILL:
            parts += [f"# victim (rank {self.plan.victim}):", self.victim_said.rstrip()]
        return "\n".join(parts)


def end(code: int | None) -> str:
    """What an exit code says of a process's end."""
    if code is None:
        return "nothing"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def rank_main(options: argparse.Namespace) -> None:
    """One rank: a few rounds of gathers, and those in which the victim dies."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would take its time
    faulthandler.register(signal.SIGUSR1)
    plan = Plan.draw(options.seed, options.backlog)
    rank, cuda = options.rank, options.device == "cuda"
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", options.port)
    dist.init_process_group(
        BACKENDS[options.device], store=store, rank=rank, world_size=2, timeout=GROUP_TIMEOUT
    )
    outputs = [
        torch.zeros(options.bytes, dtype=torch.uint8, device=device) for _ in range(MOST_GATHERS)
    ]

    def gather(count: int, synchronize: bool = True) -> None:
        works = [
            all_gather(output, output.chunk(2)[rank], async_op=True) for output in outputs[:count]
        ]
        for work in works:
            work.wait()
        if cuda and synchronize:
            torch.cuda.synchronize(device)

    cycles = int(plan.backlog * cycles_a_second()) if plan.backlog else 0
    for _ in range(ROUNDS_BEFORE):
        gather(MOST_GATHERS)
    print(f"{READY}{pg_sdma.stats()}", flush=True)
    if rank == plan.victim:
        threading.Thread(target=die, args=(plan.delay,)).start()
    while True:
        if cycles:
            torch.cuda._sleep(cycles)
        gather(plan.gathers, synchronize=not plan.leaves)
        if plan.leaves:
            dist.destroy_process_group()


def cycles_a_second() -> float:
    """What torch.cuda._sleep counts, on the current device."""
    torch.cuda._sleep(1)  # loads the kernel, which a device that waits would hold up
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 10**8
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (start.elapsed_time(end) / 1e3)


def die(delay: float) -> None:
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


def repetition(options: argparse.Namespace, seed: int) -> Outcome:
    """Starts both ranks, on one GPU with an MPS daemon, and watches them end."""
    outcome: Outcome | None = None
    try:
        with contextlib.ExitStack() as until_the_end:
            environment: dict[str, str] = {}
            if options.device == "cuda" and torch.cuda.device_count() < 2:
                if not options.backlog:
                    environment.update(until_the_end.enter_context(mps.daemon()))
                environment.update(PG_SDMA_ALLOW_SAME_DEVICE="1", PG_SDMA_INNER="cuda=gloo")
            outcome = kill_one(options, seed, environment)
    except subprocess.SubprocessError as error:
        if outcome is None:
            raise
        # The kill took the daemon along: no fault of the survivor's.
        print(f"# repetition {seed}: the MPS daemon did not quit when told to: {error}")
    return outcome


def kill_one(options: argparse.Namespace, seed: int, environment: Mapping[str, str]) -> Outcome:
    plan = Plan.draw(seed, options.backlog)
    bound = options.bound + plan.backlog
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as files:
        said = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        processes = [
            start_rank(options, rank, seed, store.port, said[rank], environment)
            for rank in range(2)
        ]
        try:
            killed = wait_for(processes[plan.victim], options.start)
            died = time.monotonic()
            code = None
            survivor = processes[plan.survivor]
            if killed == -signal.SIGKILL:
                code = wait_for(survivor, bound)
                if code is None:
                    survivor.send_signal(signal.SIGUSR1)  # writes where its threads are
                    code = wait_for(survivor, OVERTIME)
            seconds = time.monotonic() - died
        finally:
            for process in processes:
                process.kill()
                process.wait()
        words = text_of(said[plan.survivor]), text_of(said[plan.victim])
        return Outcome(plan, killed, code, seconds, *words, bound)


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
    options: argparse.Namespace,
    rank: int,
    seed: int,
    port: int,
    said: IO[str],
    environment: Mapping[str, str],
) -> subprocess.Popen[str]:
    """A process of this script that is one rank and writes to `said`."""
    own = ("--rank", str(rank), "--port", str(port), "--seed", str(seed))
    own += ("--backlog", str(options.backlog))
    common = ("--device", options.device, "--bytes", str(options.bytes))
    # Hosts wait for each other, and gathers of any size go direct, so that none goes to the inner.
    chosen = {"PG_SDMA_PATIENCE_MS": "20000", "PG_SDMA_MIN_BYTES": "0"}
    environ = {**chosen, **os.environ, **environment}
    command = (sys.executable, __file__, *common, *own)
    return subprocess.Popen(command, env=environ, stdout=said, stderr=said, text=True)


def table(outcomes: list[Outcome], first_seed: int = 0) -> list[str]:
    """Lines of a Markdown table, and what all of it amounts to."""
    titles = ("seed", "killed", "at", "gathers", "behind", "the other ended by", "after")
    titles += ("what it said",)
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for seed, outcome in enumerate(outcomes, first_seed):
        plan = outcome.plan
        text = outcome.message.replace("|", "\\|")
        said = f"NOT AS IT SHOULD: {outcome.failure}. {text}" if outcome.failure else text
        lines.append(
            f"| {seed} | rank {plan.victim} | {plan.delay * 1e3:.1f} ms | {plan.gathers} | "
            f"{plan.backlog:.1f} s{', leaving' if plan.leaves else ''} | "
            f"{end(outcome.code)} | {outcome.seconds:.2f} s | {said} |"
        )
    right = [outcome for outcome in outcomes if not outcome.failure]
    lines.append(
        f"\n{len(right)} of {len(outcomes)} times the survivor ended by itself within "
        f"the bound and named the rank that was killed"
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
        "--bound", type=float, default=5.0, help="seconds the survivor may take (%(default)s)"
    )
    parser.add_argument(
        "--backlog",
        type=float,
        default=0.0,
        help="seconds of a GPU's other work that gathers lie behind, at most (%(default)g)",
    )
    parser.add_argument(
        "--start",
        type=float,
        default=120.0,
        help="seconds until a rank has died (%(default)s)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="repetitions at the same time (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first repetition (%(default)s)")
    for name in ("--rank", "--port"):  # of the processes that are started here
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.backlog < 0 or (options.backlog > 0 and options.device != "cuda"):
        parser.error("--backlog: give seconds, of a GPU's work (--device cuda)")
    if options.device == "cuda":
        gpus = torch.cuda.device_count()  # by NVML, which makes no CUDA context
        if gpus == 0:
            parser.error("--device cuda: torch sees no GPU")
        if gpus == 1 and not mps.available():
            parser.error(f"two ranks that share a GPU need MPS: {mps.CONTROL} is not on PATH")
    if options.repetitions < 1 or options.jobs < 1 or options.bytes % 2:
        parser.error("give one repetition and one job or more, and an even number of bytes")
    return options


def main() -> int:
    options = parse()
    if options.rank is not None:
        rank_main(options)
        return 0
    outcomes = []
    seeds = range(options.seed, options.seed + options.repetitions)
    with ThreadPoolExecutor(options.jobs) as jobs:
        for seed, outcome in zip(
            seeds, jobs.map(lambda seed: repetition(options, seed), seeds), strict=True
        ):
            outcomes.append(outcome)
            print(f"# repetition of seed {seed}\n{outcome.report}\n", flush=True)
    print("\n".join(table(outcomes, options.seed)))
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
