"""`pg-sdma bench overlap`: what all-gathers and matrix products do to each other."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable

from pg_sdma.bench import layers, overlap, trace
from pg_sdma.bench.launch import World, measured_backends
from pg_sdma.bench.measure import Call, Gate
from pg_sdma.bench.progress import progress

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
    chains: list[overlap.Overlap] = []
    steps: list[layers.Step] = []
    recorded: list[trace.Activity] = []
    models = [(model, seq) for model in options.models for seq in options.seq]
    with progress(world.rank == 0, len(options.sizes) + len(models)) as (say, advance):
        say(overlap.MEANING.format(n=options.gemm))
        say(overlap.HEADING)
        for size in options.sizes:
            calls = overlap.gather_calls(size, groups, world, buffers=2)
            rows = overlap.measure(side, calls, names, size, world, options.gathers, options.rounds)
            for row in rows:
                say(overlap.line(row))
            chains += rows
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
            say(layers.HEADING)
        for model, seq in models:
            found = layers.measure(
                world, groups, names, model, options.layers, seq, options.steps, options.rounds
            )
            for step in found:
                say(layers.line(step))
            steps += found
            advance()
    if world.rank == 0 and options.json:
        result = {
            **world.facts(),
            "operation": "overlap",
            "gemm": options.gemm,
            "rounds": options.rounds,
            "chains": [row.as_json() for row in chains],
            "steps": [row.as_json() for row in steps],
            "device_activities": [vars(activity) for activity in recorded],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if any(step.wrong for step in steps):
        raise SystemExit(1)


def _phase(side: overlap.SideBySide, call: Call, gathers: int, gemms: int) -> Callable[[], object]:
    return lambda: side.enqueue(call, gathers, gemms)
