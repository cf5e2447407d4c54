"""Groups under load for as long as one likes: `make soak MINUTES=n [DEVICE=cuda]`, or

    python tests/soak.py --minutes 10 --ranks 3 [--device cuda] [--seed n]

Ranks, one process each, draw the same actions from one seed: collectives of random kind, size,
dtype and group, synchronous or not; training steps; groups made and destroyed. Each rank draws
delays of its own, whether it gathers in place and what becomes of its input afterwards, and the
parent stops (SIGSTOP) one for a moment now and then. Every result is checked bit for bit. At the
end descriptors, threads and memory are compared with what they were after the first tenth of the
time, within the bounds of soak_place.py, and most bytes have to have gone direct.

With `--device cuda` the tensors are a GPU's, on the default stream and on others, with other work
beside, and torch's cache is emptied now and then, so that what the peers have mapped is retired.
Ranks that outnumber the GPUs share them through an MPS daemon that is started for them, with gloo
as the inner; otherwise the inner is NCCL. This process never uses CUDA itself.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from soak_place import growth
from soak_rank import serve

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import mps

# Of the bytes gathered by the default group; with less, little of ours would have been tried.
LEAST_DIRECT = 0.5


def environment(device: str, ranks: int, until_the_end: contextlib.ExitStack) -> dict[str, str]:
    """What the ranks need. Starts an MPS daemon where they have to share GPUs."""
    if device == "cpu":
        return {}
    # Small gathers go direct too. Hosts wait for one another, but for one that is stopped for long:
    # so the inner is taken as well, and left again.
    chosen = {"PG_SDMA_MIN_BYTES": "0", "PG_SDMA_PATIENCE_MS": "100"}
    gpus = torch.cuda.device_count()  # by NVML, which makes no CUDA context
    if gpus == 0:
        raise SystemExit("--device cuda: torch sees no GPU")
    if ranks > gpus:
        if not mps.available():
            raise SystemExit(f"ranks that share a GPU need MPS: {mps.CONTROL} is not on PATH")
        chosen.update(until_the_end.enter_context(mps.daemon()))
        chosen.update(PG_SDMA_ALLOW_SAME_DEVICE="1", PG_SDMA_INNER="cuda=gloo")
    # gloo's threads make host copies of device tensors, and glibc's arenas keep hundreds of MB of
    # holes that are no leak. So large blocks are mapped one by one, and given back when freed.
    chosen.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_ARENA_MAX="2")
    return chosen


def stop_now_and_then(processes: Sequence[BaseProcess], moments: random.Random) -> int:
    """Stops one of the processes for a moment, until one has ended. Returns how often."""
    stops = 0
    while all(process.is_alive() for process in processes):
        time.sleep(moments.uniform(0.5, 3))
        victim = moments.choice(processes)
        if not victim.is_alive():
            continue
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(moments.uniform(0, 0.3))
        os.kill(victim.pid, signal.SIGCONT)
        stops += 1
    return stops


def soak(options: argparse.Namespace) -> bool:
    """Runs the ranks to their end; whether all was as it should be."""
    context = multiprocessing.get_context("spawn")
    # Here, because a store keeps every key of every group that there ever was.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(options.ranks):
        here, there = context.Pipe()
        process = context.Process(
            target=serve, args=(rank, options, store.port, there), daemon=True
        )
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    stops = stop_now_and_then(processes, random.Random(options.seed))
    right = True
    for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True)):
        process.join(150)
        if process.exitcode != 0 or not pipe.poll():
            print(f"rank {rank}: exit code {process.exitcode}")
            right = False
            continue
        calls, share, before, after = pipe.recv()
        print(
            f"rank {rank}: {calls} calls, {share:.0%} of the default group's bytes direct, {after}"
        )
        wrong = growth(options.device, options.ranks, before, after)
        if math.isnan(share) or share < LEAST_DIRECT:
            wrong.append(f"less than {LEAST_DIRECT:.0%} of the bytes went direct")
        if wrong:
            print(f"rank {rank}: {', '.join(wrong)}")
            right = False
    for process in processes:
        process.kill()
        process.join()
    print(f"{stops} stops; {'flat, and every result right' if right else 'FAILED'}")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(
        f"seed {options.seed}, {options.ranks} ranks on {options.device}, "
        f"{options.minutes:g} minutes",
        flush=True,
    )
    with contextlib.ExitStack() as until_the_end:
        os.environ.update(environment(options.device, options.ranks, until_the_end))
        return 0 if soak(options) else 1


if __name__ == "__main__":
    sys.exit(main())
