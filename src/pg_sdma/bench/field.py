"""Which contenders can run here. All ranks agree on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from pg_sdma.bench import all_gather, reduce_scatter, symmetric
from pg_sdma.bench.buffers import Case
from pg_sdma.bench.contenders import (
    Calls,
    Contender,
    Room,
    SetUp,
    count_wrong,
    over_group,
    peer_copy,
)
from pg_sdma.bench.launch import World
from pg_sdma.bench.operation import Operation
from pg_sdma.settings import read_settings

T = TypeVar("T")

# As the command line has them, in the order of the columns.
CONTENDERS = ("sdma", "inner", "zero-cta", "low-contention", "copy")
OPERATIONS = {each.name: each for each in (all_gather.OPERATION, reduce_scatter.OPERATION)}
# Who does each, or copies as many bytes. Copies without kernels cannot sum.
CONTENDERS_OF = {"all_gather": CONTENDERS, "reduce_scatter": ("sdma", "inner", "copy")}


def set_ups(
    names: Sequence[str], world: World, room: Room, operation: Operation = all_gather.OPERATION
) -> dict[str, SetUp]:
    """How to set up those of CONTENDERS that are named, by the heading of their column.

    All of them are in CONTENDERS_OF the operation.
    """
    inner = read_settings().inner_backend(world.device.type)
    known: dict[str, tuple[str, Callable[[World, Room], SetUp]]] = {
        "sdma": ("sdma", partial(over_group, "sdma", "sdma", operation)),
        "inner": (inner, partial(over_group, inner, inner, operation)),
        "zero-cta": ("zero-CTA", symmetric.zero_cta),
        "low-contention": ("low-contention", symmetric.low_contention),
        "copy": ("peer copy", peer_copy),
    }
    return {known[name][0]: known[name][1](world, room) for name in CONTENDERS if name in names}


@dataclass(frozen=True)
class Field:
    """Who takes part, and who does not and why."""

    contenders: list[Contender]
    absent: Mapping[str, str]  # name -> reason


def field(world: World, stages_by_name: Mapping[str, SetUp]) -> Field:
    """Sets all up in turn. One that fails on any rank is absent on all."""
    contenders: list[Contender] = []
    absent: dict[str, str] = {}
    for name, stages in stages_by_name.items():
        contender, why = set_up(world, stages)
        if contender is None:
            absent[name] = why
        else:
            contenders.append(contender)
    return Field(contenders, absent)


@dataclass(frozen=True)
class Ready:
    """A contender's calls of one case, checked."""

    calls: Calls
    wrong: int | None  # elements over all ranks; None: it moves other bytes


def ready(world: World, contender: Contender, case: Case, wanted: int) -> tuple[Ready | None, str]:
    """Prepares and checks on all ranks, or None and why that fails on any."""
    calls, why = agreed(world, lambda: contender.prepare(case, wanted))
    if calls is None:
        return None, why
    counted, why = agreed(world, lambda: (count_wrong(case, calls),))
    if counted is None:
        return None, why
    wrong = counted[0]
    return Ready(calls, None if wrong is None else world.total(wrong)), ""


def close(world: World, contenders: Sequence[Contender]) -> None:
    """Lets the contenders give back what is theirs; all ranks come here."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.barrier()
    for contender in contenders:
        contender.close()


def set_up(world: World, stages: SetUp) -> tuple[Contender | None, str]:
    """Runs the stages on all ranks in step: the contender, or None and why it cannot run here."""
    while True:
        more, why = agreed(world, lambda: _advance(stages))
        if more is None:
            stages.close()
            return None, why
        if more[0] is not None:
            return more[0], ""


def _advance(stages: SetUp) -> tuple[Contender | None]:
    try:
        next(stages)
    except StopIteration as done:
        return (done.value,)
    return (None,)


def agreed(world: World, make: Callable[[], T]) -> tuple[T | None, str]:
    """What `make()` returns, or None and why where it raises on any rank.

    No rank goes on before all have come here: `make` must not wait for a rank for longer than that
    rank may take to raise.
    """
    made, why = None, ""
    try:
        made = make()
    except Exception as error:  # whatever a library that this one does not know may raise
        why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    reasons = world.gathered(why)
    for rank, reason in enumerate(reasons):
        if reason:
            return None, f"rank {rank}: {reason}"
    return made, ""
