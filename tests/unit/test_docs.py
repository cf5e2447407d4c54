"""What the documentation points to is there: links, headings, and the files that it names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CHANGELOG.md", "tests/standin/ASSUMPTIONS.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))


def prose(page: str) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The names by which GitHub links to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: str, text: str) -> list[str]:
    """The relative links of `text`, taken as `page`, that lead nowhere."""
    here = (ROOT / page).parent
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = here / name if name else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page: str) -> None:
    assert broken_links(page, prose(page)) == []


def test_a_link_to_nothing_is_noticed() -> None:
    text = "[a](settings.md), [b](gone.md), [c](results.md#versions), [d](results.md#gone), [e](#x)"
    assert broken_links("docs/amd.md", text) == ["gone.md", "results.md#gone", "#x"]
