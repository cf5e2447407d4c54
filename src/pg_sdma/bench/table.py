"""The columns of nccl-tests, and beside them those of the backend that is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pg_sdma.bench.measure import Times
from pg_sdma.bench.operation import Operation
from pg_sdma.setting_kinds import parse_bytes


def parse_size(text: str) -> int:
    """As setting_kinds.parse_bytes, of one byte or more."""
    if (size := parse_bytes(text)) < 1:
        raise ValueError(f"{text!r} is no size: give one byte or more")
    return size


def sizes(begin: int, end: int, factor: int) -> list[int]:
    """`begin`, `begin * factor` and so on, up to `end`, in bytes."""
    found = []
    while begin <= end:
        found.append(begin)
        begin *= factor
    return found


@dataclass(frozen=True)
class Row:
    """One line: a collective of one size, in place or not, over both backends."""

    size: int  # bytes of all ranks' shards
    count: int  # elements of one shard
    type: str
    redop: str
    place: str  # "out" of place or "in" place
    ranks: int
    times: Times
    vs: Times | None  # of the backend that is compared with
    wrong: int | None  # elements over all ranks; None: not checked
    vs_wrong: int | None
    route: str
    direct: float | None  # part of the bytes, 0 to 1; None where no route is counted

    @property
    def seconds(self) -> float:
        """What the bandwidths are of: the device's time or, where that is unknown, the host's."""
        return _seconds(self.times)

    @property
    def algbw(self) -> float:
        """GB/s (10^9) of what a rank gathers, or gives to a reduction."""
        return self.size / self.seconds / 1e9

    @property
    def busbw(self) -> float:
        """GB/s (10^9) that have to arrive at a rank: the own part is there already."""
        return self.algbw * (self.ranks - 1) / self.ranks

    @property
    def vs_seconds(self) -> float | None:
        return None if self.vs is None else _seconds(self.vs)

    @property
    def vs_busbw(self) -> float | None:
        return None if self.vs_seconds is None else self.busbw * self.seconds / self.vs_seconds

    @property
    def ratio(self) -> float | None:
        """Time of the other backend over ours: above 1 we are faster."""
        return None if self.vs_seconds is None else self.vs_seconds / self.seconds

    @property
    def wall_ratio(self) -> float | None:
        if self.vs is None or self.vs.wall is None or self.times.wall is None:
            return None
        return self.vs.wall / self.times.wall

    def as_json(self) -> dict[str, Any]:
        derived = ("seconds", "vs_seconds", "algbw", "busbw", "vs_busbw", "ratio", "wall_ratio")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def _seconds(times: Times) -> float:
    seconds = times.wall if times.time is None else times.time
    assert seconds is not None
    return seconds


@dataclass(frozen=True)
class Column:
    title: str
    unit: str
    width: int
    cell: Callable[[Row], str]
    meaning: str


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.2f}"


def _time(times: Times | None) -> str:
    return _microseconds(None if times is None else times.time)


def _wall(times: Times | None) -> str:
    return _microseconds(None if times is None else times.wall)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _integer(value: int | None) -> str:
    return "N/A" if value is None else str(value)


def columns(device: str, backends: Sequence[str], operation: Operation) -> list[Column]:
    """The columns for `device` ("cpu" or "cuda") and one backend, or two to compare."""
    whole, shard = operation.whole, operation.shard
    backend, vs = (*backends, None)[:2]
    timed = (
        "of a call on the device, behind a held stream: the host's cost is left out"
        if device == "cuda"
        else "of a call"
    )
    found = [
        Column("size", "(B)", 12, lambda r: str(r.size), f"{whole} of one rank, all ranks' shares"),
        Column("count", "(elements)", 12, lambda r: str(r.count), f"{shard} of one rank, a tensor"),
        Column("type", "", 10, lambda r: r.type, "of the elements"),
        Column("redop", "", 6, lambda r: r.redop, "as in nccl-tests"),
        Column("root", "", 5, lambda r: "-1", "as in nccl-tests"),
        Column("place", "", 6, lambda r: r.place, f"in: the {shard} lies in the {whole}"),
        Column("time", "(us)", 10, lambda r: _time(r.times), f"{backend}, {timed}"),
        Column(
            "algbw",
            "(GB/s)",
            8,
            lambda r: _number(r.algbw),
            "size / time, or / wall where there is no time",
        ),
        Column("busbw", "(GB/s)", 8, lambda r: _number(r.busbw), "algbw * (n - 1) / n, n ranks"),
        Column("#wrong", "", 7, lambda r: _integer(r.wrong), "elements, over all ranks"),
    ]
    if vs:
        found += [
            Column("vs", "(us)", 10, lambda r: _time(r.vs), f"{vs}, timed alike"),
            Column("ratio", "", 7, lambda r: _number(r.ratio), "vs / time: above 1 is faster"),
        ]
    if device == "cuda":
        wall = f"{backend}, a call as the host sees it: calls and a synchronise, by their number"
        found.append(Column("wall", "(us)", 10, lambda r: _wall(r.times), wall))
    if device == "cuda" and vs:
        found += [
            Column(
                "vswall",
                "(us)",
                10,
                lambda r: _wall(r.vs),
                f"{vs}, likewise",
            ),
            Column("ratio", "", 7, lambda r: _number(r.wall_ratio), "vswall / wall"),
        ]
    return [*found, Column("  route", "", 0, lambda r: f"  {r.route}", f"that {backend} took")]


def explanation(shown: list[Column]) -> list[str]:
    """What each column means, and how times are taken from many calls and ranks."""
    lines = [f"{c.title.strip():>7}  {c.meaning}" for c in shown]
    times = "times: the mean over the ranks of each call, of that the median over the calls"
    return [f"# {line}" for line in (*lines, times)]


def heading(shown: list[Column]) -> list[str]:
    titles = "".join(column.title.rjust(column.width) for column in shown)
    units = "".join(column.unit.rjust(column.width) for column in shown)
    return [f"#{titles}".rstrip(), f"#{units}".rstrip()]


def line(row: Row, shown: list[Column]) -> str:
    return " " + "".join(column.cell(row).rjust(column.width) for column in shown)
