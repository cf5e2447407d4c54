"""Times FSDP2 steps over the inner and over sdma, in turn and in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/fsdp2_step.py --profile
    torchrun --standalone --nproc-per-node 2 benchmarks/fsdp2_step.py --contestants none,inner,sdma
    torchrun --standalone --nproc-per-node 2 benchmarks/fsdp2_step.py --contestants inner,sdma \\
        --pairs 20 --steps 10 --check
    torchrun --standalone --nproc-per-node 2 benchmarks/fsdp2_step.py --device cpu \\
        --shapes 2x64x32 --steps 10 --warmup 2

Each round trains one model from the same seed over each contestant:

- inner: NCCL or gloo;
- sdma: as it is by default;
- sdma+rs: with PG_SDMA_OPS=all_gather,reduce_scatter, and receive buffers of 512 MiB
  (docs/reduce_scatter.md says why) or what PG_SDMA_LANDING_BYTES says;
- sdma-late, if asked for: with PG_SDMA_LATE=inner;
- none, if asked for, the floor: after a warm-up over the inner its all-gathers do nothing, and its
  reduce-scatters copy the own slice.

"free" steps let the host run two steps ahead of the device. "sync" steps start from an idle device,
so that the host's time and the ranks' skew are on the critical path. Batches lie on the device
before the clock starts. It prints a Markdown table a shape, and which way the bytes went. Options
not listed here are those of examples/train_fsdp2.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from fsdp2_contestants import CONTESTANTS, FLOOR, baseline, communicate, process_groups
from fsdp2_host import Host, observed
from fsdp2_pairs import compare, losers, summary
from fsdp2_profile import breakdown
from fsdp2_table import MODES, Result, not_finite, notes, table

import train_fsdp2
from common.loop import RUN_AHEAD, StepClock
from common.options import backend_string, learning_rate
from common.session import Launch
from common.text import ByteBatches, load_text
from pg_sdma import stats
from pg_sdma.stats import RouteCounts

HEAD = 128  # elements of an attention head


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


class Trainer:
    """One model and its batches on this rank's device."""

    def __init__(self, launch: Launch, options: argparse.Namespace) -> None:
        self.device = launch.device
        self.training = train_fsdp2.Training(
            train_fsdp2.build(options, launch.device), learning_rate(options)
        )
        self._seed = options.seed
        self._loss = torch.zeros(())
        batches = ByteBatches(
            load_text(options.data),
            batch=options.batch,
            seq=self.training.model.config.seq,
            seed=options.seed,
            rank=launch.rank,
            world_size=launch.world_size,
        )
        self.batches = [tuple(part.to(launch.device) for part in batches(i)) for i in range(4)]

    def reset(self) -> None:
        """Puts model and optimizer where they were at first."""
        self.training.model.initialise(self._seed)
        for state in self.training.optimizer.state.values():
            for value in state.values():
                value.zero_()

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
            self._loss = self.training.step(*self.batches[i % len(self.batches)])
            host.append(time.perf_counter() - start)
            clock.mark()
        return statistics.median(clock.milliseconds()), statistics.median(host) * 1e3

    def loss(self) -> float:
        """Of this rank's last step."""
        return self._loss.item()


