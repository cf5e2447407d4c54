"""A progress bar below the lines of a table, where rich is installed and stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def progress(first_rank: bool, steps: int) -> Iterator[tuple[Callable[[str], None], Callable]]:
    """Gives `say(text)`, which prints on the first rank only, and `advance()` for every step."""
    if not first_rank:
        yield lambda text: None, lambda: None
        return
    say = partial(print, flush=True)
    if not sys.stderr.isatty():
        yield say, lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield say, lambda: None
        return
    # On stderr, so that a redirected stdout holds the table alone.
    console = Console(stderr=True)
    redirect = sys.stdout.isatty()
    with Progress(console=console, transient=True, redirect_stdout=redirect) as bar:
        task = bar.add_task("sizes", total=steps)
        yield say, partial(bar.advance, task)
