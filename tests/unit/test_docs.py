"""What the documentation points to is there: links, headings, and the files that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/standin/ASSUMPTIONS.md"]
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


# A page's names of files: below the project's root, below csrc/, or by a test file's name alone.
FILE = re.compile(r"(?<![\w./<~-])[\w.-]+(?:/[\w.-]+)+(?![\w/*{])|(?<![\w./])test_\w+\.py")
ROOTS = ("csrc", "src", "tests", "docs", "benchmarks", "examples", "tools")
LAYERS = ("engine", "transport", "backend")
OTHER_PEOPLES = ("docs/deepspeed.md", "docs/mori.md", "docs/frameworks.md")  # name others' files


def named_files(text: str) -> list[str]:
    """What `text` names that has to be a file or a folder of this project."""
    found = []
    for name in FILE.findall(text):
        path = name.rstrip(".")
        first = path.partition("/")[0]
        if first in LAYERS and Path(path).suffix in (".h", ".cpp"):
            path = f"csrc/{path}"
        elif first not in ROOTS and not path.startswith("test_"):
            continue
        found.append(path)
    return found


def missing_files(text: str) -> list[str]:
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    return [
        name
        for name in named_files(text)
        if not (ROOT / name).exists() and not ("/" not in name and name in tests)
    ]


@pytest.mark.parametrize(
    "page", [*(page for page in PAGES if page not in OTHER_PEOPLES), "docs/architecture.svg"]
)
def test_files_that_a_page_names_are_there(page: str) -> None:
    assert missing_files((ROOT / page).read_text()) == []


def test_the_pictures_name_files() -> None:
    """Or the test above would prove nothing of them."""
    picture = re.search(
        r"^```\n( torch.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S
    )
    assert picture and len(named_files(picture[1])) > 10
    assert len(named_files((ROOT / "docs" / "architecture.svg").read_text())) >= 3


def test_files_that_sources_name_are_there() -> None:
    """By their whole paths, in comments and messages."""
    whole = re.compile(rf"(?<![\w./<*-])(?:{'|'.join(ROOTS)})/[\w./-]+\.(?:h|cpp|py|md)\b")
    missing = []
    for folder in ("csrc", "src", "benchmarks", "examples", "tools", "tests"):
        for source in sorted((ROOT / folder).rglob("*")):
            if source.suffix not in (".h", ".cpp", ".py", ".pyi") or source == Path(__file__):
                continue
            named = whole.findall(source.read_text())
            missing += [(source.name, name) for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_a_file_that_is_gone_is_noticed() -> None:
    text = "see csrc/backend/gone.h, `transport/gone.h`, `test_gone.py::test_x`, docs/using.md"
    assert missing_files(text) == ["csrc/backend/gone.h", "csrc/transport/gone.h", "test_gone.py"]


def named_tests(page: str) -> set[tuple[str, str]]:
    """The tests that a page names: `test_file.py::test_name`, and names that follow such a one."""
    found = set()
    for line in (ROOT / page).read_text().splitlines():
        file = ""
        for named, test in re.findall(r"`(?:(?:[\w/]*/)?(test_\w+\.py)(?:::)?)?(test_\w+)?`", line):
            file = named or file
            if test and file:
                found.add((file, test))
    return found


@pytest.mark.parametrize("page", ["docs/reliability.md", "docs/amd.md"])
def test_tests_that_a_page_names_are_there(page: str) -> None:
    named = named_tests(page)
    assert len(named) > 4
    paths = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    assert [
        f"{file}::{test}" for file, test in sorted(named) if test not in paths[file].read_text()
    ] == []
