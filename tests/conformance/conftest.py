"""The ranks of torch's DistributedTest, and the table at the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from suite import Suite


@pytest.fixture(scope="module")
def suite_with() -> Iterator[Callable[[int], Suite]]:
    """`suite_with(size)`: torch's tests with that many ranks, until another size is asked for."""
    suite = Suite(0)

    def get(size: int) -> Suite:
        nonlocal suite
        if suite.size != size:
            suite.close()
            suite = Suite(size)
        return suite

    yield get
    suite.close()


COLUMNS = ("skipped on gloo", "passed on gloo", "passed on sdma", "called gloo", "exceptions")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what the tests recorded: a row for each number of ranks."""
    rows: dict[int, Counter[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if "ranks" in properties and report.when == "call":
                row = rows.setdefault(properties.pop("ranks"), Counter())
                row.update(column for column, true in properties.items() if true)
    if not rows:
        return
    terminalreporter.section("torch's DistributedTest")
    terminalreporter.line("  ".join(("ranks", *COLUMNS)))
    for size, row in sorted(rows.items()):
        cells = [f"{row[column]:{len(column)}}" for column in COLUMNS]
        terminalreporter.line("  ".join((f"{size:5}", *cells)))
    terminalreporter.line(
        "called gloo: of those passed on sdma, what torch keeps to gloo by name; "
        "exceptions: docs/conformance.md"
    )
