"""Bounds measured on a machine: from which size on the calls of a group go direct there.

`pg-sdma tune` measures and writes them; a group that is made reads them, where PG_SDMA_MIN_BYTES
does not say otherwise. The file is JSON:

    {"version": 1, "entries": [{
      "host": "node7", "device": "cuda", "device_name": "NVIDIA H200", "ranks": 2,
      "inner": "nccl", "transport": "auto",
      "torch": "2.13.0+cu130", "driver": "580.95.05", "pg_sdma": "0.1.0",
      "made": "2026-01-31T12:00:00+00:00",
      "bounds": {"all_gather": 16777216, "coalesced": 16777216, "reduce_scatter": "never"}
    }]}

An entry is of the groups that have its first six values. It is stale, and ignored with a warning,
where one of the three after them is another now.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import pg_sdma
from pg_sdma import machine
from pg_sdma.settings import Settings

logger = logging.getLogger("pg_sdma")

VERSION = 1
OFF = "off"
NEVER = "never"
# What a bound is called in the file -> in pg_sdma._C. All are bytes: of an all-gather's output, of
# the mean over the outputs of a coalesced one, of a reduce-scatter's input.
BOUNDS = {
    "all_gather": "min_bytes",
    "coalesced": "min_mean_bytes",
    "reduce_scatter": "min_sum_bytes",
}
LARGEST = 2**63 - 1  # no call has so many bytes
SMALL = 4096  # bytes of a call whose time is that of an empty one

_KEY = ("host", "device", "device_name", "ranks", "inner", "transport")
_AGES_WITH = ("torch", "driver", "pg_sdma")


class TuningError(Exception):
    """A tuning file that cannot be used; the message says why."""


@dataclass(frozen=True)
class Entry:
    """What was measured for groups of one kind."""

    host: str
    device: str  # "cpu" or "cuda"
    device_name: str
    ranks: int
    inner: str
    transport: str  # PG_SDMA_TRANSPORT
    torch: str
    driver: str
    pg_sdma: str
    made: str  # ISO 8601
    bounds: Mapping[str, int | str]  # bytes or NEVER, of those of BOUNDS that were measured

    def of_same_groups(self, other: Entry) -> bool:
        return all(getattr(self, name) == getattr(other, name) for name in _KEY)

    def in_words(self) -> str:
        """The bounds, as one line of text."""
        return ",".join(f"{name}:{self.bounds[name]}" for name in BOUNDS if name in self.bounds)


@dataclass(frozen=True)
class Found:
    """What a group finds in a tuning file, or why it finds nothing."""

    path: Path | None  # None: no file is looked for
    entry: Entry | None
    why_none: str = ""
    ignored: bool = False  # there is a file or an entry, and it may not be used


def default_path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """`pg_sdma/tuning.json` in the XDG configuration directory; None without a home directory."""
    configured = Path(environ.get("XDG_CONFIG_HOME", ""))
    if not configured.is_absolute():  # as the XDG specification has it
        home = environ.get("HOME", "")
        if not home:
            return None
        configured = Path(home) / ".config"
    return configured / "pg_sdma" / "tuning.json"


def path_of(settings: Settings) -> Path | None:
    """The tuning file that `settings` name; None where there is to be none."""
    if settings.tuning == OFF:
        return None
    return Path(settings.tuning) if settings.tuning else default_path()


def entry_here(
    settings: Settings, device: str, ranks: int, bounds: Mapping[str, int | str], made: str = ""
) -> Entry:
    """An entry for groups of `ranks` ranks on this machine's `device` ("cpu" or "cuda")."""
    return Entry(
        host=machine.host(),
        device=device,
        device_name=machine.device_name(device),
        ranks=ranks,
        inner=settings.inner_backend(device),
        transport=settings.transport,
        torch=str(torch.__version__),
        driver=machine.driver(device),
        pg_sdma=pg_sdma.__version__,
        made=made,
        bounds=bounds,
    )


def look_up(settings: Settings, device: str, ranks: int) -> Found:
    """What a group of `ranks` ranks on `device` ("cpu" or "cuda") is to use. Raises nothing."""
    if settings.min_bytes is not None:
        return Found(None, None, "PG_SDMA_MIN_BYTES is set")
    path = path_of(settings)
    if path is None:
        return Found(None, None, "PG_SDMA_TUNING=off" if settings.tuning else "no home directory")
    try:
        entries = read(path)
    except FileNotFoundError:
        return Found(path, None, "there is no such file", ignored=settings.tuning is not None)
    except TuningError as error:
        return Found(path, None, str(error), ignored=True)
    # The device's name last: asking for it initialises CUDA.
    of_here = [e for e in entries if (e.host, e.device, e.ranks) == (machine.host(), device, ranks)]
    try:
        here = entry_here(settings, device, ranks, {}) if of_here else None
    except (RuntimeError, AssertionError) as error:  # torch's CUDA, in a forked process for one
        return Found(path, None, f"what {device} is here cannot be told ({error})", ignored=True)
    entry = next((e for e in of_here if here and e.of_same_groups(here)), None)
    if here is None or entry is None:
        what = f"{ranks} ranks on {device} of {machine.host()}"
        if here is not None:
            what += f" ({here.device_name}, {here.inner}, PG_SDMA_TRANSPORT={here.transport})"
        return Found(path, None, f"no entry for {what}")
    for name in _AGES_WITH:
        measured, now = getattr(entry, name), getattr(here, name)
        if measured != now:
            why = f"stale: measured with {name} {measured}, this is {now}"
            return Found(path, None, f"the entry for {ranks} ranks on {device} is {why}", True)
    return Found(path, entry)


