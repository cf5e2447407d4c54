"""Which route the measured calls took: a benchmark of a route that was not taken shows nothing."""

from __future__ import annotations

from pg_sdma.stats import RouteCounts


def route_since(before: RouteCounts, after: RouteCounts) -> str:
    """The route between two readings; of several, each with its part of the bytes.

    "-" where nothing was counted: the group is not sdma's.
    """
    moved = _moved(before, after)
    if len(moved) < 2:
        return next(iter(moved), "-")
    total = sum(moved.values())
    return ", ".join(f"{size / total:.0%} {route}" for route, size in moved.items())


def direct_since(before: RouteCounts, after: RouteCounts) -> float | None:
    """The part of the bytes between two readings that went direct, 0 to 1; None where none did."""
    moved = _moved(before, after)
    return moved.get("direct", 0) / sum(moved.values()) if moved else None


def _moved(before: RouteCounts, after: RouteCounts) -> dict[str, int]:
    """Bytes by route between two readings, of the routes that had any."""
    moved = {
        route: count["bytes"] - before.get(operation, {}).get(route, {}).get("bytes", 0)
        for operation, by_route in after.items()
        for route, count in by_route.items()
    }
    return {route: size for route, size in moved.items() if size}
