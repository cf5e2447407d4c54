"""Every environment variable of pg_sdma, declared once.

`python -m pg_sdma.settings` prints docs/settings.md. A test compares that page with these
declarations.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pg_sdma.setting_kinds import (
    INNER_DEFAULTS,
    Kind,
    byte_count,
    choice,
    injections,
    inner_names,
    integer,
    milliseconds,
    operation_names,
    switch,
)

logger = logging.getLogger("pg_sdma")

PREFIX = "PG_SDMA"
# Read by setup.py when the extension is built, and by nothing at run time.
BUILD_VARIABLES = ("PG_SDMA_SANITIZE",)
# From how many bytes on calls go direct where nothing else says so, by device type: those of
# csrc/engine, for people to read. Named as in tuning.BOUNDS.
DEFAULT_BOUNDS = {
    "cpu": {"all_gather": 0, "coalesced": 0, "reduce_scatter": 0},
    "cuda": {"all_gather": 4 << 20, "coalesced": 4 << 20, "reduce_scatter": 64 << 20},
}


@dataclass(frozen=True)
class Variable:
    """What is said of one environment variable."""

    name: str
    kind: Kind
    default: str  # as documented
    doc: str
    agreed: bool  # must be the same on all ranks of a group


_BIT = switch("1", "0")
_KEY = "variable"


def _variable(
    name: str,
    kind: Kind,
    doc: str,
    *,
    default: str | None = None,
    unset: Any = None,
    means: str = "",
    agreed: bool = False,
) -> Any:
    """A field read from variable `name`.

    Where the variable is unset the field is what `default` parses to, or else `unset`, which
    `means` puts into words.
    """
    value = unset if default is None else kind.parse(default)
    variable = Variable(name, kind, means or f"`{default}`", doc, agreed)
    return field(default_factory=lambda: value, metadata={_KEY: variable})


@dataclass(frozen=True)
class Settings:
    """The settings of one process. Field names are the keys that csrc/module.cpp reads."""

    enabled: bool = _variable(
        "PG_SDMA",
        switch("on", "off"),
        "`off` sends every call to the inner backend, for comparison. One rank with `off` turns "
        "the direct route off for its whole group.",
        default="on",
    )
    transport: str = _variable(
        "PG_SDMA_TRANSPORT",
        choice("auto", "peer", "mori"),
        "What carries direct calls. `peer`: copies between the ranks' tensors where they lie. "
        "`auto`: peer copies, but for two cases. All-gathers of CPU tensors go through at most 2 "
        "MiB of shared memory a group, where every rank has a core and the ranks are few. On AMD "
        "GPUs AMD's mori is asked where the vote or its self-test refuses peer copies. `mori`: "
        "mori alone, for GPU tensors: see [mori.md](mori.md).",
        default="auto",
        agreed=True,
    )
    mori_bytes: int = _variable(
        "PG_SDMA_MORI_BYTES",
        byte_count(1 << 17),
        "Memory that mori's buffers take of each GPU, until the process ends, where mori carries "
        "all-gathers. Longer shards go through them piece by piece.",
        default=str(512 << 20),
        agreed=True,
    )
    mori_on_cpu: bool = _variable(
        "PG_SDMA_MORI_ON_CPU",
        _BIT,
        "`1` lets a stand-in for mori carry CPU tensors, which AMD's mori does not take. For "
        "tests.",
        default="0",
        agreed=True,
    )
    inner: Mapping[str, str] = _variable(
        "PG_SDMA_INNER",
        Kind(
            "a backend for GPU tensors, or `device=backend` pairs such as `cpu=gloo,cuda=gloo`",
            inner_names,
        ),
        "The wrapped backends (the inner). They carry every other operation and what does not go "
        "direct.",
        unset={},
        means="`cpu=gloo,cuda=nccl`",
        agreed=True,
    )
    ops: tuple[str, ...] = _variable(
        "PG_SDMA_OPS",
        Kind(
            "one or both of `all_gather` and `reduce_scatter`, with a comma between",
            operation_names,
        ),
        "The operations that may go direct. Direct reduce-scatters round differently from the "
        "inner's: see [reduce_scatter.md](reduce_scatter.md).",
        default="all_gather",
        agreed=True,
    )
    landing_bytes: int = _variable(
        "PG_SDMA_LANDING_BYTES",
        byte_count(4096),
        "What a direct reduce-scatter may allocate, whatever its size and the number of ranks; "
        "for GPU tensors, on the GPU.",
        default=str(64 << 20),
    )
    min_bytes: int | None = _variable(
        "PG_SDMA_MIN_BYTES",
        byte_count(0),
        "From which size on calls go direct: of an all-gather's output, or a reduce-scatter's "
        "input. Smaller ones go to the inner. Where it is set, no tuning file is read.",
        means="what `pg-sdma tune` measured; else for GPU tensors "
        f"{DEFAULT_BOUNDS['cuda']['all_gather']} for all-gathers (coalesced: the mean of the "
        f"tensors) and {DEFAULT_BOUNDS['cuda']['reduce_scatter']} for reduce-scatters, and 0 for "
        "CPU tensors",
        agreed=True,
    )
    tuning: str | None = _variable(
        "PG_SDMA_TUNING",
        Kind("path of a file, or `off`", str),
        "The file with the sizes from which on calls go direct on this machine. `pg-sdma tune` "
        "writes it, and a group reads it when it is made. Ranks that read different bounds use the "
        "inner.",
        means="`pg_sdma/tuning.json` under `$XDG_CONFIG_HOME` or `~/.config`",
    )
    patience_ms: float | None = _variable(
        "PG_SDMA_PATIENCE_MS",
        Kind("milliseconds, above 0", milliseconds),
        "How long a rank's host waits in a call until its peers have made the same call. Then they "
        "count as late. `PG_SDMA_LATE` says what becomes of an all-gather; other late calls go to "
        "the inner on all ranks.",
        means="GPU tensors: up to 5 while the caller's stream holds work that has yet to run, then "
        "as long as a late rank's second copy would take, at least 0.05. CPU tensors: the group's "
        "timeout",
    )
    late: str = _variable(
        "PG_SDMA_LATE",
        choice("direct", "inner"),
        "What becomes of a late all-gather. `direct`, on NVIDIA GPUs: every rank enqueues its part "
        "when it makes the call, and the device waits for the others, as with NCCL's kernels. That "
        "holds for `all_gather_into_tensor` and its coalesced form, and for groups of at most 16 "
        "ranks. At most 128 such calls may wait for a rank; the next goes to the inner. `inner`: "
        "it goes to the inner.",
        default="direct",
        agreed=True,
    )
    strict: bool = _variable(
        "PG_SDMA_STRICT",
        _BIT,
        "`1` raises where an operation of `PG_SDMA_OPS` would go to the inner, unless every rank "
        "has `PG_SDMA=off`.",
        default="0",
        agreed=True,
    )
    ptracer: bool = _variable(
        "PG_SDMA_PTRACER",
        _BIT,
        "Whether a process may call `prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)` where the Yama "
        "security module keeps its peers from reading its CPU tensors. The call lets every process "
        "of the same user read it.",
        default="1",
    )
    ring: int = _variable(
        "PG_SDMA_RING",
        integer(2, "slots"),
        "Operations for which the ranks of a group can hold records at a time. For tests.",
        default="16",
        agreed=True,
    )
    allow_same_device: bool = _variable(
        "PG_SDMA_ALLOW_SAME_DEVICE",
        _BIT,
        "`1` lets ranks that share one GPU go direct; the copies are then kernels. For tests.",
        default="0",
    )
    allow_pcie: bool = _variable(
        "PG_SDMA_ALLOW_PCIE",
        _BIT,
        "`1` goes direct also between GPUs that reach each other over PCIe only.",
        default="0",
    )
    driver: str | None = _variable(
        "PG_SDMA_DRIVER",
        Kind("path of a shared library", str),
        "Opened in place of the GPU vendor's driver library. For tests.",
        means="`libcuda.so.1` or `libamdhip64.so`",
    )
    trace_entries: int = _variable(
        "PG_SDMA_TRACE_ENTRIES",
        integer(0, "collectives"),
        "How many of its last collectives a group remembers for each device type, for "
        "`pg_sdma.flight_record()`. 0 remembers nothing.",
        default="512",
    )
    trace_file: str | None = _variable(
        "PG_SDMA_TRACE_FILE",
        Kind("the beginning of a path", str),
        "When a group breaks, each rank writes its flight record to a file: this path with the "
        "global rank and `.json` appended. `pg-sdma trace` reads it.",
        means="no file",
    )
    inject: tuple[str, ...] = _variable(
        "PG_SDMA_INJECT",
        Kind(
            "`point=action`, with `#n` for the n-th time and `@rank`, or several with commas",
            injections,
        ),
        "Faults on purpose, for tests: docs/reliability.md has the points. An action is `refuse`, "
        "`die`, `stop`, `corrupt` or `late:seconds`.",
        unset=(),
        means="none",
    )

    def inner_backend(self, device_type: str) -> str:
        """The backend that a group wraps for tensors on `device_type` ("cpu" or "cuda")."""
        return {**INNER_DEFAULTS, **self.inner}[device_type]

    def inject_on(self, rank: int) -> str:
        """What `inject` has for the process of global rank `rank`, as pg_sdma._C reads it."""
        parts = (part.partition("@") for part in self.inject)
        return ",".join(part for part, _, only in parts if only in ("", str(rank)))

    def agreed(self) -> str:
        """The settings that must match between the ranks of a group, as one line of text."""
        values = vars(self) | {"inner": {**INNER_DEFAULTS, **self.inner}}
        return " ".join(
            f"{variable.name}={_canonical(values[name])}"
            for name, variable in variables().items()
            if variable.agreed
        )


def variables() -> dict[str, Variable]:
    """The declared variables by the name of their field in Settings."""
    return {f.name: f.metadata[_KEY] for f in fields(Settings)}


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings in force. A variable set to the empty string counts as unset.

    Raises ValueError naming the variable, its value and what is allowed. Logs one warning for each
    variable that looks like ours and is not known.
    """
    values = {}
    for name, variable in variables().items():
        text = environ.get(variable.name, "").strip()
        if not text:
            continue
        try:
            values[name] = variable.kind.parse(text)
        except ValueError:
            raise ValueError(
                f"{variable.name}={text!r} is not allowed: give {variable.kind.allowed}"
            ) from None
    for name in environ:
        if name.startswith(f"{PREFIX}_"):
            _warn_unless_known(name)
    return Settings(**values)


@functools.cache
def _warn_unless_known(name: str) -> None:
    known = [variable.name for variable in variables().values()]
    if name in known or name in BUILD_VARIABLES:
        return
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
    logger.warning("%s is no setting of pg_sdma and has no effect; did you mean %s?", name, nearest)


def _canonical(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={value[key]}" for key in sorted(value))
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(value)
    return "default" if value is None else str(value)


def settings_page() -> str:
    """docs/settings.md."""
    rows = [
        (f"`{v.name}`", v.kind.allowed, v.default, "yes" if v.agreed else "", v.doc)
        for v in variables().values()
    ]
    header = ("variable", "value", "default", "same on all ranks", "what it does")
    table = [header, ("---",) * len(header), *rows]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return f"""# Settings

pg_sdma reads environment variables when a process group is made.

- A value that is not allowed raises `ValueError`.
- A `PG_SDMA_*` variable that is not in the table is warned about once.
- Some settings must be the same on all ranks. If they differ, the group uses the wrapped backend
  (the inner) and logs the difference.

Messages go to the Python logger `pg_sdma`.

{lines}
"""


if __name__ == "__main__":
    print(settings_page(), end="")
