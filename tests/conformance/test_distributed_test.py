"""torch's own DistributedTest, which comes with torch, on sdma groups of CPU tensors.

What passes on gloo must pass on sdma, but for what EXCEPTIONS in cases.py names. That must fail,
and in the way it says, so that the list never outlives its reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import EXCEPTIONS, LARGER, SHORT, all_tests
from suite import TIMEOUT_SECONDS, Suite

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"


@pytest.mark.parametrize("name", SHORT)
def test_passes_on_sdma(suite_with: Callable[[int], Suite], name: str) -> None:
    outcome, _ = suite_with(3).on_sdma(name)
    assert outcome.status == "passed", outcome.text


EVERY_TEST = [(size, name) for size in (2, 3) for name in all_tests()]
EVERY_TEST += [(size, name) for size, names in LARGER.items() for name in names]


@pytest.mark.nightly
@pytest.mark.timeout(4 * TIMEOUT_SECONDS)
@pytest.mark.parametrize(("size", "name"), EVERY_TEST)
def test_passes_as_on_gloo(
    suite_with: Callable[[int], Suite],
    size: int,
    name: str,
    record_property: Callable[[str, Any], None],
) -> None:
    suite = suite_with(size)
    record_property("ranks", size)
    on_gloo = suite.on_gloo(name)
    record_property("skipped on gloo", on_gloo.status == "skipped")
    if on_gloo.status == "skipped":
        pytest.skip(on_gloo.text)
    assert on_gloo.status == "passed", f"fails on gloo as well:\n{on_gloo.text}"
    record_property("passed on gloo", True)

    on_sdma, called = suite.on_sdma(name)
    if name in EXCEPTIONS:
        assert on_sdma.status == "failed", "passes now: strike it from EXCEPTIONS"
        assert EXCEPTIONS[name].message in on_sdma.text, on_sdma.text
        record_property("exceptions", True)
    else:
        assert on_sdma.status == "passed", on_sdma.text
        record_property("passed on sdma", True)
        record_property("called gloo", called == "gloo")


def test_exceptions_are_documented() -> None:
    documented = re.findall(r"^\| `(test_\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(EXCEPTIONS)
