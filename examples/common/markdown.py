"""A comparison of two runs as a Markdown table."""

from __future__ import annotations

from common.loop import Run
from common.report import MIB, max_abs_loss_difference


def gain_percent(inner: Run, sdma: Run) -> float:
    """The part of inner's time a step that sdma saves, in per cent; negative where it is slower."""
    return (1 - sdma.ms_per_step / inner.ms_per_step) * 100


def comparison_page(inner: Run, sdma: Run, heading: str, command: str) -> str:
    """The document: what ran, by which command, and what was measured, one column a route."""
    rows = [
        ("ms a step (median)", f"{inner.ms_per_step:.1f}", f"{sdma.ms_per_step:.1f}"),
        ("tokens/s, all ranks", f"{inner.tokens_per_s:,.0f}", f"{sdma.tokens_per_s:,.0f}"),
        ("time saved", "", f"{gain_percent(inner, sdma):+.2f} %"),
        ("last loss, nats a byte", f"{inner.losses[-1]:.6f}", f"{sdma.losses[-1]:.6f}"),
        ("largest loss difference", "", f"{max_abs_loss_difference(inner, sdma):.3g}"),
    ]
    if inner.peak_memory_bytes and sdma.peak_memory_bytes:
        before, after = (peak / MIB for peak in (inner.peak_memory_bytes, sdma.peak_memory_bytes))
        rows.append(("peak device memory, MiB", f"{before:,.0f}", f"{after:,.0f}"))
    share = "none" if sdma.fast_path_share is None else f"{sdma.fast_path_share:.1%}"
    rows.append(("bytes that went direct", "", share))
    lines = [
        f"# {heading}",
        "",
        f"`{command}`",
        "",
        f"{len(sdma.losses)} steps a run.",
        "",
        f"| | {inner.backend} | {sdma.backend} |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "![losses](loss.png)",
    ]
    return "\n".join(lines) + "\n"
