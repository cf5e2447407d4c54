"""Times FSDP2 steps over the inner and over sdma, in turn and in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/fsdp2_step.py --profile
    torchrun --standalone --nproc-per-node 2 benchmarks/fsdp2_step.py --device cpu \\
        --shapes 2x64x32 --steps 10 --warmup 2

Each round trains the same model from the same seed over each contestant: the inner (NCCL, gloo),
sdma as it is by default, and sdma with PG_SDMA_OPS=all_gather,reduce_scatter and landings of 512
MiB, for which docs/reduce_scatter.md has the reason, or what PG_SDMA_LANDING_BYTES says; if asked
for, sdma-late, which is sdma with PG_SDMA_LATE=inner. "free"
steps let the host lead the device by two steps; "sync" steps start from an idle device, so that the
host's time and the ranks' host skew lie on the critical path. Batches lie on the device before the
clock starts. It prints a Markdown table a shape, and which way the bytes went. Options not listed
here are those of examples/train_fsdp2.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp2_host import Host, observed
from fsdp2_profile import breakdown

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import train_fsdp2
from common.loop import RUN_AHEAD, StepClock
from common.options import backend_string, learning_rate
from common.session import Launch
from common.text import ByteBatches, load_text
from pg_sdma import stats
from pg_sdma.stats import RouteCounts, direct_share

HEAD = 128  # elements of an attention head
MODES = {"free": "runs ahead of the device", "sync": "synchronises before every step"}


@dataclass(frozen=True)
class Contestant:
    """What a run trains over: `transport` as examples/common/options.py has it, and settings."""

    transport: str
    environment: Mapping[str, str]


CONTESTANTS = {
    "inner": Contestant("inner", {}),
    "sdma": Contestant("sdma", {"PG_SDMA_OPS": "all_gather"}),
    "sdma-late": Contestant("sdma", {"PG_SDMA_OPS": "all_gather", "PG_SDMA_LATE": "inner"}),
    "sdma+rs": Contestant(
        "sdma",
        {
            "PG_SDMA_OPS": "all_gather,reduce_scatter",
            "PG_SDMA_LANDING_BYTES": os.environ.get("PG_SDMA_LANDING_BYTES", str(512 << 20)),
        },
    ),
}


@dataclass(frozen=True)
class Shape:
    """Of a GPT."""

    layers: int
    hidden: int
    seq: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """The shape of "16x4096x2048". Raises ArgumentTypeError for what is none."""
        try:
            shape = cls(*(int(part) for part in text.split("x")))
        except (TypeError, ValueError):
            shape = cls(0, 0, 0)
        if min(shape.layers, shape.hidden, shape.seq) < 1 or shape.hidden % shape.heads:
            raise argparse.ArgumentTypeError(f"{text!r}: give LAYERSxHIDDENxSEQ, as 16x4096x2048")
        return shape

    @property
    def heads(self) -> int:
        return max(1, self.hidden // HEAD)

    def __str__(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}, sequence {self.seq}"

    def arguments(self) -> list[str]:
        """For examples/train_fsdp2.py."""
        sizes = {
            "layers": self.layers,
            "hidden": self.hidden,
            "heads": self.heads,
            "seq": self.seq,
        }
        return [text for name, value in sizes.items() for text in (f"--{name}", str(value))]


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Has `values` in os.environ for the length of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Trainer:
    """One model and its batches on this rank's device."""

    def __init__(self, launch: Launch, options: argparse.Namespace) -> None:
        self.device = launch.device
        self.training = train_fsdp2.Training(
            train_fsdp2.build(options, launch.device), learning_rate(options)
        )
        batches = ByteBatches(
            load_text(options.data),
            batch=options.batch,
            seq=self.training.model.config.seq,
            seed=options.seed,
            rank=launch.rank,
            world_size=launch.world_size,
        )
        self.batches = [tuple(part.to(launch.device) for part in batches(i)) for i in range(4)]

    def run(self, steps: int, *, sync: bool) -> tuple[float, float]:
        """Median milliseconds a step on the device, and in the host's call of a step."""
        clock = StepClock(self.device)
        host = []
        clock.mark()
        for i in range(steps):
            if sync and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            else:
                clock.wait(i + 1 - RUN_AHEAD)
            start = time.perf_counter()
            self.training.step(*self.batches[i % len(self.batches)])
            host.append(time.perf_counter() - start)
            clock.mark()
        return statistics.median(clock.milliseconds()), statistics.median(host) * 1e3


@dataclass(frozen=True)
class Result:
    """One contestant in one round, of the slower rank; what follows `host` is rank 0's."""

    contestant: str
    round: int
    step: dict[str, float]  # mode -> ms on the device
    host: dict[str, float]  # mode -> ms in the host's call
    routes: dict[str, RouteCounts]  # mode -> what went which way
    calls: dict[str, Host]  # mode -> what the host did for collectives
    device_ms: dict[str, float] | None  # kind of kernels and copies -> a step


def measure(
    launch: Launch, options: argparse.Namespace, name: str, number: int, profiled: bool
) -> Result:
    """Round `number` of the contestant `name`."""
    contestant = CONTESTANTS[name]
    backend = backend_string(contestant.transport, options.device)
    with environment(contestant.environment), launch.process_group(backend):
        return train(launch, options, name, number, profiled)


