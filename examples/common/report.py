"""What a run writes: always result.json; of two runs also a table and a picture to compare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.loop import Run

if TYPE_CHECKING:
    from rich.table import Table

MIB = 2**20


def require_extras() -> None:
    """Exits with what to install, where a comparison's picture and table could not be made."""
    missing = [name for name in ("rich", "matplotlib") if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"--compare draws with {' and '.join(missing)}, which this environment lacks:\n"
            "    pip install rich matplotlib"
        )


def loss_differences(inner: Run, sdma: Run) -> list[float]:
    """sdma's loss less inner's at each step, in nats per byte.

    Raises ValueError where the two did not train the same steps.
    """
    if (inner.first_step, len(inner.losses)) != (sdma.first_step, len(sdma.losses)):
        raise ValueError(
            f"steps differ: {inner.transport} made {len(inner.losses)} from {inner.first_step}, "
            f"{sdma.transport} {len(sdma.losses)} from {sdma.first_step}"
        )
    return [b - a for a, b in zip(inner.losses, sdma.losses, strict=True)]


def max_abs_loss_difference(inner: Run, sdma: Run) -> float:
    """The largest of the differences, sign aside; exactly 0 where all losses agree in every bit."""
    return max(abs(delta) for delta in loss_differences(inner, sdma))


def result(runs: Sequence[Run], setup: Mapping[str, Any]) -> dict[str, Any]:
    """The content of result.json; what each run measured is keyed by its transport."""
    compared = len(runs) == 2
    return {
        **setup,
        "torch": torch.__version__,
        "first_step": runs[0].first_step,
        "steps": len(runs[0].losses),
        "backend": {run.transport: run.backend for run in runs},
        "ms_per_step": {run.transport: run.ms_per_step for run in runs},
        "tokens_per_s": {run.transport: run.tokens_per_s for run in runs},
        "peak_memory_bytes": {run.transport: run.peak_memory_bytes for run in runs},
        "fast_path_share": runs[-1].fast_path_share,
        "max_abs_loss_difference": max_abs_loss_difference(*runs) if compared else None,
        "losses": {run.transport: run.losses for run in runs},
    }


def run_of(content: Mapping[str, Any]) -> Run:
    """The run that `result` made this content of, which is of one run and not of two."""
    ((transport, backend),) = content["backend"].items()
    return Run(
        transport=transport,
        backend=backend,
        first_step=content["first_step"],
        losses=content["losses"][transport],
        ms_per_step=content["ms_per_step"][transport],
        tokens_per_s=content["tokens_per_s"][transport],
        peak_memory_bytes=content["peak_memory_bytes"][transport],
        fast_path_share=content["fast_path_share"],
    )


def write_report(runs: Sequence[Run], setup: Mapping[str, Any], out: Path) -> None:
    """Writes result.json and, of two runs (inner, sdma), loss.png; prints a table or a line."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "result.json"
    path.write_text(json.dumps(result(runs, setup), indent=1) + "\n")
    if len(runs) == 2:
        from rich.console import Console

        draw_losses(runs[0], runs[1], title(setup), out / "loss.png")
        Console().print(comparison_table(runs[0], runs[1], title(setup)))
        print(f"{path}\n{out / 'loss.png'}")
    else:
        (run,) = runs
        print(
            f"{run.backend}: {run.ms_per_step:.1f} ms a step, {run.tokens_per_s:,.0f} tokens/s, "
            f"last loss {run.losses[-1]:.4f} nats a byte; {path}"
        )


def title(setup: Mapping[str, Any]) -> str:
    """One line that says what was trained where."""
    return (
        f"{setup['trainer']}, {setup.get('family', 'GPT')} of {setup['parameters']:,} parameters, "
        f"{setup['param_dtype']}, {setup['ranks']} ranks on {setup['device_name']}"
    )


def comparison_table(inner: Run, sdma: Run, heading: str) -> Table:
    """Rows of what was measured, one column a route, and how sdma compares."""
    from rich.table import Table

    def change(before: float, after: float) -> str:
        return f"{(after / before - 1) * 100:+.1f} %"

    table = Table(
        title=heading,
        title_style="bold",
        caption=f"{inner.transport}: {inner.backend}, {sdma.transport}: {sdma.backend}",
    )
    table.add_column("")
    for column in (inner.transport, sdma.transport, "difference"):
        table.add_column(column, justify="right")
    rows = [
        ("ms per step (median)", "{:.1f}", inner.ms_per_step, sdma.ms_per_step),
        ("tokens per second", "{:,.0f}", inner.tokens_per_s, sdma.tokens_per_s),
    ]
    if inner.peak_memory_bytes and sdma.peak_memory_bytes:
        peaks = (inner.peak_memory_bytes / MIB, sdma.peak_memory_bytes / MIB)
        rows.append(("peak device memory, MiB", "{:,.0f}", *peaks))
    for name, form, before, after in rows:
        table.add_row(name, form.format(before), form.format(after), change(before, after))
    table.add_row(
        "last loss, nats per byte",
        f"{inner.losses[-1]:.6f}",
        f"{sdma.losses[-1]:.6f}",
        f"{sdma.losses[-1] - inner.losses[-1]:.2g}",
    )
    table.add_row("largest loss difference", "", "", f"{max_abs_loss_difference(inner, sdma):.2g}")
    share = sdma.fast_path_share
    table.add_row("bytes that went direct", "", "none" if share is None else f"{share:.1%}", "")
    return table


def draw_losses(inner: Run, sdma: Run, heading: str, path: Path) -> None:
    """Both loss curves above, their difference below, as a PNG."""
    from matplotlib.figure import Figure

    steps = range(inner.first_step + 1, inner.first_step + len(inner.losses) + 1)
    largest = max_abs_loss_difference(inner, sdma)
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    figure.suptitle(heading, fontsize=11)
    curves, difference = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))

    # The wide pale line stays visible where the thin one covers it.
    curves.plot(steps, inner.losses, color="#9ecae1", linewidth=5, label=_label(inner))
    curves.plot(steps, sdma.losses, color="#b30000", linewidth=1.2, label=_label(sdma))
    curves.set_ylabel("loss (nats per byte)")
    curves.legend(frameon=False)

    deltas = loss_differences(inner, sdma)
    difference.plot(steps, deltas, color="#b30000", linewidth=1.2)
    difference.set_ylabel(f"{sdma.transport} \N{MINUS SIGN} {inner.transport}\n(nats per byte)")
    difference.set_xlabel("step")
    if largest == 0:
        difference.set_ylim(-1, 1)
        difference.set_yticks([0])
        note = f"exactly 0 in all {len(deltas)} steps"
    else:
        difference.set_ylim(-1.8 * largest, 1.8 * largest)
        note = f"largest {largest:.2g}"
    difference.text(0.99, 0.93, note, transform=difference.transAxes, ha="right", va="top")
    for axes in (curves, difference):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    figure.align_ylabels()
    figure.savefig(path, dpi=150)


def _label(run: Run) -> str:
    return f"{run.transport}, {run.backend}: {run.ms_per_step:.1f} ms a step"
