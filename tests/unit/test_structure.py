"""The plan of the house: no circle of files, and no room that knows what it should not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
SRC = ROOT / "src"

Graph = dict[str, set[str]]


def includes() -> Graph:
    graph: Graph = {}
    for file in sorted([*CSRC.rglob("*.h"), *CSRC.rglob("*.cpp")]):
        named = re.findall(r'^#include "(.+)"', file.read_text(), re.M)
        graph[str(file.relative_to(CSRC))] = set(named)
    return graph


def is_for_types_alone(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imported(nodes: Iterable[ast.stmt], package: list[str]) -> Iterable[str]:
    """What is imported while a module is, not what its functions import later."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)
        elif isinstance(node, (ast.If, ast.Try)) and not is_for_types_alone(node):
            yield from imported(node.body, package)


def imports() -> Graph:
    files = {}
    for file in sorted(SRC.rglob("*.py")):
        parts = list(file.relative_to(SRC).with_suffix("").parts)
        package = parts[:-1]
        if parts[-1] == "__init__":
            parts = package
        files[".".join(parts)] = (file, package)
    return {
        name: {
            found
            for found in imported(ast.parse(file.read_text()).body, package)
            if found in files and found != name and not name.startswith(found + ".")
        }
        for name, (file, package) in files.items()
    }


def circle_in(graph: Graph) -> list[str]:
    """Some circle of the graph, empty where there is none."""
    done: set[str] = set()

    def visit(node: str, way: list[str]) -> list[str]:
        if node in way:
            return way[way.index(node) :]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if circle := visit(other, [*way, node]):
                return circle
        done.add(node)
        return []

    return next((circle for node in graph if (circle := visit(node, []))), [])


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


@pytest.mark.parametrize("graph", [includes(), imports()], ids=["csrc", "src"])
def test_no_file_includes_itself_by_way_of_others(graph: Graph) -> None:
    assert len(graph) > 30
    assert sum(map(len, graph.values())) > 50
    assert circle_in(graph) == []


ROOMS = ["engine", "transport", "backend"]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_know_only_those_below(room: str) -> None:
    above = ROOMS[ROOMS.index(room) + 1 :]
    wrong = [
        (file, other)
        for file, others in includes().items()
        for other in others
        if file.startswith(f"{room}/") and other.split("/")[0] in above
    ]
    assert wrong == []


@pytest.mark.parametrize("room", ROOMS[:2])
def test_engines_and_transport_know_no_torch(room: str) -> None:
    for file in (CSRC / room).rglob("*.*"):
        assert not re.search(r"#include <(torch|ATen|c10|pybind11)/", file.read_text()), file


def test_schedules_know_no_clock_and_wait_for_nothing() -> None:
    for file in (CSRC / "transport/schedule").iterdir():
        text = file.read_text()
        assert not re.search(r"Clock::now|sleep_for|#include \"transport/health", text), file
