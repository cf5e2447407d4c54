"""The programs that notice planted faults, with the arguments of their runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A program of tests/standin or tests/cpp, with the arguments of each of its runs.

    It succeeds where every run has exit code `rc` and prints something that `says` matches. `env`:
    NAME=value, by spaces. `library`: whether one of tests/cpp needs the sources of csrc.
    """

    name: str
    runs: tuple[str, ...]
    rc: int = 0
    says: str = ""
    env: str = ""
    library: bool = False


AGREE = Program("explore_agree", ("2 3 1 0 2", "2 3 1 1 2"))
STAGED = Program("explore_schedules", ("staged 2 2 300 1", "staged 3 4 300 1"), library=True)
LATE = Program("explore_schedules", ("late 2 8 300 1", "late 3 8 300 1"), library=True)
ARRIVAL = Program("explore_arrival", ("2 5 1 2", "3 2 1 1"))
WAITS = Program("check_wait_policy", ("",), library=True)
TICKETS = Program("check_tickets", ("",), library=True)
PEERS = Program("check_peers", ("",), library=True)
MAKINGS = Program("stress_makings", ("2 200 0", "3 200 1"), library=True)
PATIENCE = Program("patience", ("{driver} {folder}",))
STREAMS = Program("stress", ("{driver} {folder} 3 20 0 60000000 3",), env="STANDIN_DELAY_US=200")
LATE_STREAMS = Program(
    "stress", ("{driver} {folder} 3 20 0 60000000 4 late",), env="STANDIN_DELAY_US=200"
)
SUMS = Program(
    "reductions", ("{driver} {folder} 3 20 0 4096 60000000 7",), env="STANDIN_DELAY_US=300"
)
MANY_OUTPUTS = Program("outputs", ("{driver} {folder} 2 1000 4096",), env="STANDIN_DEVICES=2")
MISMATCH = Program(
    "late", ("{driver} {folder} mismatch",), rc=1, says="pg_sdma: rank 1: .*Rank 1: gather of 1"
)
LEFT = Program(
    "leaving",
    ("{driver} {folder} left",),
    says=r"rank 0: signal 6\nrank 1: exit code 0\n(.*\n)*.*rank 1 has destroyed the group",
)


def late(*cases: str) -> Program:
    return Program("late", tuple(f"{{driver}} {{folder}} {case}" for case in cases))


def closing(case: str) -> Program:
    return Program("closing", (f"{{driver}} {{folder}} {case}",))


def check(name: str) -> Program:
    return Program("checks", (f"{{driver}} {name}",))


def leaving(case: str) -> Program:
    ended = r"rank 0: exit code 0\nrank 1: exit code 0"
    return Program("leaving", (f"{{driver}} {{folder}} {case}",), says=ended)