def train(
    launch: Launch, options: argparse.Namespace, name: str, number: int, profiled: bool
) -> Result:
    """Trains over the default group. What it allocated is garbage once it returns."""
    trainer = Trainer(launch, options)
    step: dict[str, float] = {}
    host: dict[str, float] = {}
    routes = {}
    calls = {}
    for mode in MODES:
        trainer.run(options.warmup, sync=mode == "sync")
        before = stats()
        with observed() as calls[mode]:
            own = trainer.run(options.steps, sync=mode == "sync")
        routes[mode] = since(before, stats())
        slowest = torch.tensor(own, dtype=torch.float64, device=launch.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        step[mode], host[mode] = slowest.tolist()
    device_ms = None
    if profiled and launch.device.type == "cuda":
        device_ms = breakdown(lambda steps: trainer.run(steps, sync=False))
    return Result(name, number, step, host, routes, calls, device_ms)


def since(before: RouteCounts, after: RouteCounts) -> RouteCounts:
    """What was counted between two readings of stats()."""
    found: RouteCounts = {}
    for operation, by_route in after.items():
        for route, count in by_route.items():
            earlier = before.get(operation, {}).get(route, {})
            more = {key: value - earlier.get(key, 0) for key, value in count.items()}
            if more["calls"]:
                found.setdefault(operation, {})[route] = more
    return found


def table(results: Sequence[Result], backends: Mapping[str, str]) -> list[str]:
    """A Markdown table of one shape's results, a row a round and mode.

    `backends` has the heading of each contestant; the first is what the others are compared with.
    """
    first, *others = backends
    titles = ["round", "host", backends[first]]
    for name in others:
        titles += [backends[name], "time saved"]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for number in sorted({result.round for result in results}):
        found = {r.contestant: r for r in results if r.round == number}
        for mode, words in MODES.items():
            base = found[first].step[mode]
            cells = [str(number), words, f"{base:.1f} ms"]
            for name in others:
                step = found[name].step[mode]
                cells += [f"{step:.1f} ms", f"{1 - step / base:+.1%}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def notes(result: Result) -> list[str]:
    """The host's time, the routes and the device's time of one result, a line each."""
    head = f"round {result.round}, {result.contestant}"
    lines = []
    for mode in MODES:
        lines.append(f"{head}, {mode}: host {result.host[mode]:.1f} ms a step")
        for operation, by_route in result.routes[mode].items():
            calls = ", ".join(f"{count['calls']} {route}" for route, count in by_route.items())
            share = direct_share({operation: by_route})
            lines.append(f"{head}, {mode}: {operation} {share:.1%} of bytes direct; calls: {calls}")
        lines += [f"{head}, {mode}: host, {line}" for line in result.calls[mode].lines()]
    if result.device_ms:
        found = sorted(result.device_ms.items(), key=lambda item: -item[1])
        kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in found)
        lines.append(f"{head}, free: device, ms a step: {kinds}")
    return lines


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The own options, and the arguments for examples/train_fsdp2.py but for the shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(%(default)s)")
    parser.add_argument(
        "--shapes",
        type=lambda text: [Shape.parse(part) for part in text.split(",")],
        default="16x4096x2048",
        metavar="LAYERSxHIDDENxSEQ,...",
        help="of the models, one after the other (%(default)s)",
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank (%(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="timed, a mode (%(default)s)")
    parser.add_argument("--warmup", type=int, default=10, help="before those (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument(
        "--contestants",
        type=lambda text: [_contestant(part) for part in text.split(",")],
        default="inner,sdma,sdma+rs",
        metavar=",".join(CONTESTANTS),
        help="the first is what the others are compared with (%(default)s)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="the last round also sums up kernels and copies over a few steps",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    own, rest = parser.parse_known_args(argv)
    if own.warmup < 1 or own.warmup >= own.steps or own.rounds < 1:
        parser.error("give --rounds and --warmup of 1 or more, and more --steps than --warmup")
    for name in ("device", "batch", "steps", "warmup"):
        rest += [f"--{name}", str(getattr(own, name))]
    return own, rest


def _contestant(text: str) -> str:
    if text not in CONTESTANTS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(CONTESTANTS)}")
    return text


def main() -> None:
    own, rest = parse()
    launch = Launch(own.device)
    inner = backend_string("inner", own.device).rpartition(":")[2]
    backends = {name: name.replace("inner", inner) for name in own.contestants}
    setup = {
        "device": own.device,
        "device_name": launch.device_name,
        "ranks": launch.world_size,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if own.device == "cuda" else None,
        "steps": own.steps,
        "warmup": own.warmup,
    }
    say = print if launch.rank == 0 else lambda *text, **how: None
    say(", ".join(f"{key} {value}" for key, value in setup.items() if value is not None))
    shapes: list[dict[str, Any]] = []
    for shape in own.shapes:
        options = train_fsdp2.parse([*shape.arguments(), *rest])
        results = []
        for number in range(own.rounds):
            # The other way round in every other round, so that none is always the warmer.
            for name in own.contestants[:: -1 if number % 2 else 1]:
                last = number == own.rounds - 1
                results.append(measure(launch, options, name, number, own.profile and last))
                for line in notes(results[-1]):
                    say(line, flush=True)
        say(f"\n{shape}, batch {own.batch}; ms a step on the device of the slower rank\n")
        say("\n".join(table(results, backends)), end="\n\n", flush=True)
        shapes.append({**asdict(shape), "results": [asdict(result) for result in results]})
        if launch.rank == 0 and own.json:
            own.json.write_text(json.dumps({**setup, "shapes": shapes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
