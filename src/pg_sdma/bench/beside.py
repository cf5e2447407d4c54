"""`pg-sdma bench overlap`: what all-gathers and matrix products do to each other."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from pg_sdma.bench import layers, overlap, trace
from pg_sdma.bench.launch import World, measured_backends
from pg_sdma.bench.measure import Call, Gate
from pg_sdma.bench.progress import progress
from pg_sdma.bench.routes import route_since
from pg_sdma.stats import RouteCounts, stats

TRACED_GEMMS = 4


def run(world: World, options: Namespace) -> None:
    """Measures every size and model; rank 0 prints the tables and writes what is asked for.

    Raises SystemExit(1) on every rank where an element was wrong.
    """
    names = measured_backends(options)
    groups = [world.group(name) for name in names]
    side = overlap.SideBySide(
        world, Gate(world.device), overlap.Products(options.gemm, world.device)
    )
    chains: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    recorded: list[trace.Activity] = []
    models = [(model, seq) for model in options.models for seq in options.seq]
    with progress(world.rank == 0, len(options.sizes) + len(models)) as (say, advance):
        say(overlap.MEANING.format(n=options.gemm))
        say(f"{overlap.HEADING}  route")
        for size in options.sizes:
            calls = overlap.gather_calls(size, groups, world, buffers=2)
            before = [stats(group) for group in groups]
            rows = overlap.measure(side, calls, names, size, world, options.gathers, options.rounds)
            for row, route in zip(rows, _routes(before, groups), strict=True):
                say(f"{overlap.line(row)}  {route}")
                chains.append(row.as_json() | {"route": route})
            advance()
        if options.trace:
            calls = overlap.gather_calls(options.sizes[-1], groups, world, buffers=2)
            phases: dict[str, Callable[[], object]] = {}
            for name, call in zip(names, calls, strict=True):
                for gemms, what in ((0, "gathers alone"), (TRACED_GEMMS, "beside products")):
                    phases[f"{name}, {what}"] = _phase(side, call, options.gathers, gemms)
            recorded = trace.record(world, phases, options.trace)
            for text in (trace.HEADING, *trace.lines(recorded)):
                say(text)
        if models:
            say(layers.MEANING)
            say(f"{layers.HEADING}  route")
        for model, seq in models:
            before = [stats(group) for group in groups]
            found = layers.measure(
                world, groups, names, model, options.layers, seq, options.steps, options.rounds
            )
            for step, route in zip(found, _routes(before, groups), strict=True):
                say(f"{layers.line(step)}  {route}")
                steps.append(step.as_json() | {"route": route})
            advance()
    if world.rank == 0 and options.json:
        result = {
            **world.facts(),
            "operation": "overlap",
            "gemm": options.gemm,
            "rounds": options.rounds,
            "chains": chains,
            "steps": steps,
            "device_activities": [vars(activity) for activity in recorded],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if any(step["wrong"] for step in steps):
        raise SystemExit(1)


def _routes(before: Sequence[RouteCounts], groups: Sequence[dist.ProcessGroup]) -> list[str]:
    return [route_since(b, stats(group)) for b, group in zip(before, groups, strict=True)]


def _phase(side: overlap.SideBySide, call: Call, gathers: int, gemms: int) -> Callable[[], object]:
    return lambda: side.enqueue(call, gathers, gemms)
