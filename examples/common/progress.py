"""A progress bar on rank 0: rich's, or lines of text where rich is not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def progress(title: str, steps: range) -> Iterator[Callable[[float], None]]:
    """Gives a function to call once a step with the newest loss known (NaN: none yet)."""
    if dist.get_rank() != 0:
        yield lambda loss: None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining
    except ImportError:
        yield _lines(title, steps)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        Remaining(elapsed_when_finished=True),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(title, total=steps.stop, completed=steps.start, loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss)


def _lines(title: str, steps: range) -> Callable[[float], None]:
    done = steps.start
    every = max(1, len(steps) // 10)

    def advance(loss: float) -> None:
        nonlocal done
        done += 1
        if done % every == 0 or done == steps.stop:
            print(f"{title}: step {done}/{steps.stop}, loss {loss:.4f}", flush=True)

    return advance
