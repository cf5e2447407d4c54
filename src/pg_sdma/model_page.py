"""What `pg-sdma model` prints, as Markdown or JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pg_sdma.model import CONSTANTS, MACHINES, RANKS, Model, Row, rows_of


def page(model: Model, names: Sequence[str], sizes: Sequence[int]) -> str:
    """What `pg-sdma model` prints, and docs/scaling.md has."""
    remarks = []
    for name in names:
        machine = MACHINES[name]
        text = f"- {machine.title}:"
        if machine.hosts == 1:
            queues = machine.ranks - 1 if machine.mesh else 1
            hidden = model.hidden_from(machine, queues) / 2**20
            text += f" a gather takes the device longer than its host from {hidden:.0f} MiB on."
        if machine.remark:
            text += f" {machine.remark[0].upper()}{machine.remark[1:]}."
        remarks += textwrap.wrap(text, 100, subsequent_indent="  ")
    parts = [
        ["This is a model, not a measurement."],
        constants_table(model),
        ranks_table(model),
        machines_table(model, names, sizes),
        remarks,
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def as_json(model: Model, names: Sequence[str], sizes: Sequence[int]) -> dict[str, object]:
    """The same, for programs."""
    return {
        "is": "a model, not a measurement",
        "constants": {
            name: vars(c) | {"value": model.constants[name], "source": model.source(name)}
            for name, c in CONSTANTS.items()
        },
        "ranks": [
            {
                "ranks": n,
                "handshake_us": model.handshake(n),
                "enqueue_us": model.enqueue(n),
                "enqueue_batched_us": model.enqueue_batched(),
                "host_us": model.host(n),
                "page_reads": model.page_reads(n),
                "calls_ahead": model.calls_ahead(n),
            }
            for n in RANKS
        ],
        "gathers": [row.as_json() for row in rows_of(model, names, sizes)],
    }


def constants_table(model: Model) -> list[str]:
    """The constants as Markdown."""
    rows = [
        (f"`{name}`", f"{model.constants[name]:g} {c.unit}", c.meaning, model.source(name))
        for name, c in CONSTANTS.items()
    ]
    return _markdown(("constant", "value", "what", "where from"), rows)


def ranks_table(model: Model, ranks: Sequence[int] = RANKS) -> list[str]:
    """What grows with the number of ranks, whatever the machine, as Markdown."""
    titles = (
        "ranks",
        "handshake (us)",
        "enqueue (us)",
        "batched, at best (us)",
        "host in all (us)",
        "page reads",
        "calls ahead",
    )
    rows = [
        (
            str(n),
            f"{model.handshake(n):.1f}",
            f"{model.enqueue(n):.1f}",
            f"{model.enqueue_batched():.1f}",
            f"{model.host(n):.1f}",
            str(model.page_reads(n)),
            str(model.calls_ahead(n)),
        )
        for n in ranks
    ]
    return _markdown(titles, rows)


def machines_table(model: Model, names: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """Gathers of `sizes` bytes on each machine, as Markdown."""
    titles = ("machine", "output", "device (us)", "busbw (GB/s)", "host (us)", "longest part")
    rows = [tuple(_cells(row)) for row in rows_of(model, names, sizes)]
    return _markdown(titles, rows)


def _cells(row: Row) -> list[str]:
    device = f"{row.device:.0f}"
    if row.network:
        device = f"{row.network:.0f} network + {device}"
    return [
        f"{row.machine}, {row.way}" if row.way else row.machine,
        f"{row.size >> 20} MiB" if row.size % (1 << 20) == 0 else f"{row.size} B",
        device,
        f"{row.busbw:.0f}",
        f"{row.host:.0f}",
        row.longest,
    ]


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]
