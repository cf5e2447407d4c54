"""What the rows of the table (test_table.py) are made of.

A row is a function that calls one thing of torch.distributed on the default group and returns what
came of it, a tree of tensors and plain values. It is registered under its name, once for each
combination of the choices it is given, and twice where it takes `async_op`:

    @row(op=["SUM", "MAX"])
    def all_reduce(async_op, op):
        x = random(7)
        done(dist.all_reduce(x, getattr(dist.ReduceOp, op), async_op=async_op))
        return x
"""

from __future__ import annotations

import inspect
import itertools
import os
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

DEVICE = os.environ.get("PG_SDMA_TEST_DEVICE", "cpu")

ROWS: dict[str, Callable[[], Any]] = {}

_generator = torch.Generator()


class Raised(NamedTuple):
    """What a row came to on a rank where it raised."""

    type: str
    message: str


class Gathered(NamedTuple):
    """What the rows of all-gathers return: this rank's input, and what arrived of each rank's."""

    input: torch.Tensor
    outputs: list[torch.Tensor]


def row(function: Callable[..., Any] | None = None, /, **choices: list[Any]) -> Any:
    """Registers a row; see the module's text."""
    if function is None:
        return partial(row, **choices)
    if "async_op" in inspect.signature(function).parameters:
        choices = {"async_op": [False, True], **choices}
    for values in itertools.product(*choices.values()):
        arguments = dict(zip(choices, values, strict=True))
        labels = [
            name if value is True else str(value)
            for name, value in arguments.items()
            if value is not False
        ]
        ROWS["-".join([function.__name__, *labels])] = partial(function, **arguments)
    return function


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that every dtype represents and that add and multiply exactly in a few ranks."""
    numbers = torch.randint(0, 5, shape, generator=_generator, dtype=torch.int64)
    return numbers.to(dtype).to(DEVICE)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """For outputs: a value that no input has, so that what was not written shows."""
    return torch.full(shape, 77, dtype=torch.int64).to(dtype).to(DEVICE)


def done(work: Any) -> None:
    """Waits for what a call with `async_op` returned: a Work, or nothing."""
    if work is not None:
        work.wait()


def run_row(name: str) -> Any:
    """Runs a row on this rank; the same row draws the same inputs in every group."""
    _generator.manual_seed(zlib.crc32(f"{name} {dist.get_rank()}".encode()))
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    call = ROWS[name]
    try:
        return to_cpu(call())
    except Exception as error:
        return Raised(type(error).__qualname__, str(error))
    finally:
        # A coalescing manager that raises leaves it behind, and what follows would do nothing.
        dist.distributed_c10d._world.pg_coalesce_state.clear()


def to_cpu(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu()
    if isinstance(tree, Gathered):
        return Gathered(*map(to_cpu, tree))
    if isinstance(tree, (list, tuple)):
        return [to_cpu(branch) for branch in tree]
    return tree


def here() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()