def bounds_for(settings: Settings, devices: Iterable[str], ranks: int) -> dict[str, dict[str, Any]]:
    """The key "tuned" of what pg_sdma._C.SdmaBackend is given.

    `devices` are the device types of the group. Logs one warning for a file, or an entry of it,
    that is ignored.
    """
    tuned: dict[str, dict[str, Any]] = {}
    if not settings.enabled:
        return tuned
    for device in devices:
        found = look_up(settings, device, ranks)
        if found.ignored:
            _warn(str(found.path), found.why_none)
        if found.entry is not None:
            bounds = found.entry.bounds
            tuned[device] = {
                BOUNDS[name]: LARGEST if bound == NEVER else bound for name, bound in bounds.items()
            } | {"text": f" tuned={found.entry.in_words()}"}
    return tuned


@functools.cache
def _warn(path: str, why: str) -> None:
    logger.warning(
        "the tuning file %s is ignored: %s. `pg-sdma tune` measures anew; PG_SDMA_TUNING=off does "
        "without",
        path,
        why,
    )


def read(path: Path) -> list[Entry]:
    """The entries of `path`. Raises FileNotFoundError, and TuningError where it is not usable."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise TuningError("it cannot be read (it is no regular file)")
        text = path.read_text()
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise TuningError(f"it cannot be read ({error})") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TuningError(f"it is no JSON ({error})") from None
    if not isinstance(content, dict) or "version" not in content:
        raise TuningError("it has no version")
    if content["version"] != VERSION:
        raise TuningError(f"it has version {content['version']!r}, this pg_sdma reads {VERSION}")
    entries = content.get("entries")
    if not isinstance(entries, list):
        raise TuningError("it has no list of entries")
    return [_entry(i, entry) for i, entry in enumerate(entries)]


def write(path: Path, entry: Entry) -> None:
    """Adds `entry` to the file, in place of an older one for the same groups.

    What is there and cannot be used is replaced. Other processes see the old file or the new one,
    nothing between, and of several that write at the same time every entry is kept, where the file
    system has locks. Who may read the file stays as it was. Raises OSError.
    """
    path = path.resolve()  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        try:
            kept = [old for old in read(path) if not old.of_same_groups(entry)]
        except (FileNotFoundError, TuningError):
            kept = []
        content = {"version": VERSION, "entries": [asdict(e) for e in (*kept, entry)]}
        descriptor, partial = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(file.fileno(), _mode(path))
                json.dump(content, file, indent=1)
                file.write("\n")
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keeps other writers of `path` out, by a lock on a file beside it, which stays."""
    with open(path.with_name(f".{path.name}.lock"), "a") as lock:
        # Network file systems may have none: then the last writer wins.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _mode(path: Path) -> int:
    """The permissions of `path`, or those that a new file gets."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        mask = os.umask(0o077)
        os.umask(mask)
        return 0o666 & ~mask


def bound(sizes: Sequence[tuple[int, bool]]) -> int | str | None:
    """The bound that measured sizes give, in bytes.

    `sizes` are (bytes, whether the direct route is good enough there), by growing bytes. The bound
    is the smallest size from which on it always is: NEVER where the largest measured is none. Where
    the smallest is one it is 0 if that has SMALL bytes or less, and else None: the bound lies below
    what was measured.
    """
    found: int | str | None = NEVER
    for i, (size, good) in reversed(list(enumerate(sizes))):
        if not good:
            break
        found = size if i > 0 else 0 if size <= SMALL else None
    return found


def _entry(index: int, value: Any) -> Entry:
    def need(good: bool, what: str) -> None:
        if not good:
            raise TuningError(f"entry {index} of it {what}")

    need(isinstance(value, dict), "is no object")
    names = [f.name for f in fields(Entry)]
    for name in names:
        need(name in value, f"has no {name}")
    for name in names:
        if name not in ("ranks", "bounds"):
            need(isinstance(value[name], str), f"has {name} {value[name]!r}, not a text")
    need(_is_integer(value["ranks"], 1), f"has ranks {value['ranks']!r}, not an integer from 1")
    bounds = value["bounds"]
    need(isinstance(bounds, dict), "has bounds that are no object")
    for name, size in bounds.items():
        need(name in BOUNDS, f"has a bound for {name!r}, none of {', '.join(BOUNDS)}")
        need(
            size == NEVER or _is_integer(size, 0),
            f"has the bound {size!r} for {name}, neither bytes nor {NEVER!r}",
        )
    return Entry(**{name: value[name] for name in names})


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST
