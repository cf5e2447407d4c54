"""Which way the measured calls went: a benchmark of a path that was not taken shows nothing."""

from __future__ import annotations

from pg_sdma.stats import RouteCounts


def route_since(before: RouteCounts, after: RouteCounts) -> str:
    """The route between two readings; of several, each with its part of the bytes.

    "-" where nothing was counted: the group is not sdma's.
    """
    moved = {
        route: count["bytes"] - before.get(operation, {}).get(route, {}).get("bytes", 0)
        for operation, by_route in after.items()
        for route, count in by_route.items()
    }
    moved = {route: size for route, size in moved.items() if size}
    if len(moved) < 2:
        return next(iter(moved), "-")
    total = sum(moved.values())
    return ", ".join(f"{size / total:.0%} {route}" for route, size in moved.items())
