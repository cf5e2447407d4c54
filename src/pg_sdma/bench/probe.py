"""The self-test of `pg-sdma info`: does the direct route work here, and is every byte right?

It starts ranks of its own. They gather for two seconds into poisoned outputs, then time a large
size against the inner. Meanwhile every size goes direct.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pg_sdma.bench import all_gather, launch
from pg_sdma.bench.buffers import ALIGNMENT, Arena, Case, make_buffers
from pg_sdma.bench.measure import Gate, time_calls
from pg_sdma.bench.routes import direct_since, route_since
from pg_sdma.settings import read_settings
from pg_sdma.stats import stats, transports

# Bytes of output: of gathers that are checked, and of those that are timed.
SIZES, TIMED = (4 << 10, 1 << 20, 8 << 20), 32 << 20
# The group's bounds and its strictness are the user's affair; the test is of the route.
ENVIRONMENT = {"PG_SDMA_MIN_BYTES": "0", "PG_SDMA_STRICT": "0"}
# Ranks that check bytes between their calls are late for most of them.
PATIENCE = {"cuda": {"PG_SDMA_PATIENCE_MS": "1000"}, "cpu": {}}
LIMIT = 120.0  # seconds; CUDA alone takes many to start on eight GPUs


@dataclass(frozen=True)
class Outcome:
    """What the self-test of one device type found."""

    device: str  # "cpu" or "cuda"
    ranks: int  # 0: not tried
    route: str  # "direct", "inner: " and why, or both with their parts; or why nothing was tried
    works: bool  # calls went direct, and no byte was wrong
    transport: str = ""  # what carried them: stats.transports()
    gathers: int = 0
    wrong: int = 0  # elements over all ranks
    seconds: float = 0.0
    size: int = 0  # bytes of output of the calls that were timed
    time: float | None = None  # seconds a call; None: not measured
    inner: str = ""
    inner_time: float | None = None


def not_tried(device: str, why: str) -> Outcome:
    return Outcome(device, 0, f"not tried: {why}", False)


def probe(device: str, ranks: int, seconds: float) -> Outcome:
    """Starts `ranks` processes, which gather for `seconds`; kills them after LIMIT seconds more.

    A failure of a rank is an Outcome, too.
    """
    with tempfile.TemporaryDirectory(prefix="pg-sdma-info-") as folder:
        options = Namespace(device=device, seconds=seconds, result=Path(folder) / "outcome.json")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        started = mp.spawn(
            launch.rank_main, (ranks, store.port, _run, options), nprocs=ranks, join=False
        )
        end = time.monotonic() + seconds + LIMIT
        try:
            while not started.join(timeout=1):
                if time.monotonic() > end:
                    raise TimeoutError(f"it did not end within {seconds + LIMIT:.0f} s")
        except (mp.ProcessRaisedException, mp.ProcessExitedException, TimeoutError) as error:
            for process in started.processes:
                process.kill()
                process.join()
            why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            return Outcome(device, ranks, f"the self-test failed: {why}", False)
        return Outcome(**json.loads(options.result.read_text()))


def _run(world: launch.World, options: Namespace) -> None:
    os.environ.update(ENVIRONMENT | PATIENCE[options.device])
    inner = read_settings().inner_backend(options.device)
    groups = [world.group("sdma"), world.group(inner)]
    whole = Arena(TIMED + ALIGNMENT, world.device)
    shards = Arena(TIMED + ALIGNMENT, world.device)
    cases = [_case(world, size, in_place) for size in SIZES for in_place in (False, True)]
    before = stats(groups[0])
    began = time.monotonic()
    gathers = wrong = 0
    for case in cycle(cases):
        (buffers,) = make_buffers(case, whole, shards, 1)
        wrong += all_gather.OPERATION.count_wrong(case, buffers, groups[0])
        gathers += 1
        seconds = world.largest(time.monotonic() - began)
        if gathers >= len(cases) and seconds >= options.seconds:
            break
    after = stats(groups[0])
    timed = _case(world, TIMED, True)
    (buffers,) = make_buffers(timed, whole, shards, 1)
    calls = [lambda i, group=group: all_gather.gather(buffers, group) for group in groups]
    gate = Gate(world.device) if options.device == "cuda" else None
    times = time_calls(calls, world, 5, 1, gate)
    wrong = world.total(wrong)
    # Nothing is counted where PG_SDMA_OPS leaves all-gathers out.
    route = route_since(before, after) if after else "inner: not in PG_SDMA_OPS"
    found = Outcome(
        device=options.device,
        ranks=world.size,
        route=route,
        works=bool(direct_since(before, after)) and not wrong,
        transport=transports(groups[0]).get(options.device, ""),
        gathers=gathers,
        wrong=wrong,
        seconds=seconds,
        size=timed.size,
        time=times[0].time or times[0].wall,
        inner=inner,
        inner_time=times[1].time or times[1].wall,
    )
    if world.rank == 0:
        options.result.write_text(json.dumps(asdict(found)))


def _case(world: launch.World, size: int, in_place: bool) -> Case:
    return Case(
        dtype=torch.uint8,
        count=size // world.size,
        tensors=1,
        in_place=in_place,
        ranks=tuple(range(world.size)),
        rank=world.rank,
    )