def measure(
    trainer: Trainer,
    groups: dict[str, dist.ProcessGroup],
    own: argparse.Namespace,
    name: str,
    number: int,
) -> Result:
    """Round `number` of the contestant `name`, whose group is among `groups`."""
    step: dict[str, float] = {}
    host: dict[str, float] = {}
    routes: dict[str, RouteCounts] = {}
    calls: dict[str, Host] = {}
    loss: dict[str, float] = {}
    for mode in MODES:
        trainer.reset()
        communicate(trainer.training.model, groups[name])
        trainer.run(own.warmup, sync=mode == "sync")
        if name == FLOOR:
            communicate(trainer.training.model, None)
        before = stats(groups[name])
        with observed() as calls[mode]:
            times = trainer.run(own.steps, sync=mode == "sync")
        routes[mode] = since(before, stats(groups[name]))
        loss[mode] = trainer.loss()
        slowest = torch.tensor(times, dtype=torch.float64, device=trainer.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        step[mode], host[mode] = slowest.tolist()
    device_ms = None
    if own.profile and number == own.rounds - 1 and trainer.device.type == "cuda":
        device_ms = breakdown(lambda steps: trainer.run(steps, sync=False))
    return Result(name, number, step, host, routes, calls, loss, device_ms)


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
    parser.add_argument(
        "--warmup", type=int, help="steps before those (10; of short rounds, as --pairs has, 3)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="ROUNDS",
        help="so many rounds instead, told as the median and quartiles of the comparisons",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 if a contestant is slower than the first by more than the pairs' spread",
    )
    parser.add_argument(
        "--contestants",
        type=lambda text: [_contestant(part) for part in text.split(",")],
        default="inner,sdma,sdma+rs",
        metavar=",".join(CONTESTANTS),
        help="the first, none aside, is what the others are compared with (%(default)s)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="the last round also sums up kernels and copies over a few steps",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    own, rest = parser.parse_known_args(argv)
    if own.warmup is None:
        own.warmup = 3 if own.pairs else 10
    if own.warmup < 1 or own.warmup >= own.steps or own.rounds < 1:
        parser.error("give --rounds and --warmup of 1 or more, and more --steps than --warmup")
    if own.pairs is not None:
        if own.pairs < 2:
            parser.error("--pairs: give 2 or more, for there to be a spread")
        own.rounds = own.pairs
    if own.check and own.pairs is None:
        parser.error("--check judges by the pairs' spread: give --pairs, too")
    if len(set(own.contestants)) < len(own.contestants) or set(own.contestants) == {FLOOR}:
        parser.error("--contestants: name each once, and one that communicates")
    for name in ("device", "batch", "steps", "warmup"):
        rest += [f"--{name}", str(getattr(own, name))]
    return own, rest


def _contestant(text: str) -> str:
    if text not in CONTESTANTS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(CONTESTANTS)}")
    return text


def rounds(
    launch: Launch,
    own: argparse.Namespace,
    options: argparse.Namespace,
    say: Callable[..., object],
) -> list[Result]:
    """All rounds of one shape. What they allocated is garbage once it returns."""
    began = time.perf_counter()
    groups = process_groups(own.contestants, launch.device)
    connected = time.perf_counter()
    trainer = Trainer(launch, options)
    built = time.perf_counter()
    say(f"setup: groups {connected - began:.1f} s, model and batches {built - connected:.1f} s")
    if own.pairs:  # whatever a first round does for the first time is in no pair
        for name in own.contestants:
            measure(trainer, groups, own, name, -1)
        say(f"a round that does not count: {time.perf_counter() - built:.1f} s", flush=True)
    results = []
    for number in range(own.rounds):
        # The other way round in every other round, so that none is always the warmer.
        for name in own.contestants[:: -1 if number % 2 else 1]:
            results.append(measure(trainer, groups, own, name, number))
            if not own.pairs:
                say("\n".join(notes(results[-1])), flush=True)
    say(f"all: {time.perf_counter() - began:.1f} s", flush=True)
    return results


def main() -> None:
    own, rest = parse()
    launch = Launch(own.device)
    inner = backend_string("inner", own.device)
    first = baseline(own.contestants)
    names = [first, *(name for name in own.contestants if name != first)]
    backends = {name: name.replace("inner", inner.rpartition(":")[2]) for name in names}
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
    slower: list[str] = []
    for shape in own.shapes:
        options = train_fsdp2.parse([*shape.arguments(), *rest])
        with launch.process_group(inner):
            results = rounds(launch, own, options, say)
        say(f"\n{shape}, batch {own.batch}; ms a step on the device of the slower rank\n")
        found = {**asdict(shape), "results": [asdict(result) for result in results]}
        if own.rounds > 1:
            pairs = compare(results, first, own.steps)
            found["pairs"] = {
                name: {mode: asdict(p) for mode, p in by.items()} for name, by in pairs.items()
            }
            slower += [f"{shape}: {line}" for line in losers(pairs, backends)]
        lines = summary(pairs, backends, own.rounds) if own.pairs else table(results, backends)
        say("\n".join([*lines, *not_finite(results)]), end="\n\n", flush=True)
        shapes.append(found)
        if launch.rank == 0 and own.json:
            own.json.write_text(json.dumps({**setup, "shapes": shapes}, indent=1) + "\n")
    if own.check:
        fair = f"no contestant is slower than {backends[first]} by more than the pairs' spread"
        say("\n".join(slower) or fair, flush=True)
        sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
