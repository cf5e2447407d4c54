"""`pg-sdma bench overlap`: how a collective and matrix products slow each other down."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from pg_sdma.bench import layers, overlap, trace
from pg_sdma.bench.contenders import Calls, Contender, room_for
from pg_sdma.bench.field import OPERATIONS, Field, close, field, ready, set_ups
from pg_sdma.bench.launch import World
from pg_sdma.bench.measure import Call, Gate, own_stream
from pg_sdma.bench.progress import progress
from pg_sdma.bench.routes import route_since
from pg_sdma.stats import RouteCounts, stats

TRACED_GEMMS = 4
BF16 = 2  # bytes


def run(world: World, options: Namespace) -> None:
    """Measures every size and model; rank 0 prints the tables and writes what is asked for.

    Raises SystemExit(1) on every rank where an element was wrong or no contender can run.
    """
    operation = OPERATIONS[options.operation]
    operation.go_direct()
    with own_stream(world):
        room = room_for(2 * largest(options), world.size)  # two buffers in turn
        found = field(world, set_ups(options.contenders, world, room, operation))
        bench = Bench(world, found, options)
        with progress(world.rank == 0, bench.parts) as (say, advance):
            bench.run(say, advance)
        if world.rank == 0 and options.json:
            options.json.write_text(json.dumps(bench.result(), indent=1) + "\n")
        close(world, found.contenders)
    if bench.wrong or not found.contenders:
        raise SystemExit(1)


def largest(options: Namespace) -> int:
    """Bytes of the largest size, with room for rounding it up to shards and alignment."""
    of_layers = [layers.MODELS[model].layer_numel * BF16 for model in options.models]
    return max([*options.sizes, *of_layers]) + 2**20


class Bench:
    """The contenders, and what was found of them."""

    def __init__(self, world: World, found: Field, options: Namespace) -> None:
        self._world = world
        self._contenders = found.contenders
        self._absent = found.absent
        self._options = options
        self._operation = OPERATIONS[options.operation]
        self._models = [(model, seq) for model in options.models for seq in options.seq]
        self._chains: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        self._recorded: list[trace.Activity] = []
        self.wrong = 0  # elements

    @property
    def parts(self) -> int:
        return len(self._options.sizes) + len(self._models)

    def run(self, say: Callable[[str], None], advance: Callable[[], object]) -> None:
        for name, why in self._absent.items():
            say(f"# not measured: {name}: {why}")
        if not self._contenders:
            return
        side = overlap.SideBySide(
            self._world,
            Gate(self._world.device),
            overlap.Products(self._options.gemm, self._world.device),
        )
        say(overlap.meaning(self._operation, self._options.gemm))
        say(f"{overlap.heading(self._operation)}  route")
        for size in self._options.sizes:
            self._beside_chain(side, size, say)
            advance()
        if self._options.trace:
            self._trace(side, say)
        if self._models:
            say(layers.MEANING)
            say(f"{layers.HEADING}  route")
        for model, seq in self._models:
            self._in_model(model, seq, say)
            advance()

    def result(self) -> dict[str, Any]:
        """What --json holds."""
        return {
            **self._world.facts(),
            "operation": "overlap",
            "collective": self._operation.name,
            "absent": dict(self._absent),
            "gemm": self._options.gemm,
            "rounds": self._options.rounds,
            "chains": self._chains,
            "steps": self._steps,
            "device_activities": [vars(activity) for activity in self._recorded],
        }

    def _beside_chain(
        self, side: overlap.SideBySide, size: int, say: Callable[[str], None]
    ) -> None:
        options = self._options
        calls = _callables(self._prepared(size // BF16, say))
        before = self._counts()
        rows, failed = overlap.measure(
            side, calls, size, self._world, options.gathers, options.rounds
        )
        for name, why in failed.items():
            say(f"# not measured: {name}, {size} B: {why}")
        routes = self._routes(before)
        for row in rows:
            say(f"{overlap.line(row, self._operation)}  {routes[row.contender]}")
            self._chains.append(row.as_json() | {"route": routes[row.contender]})

    def _trace(self, side: overlap.SideBySide, say: Callable[[str], None]) -> None:
        calls = _callables(self._prepared(self._options.sizes[-1] // BF16, say))
        phases: dict[str, Callable[[], object]] = {}
        for name, call in calls.items():
            for gemms, what in (
                (0, f"{self._operation.noun}s alone"),
                (TRACED_GEMMS, "beside products"),
            ):
                phases[f"{name}, {what}"] = _phase(side, call, self._options.gathers, gemms)
        self._recorded = trace.record(self._world, phases, self._options.trace)
        for text in (trace.HEADING, *trace.lines(self._recorded)):
            say(text)

    def _in_model(self, model: str, seq: int, say: Callable[[str], None]) -> None:
        options = self._options
        gathers = self._prepared(layers.MODELS[model].layer_numel, say)
        before = self._counts()
        found = layers.measure(
            self._world, gathers, model, options.layers, seq, options.steps, options.rounds
        )
        routes = self._routes(before)
        for step in found:
            say(f"{layers.line(step)}  {routes[step.contender]}")
            self._steps.append(step.as_json() | {"route": routes[step.contender]})
            self.wrong += step.wrong or 0

    def _prepared(self, numel: int, say: Callable[[str], None]) -> dict[str, Calls]:
        """Of `numel` elements by everyone who can, checked, over two buffers in turn."""
        made = {}
        for contender in self._contenders:
            case = overlap.case_for(self._world, contender, numel)
            its, why = ready(self._world, contender, case, 2)
            if its is None:
                say(f"# not measured: {contender.name}, {case.size} B: {why}")
                continue
            if its.wrong:
                say(f"# WRONG: {contender.name}, {case.size} B: {its.wrong} elements")
                self.wrong += its.wrong
            made[contender.name] = its.calls
        return made

    def _counts(self) -> dict[str, RouteCounts]:
        return {contender.name: _count(contender) for contender in self._contenders}

    def _routes(self, before: Mapping[str, RouteCounts]) -> dict[str, str]:
        return {
            contender.name: route_since(before[contender.name], _count(contender))
            for contender in self._contenders
        }


def _count(contender: Contender) -> RouteCounts:
    return {} if contender.group is None else stats(contender.group)


def _callables(calls: Mapping[str, Calls]) -> dict[str, Call]:
    return {name: made.call for name, made in calls.items()}


def _phase(side: overlap.SideBySide, call: Call, gathers: int, gemms: int) -> Callable[[], object]:
    return lambda: side.enqueue(call, gathers, gemms)
