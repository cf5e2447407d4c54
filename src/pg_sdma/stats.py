"""Which route the operations of a group took, of those that may go direct."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from pg_sdma import _C

# operation -> route -> {"calls": n, "bytes": n}
RouteCounts = dict[str, dict[str, dict[str, int]]]


def stats(group: dist.ProcessGroup | None = None) -> RouteCounts:
    """Calls and bytes of this rank's operations over `group` (the default group if None).

    Counted are the operations that PG_SDMA_OPS names; bytes are those of an all-gather's output
    and of a reduce-scatter's input. The result maps operation, then route, to
    `{"calls": n, "bytes": n}`. A route is "direct", or "inner: " and the reason. A group without an
    sdma backend has none of either.
    """
    counts: RouteCounts = {}
    for backend in sdma_backends(group or c10d._get_default_group()):
        for operation, route, reason, calls, size in backend.stats():
            key = route if route == "direct" else f"{route}: {reason}"
            count = counts.setdefault(operation, {}).setdefault(key, {"calls": 0, "bytes": 0})
            count["calls"] += calls
            count["bytes"] += size
    return counts


def transports(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """What carries the direct calls of `group` (the default group if None), by device type.

    "push" on GPUs, "pull" or "slots" on CPU, or "mori"; "inner: " and the reason where nothing goes
    direct; "no vote yet" before the first call that may. A group without an sdma backend has none.
    """
    found: dict[str, str] = {}
    for backend in sdma_backends(group or c10d._get_default_group()):
        found |= backend.transports()
    return found


def fast_path_share(group: dist.ProcessGroup | None = None) -> float:
    """The part of the bytes of stats(group) that went direct, 0 to 1; NaN where there are none."""
    return direct_share(stats(group))


def direct_share(counts: RouteCounts) -> float:
    """The part of the bytes of `counts` that went direct, 0 to 1; NaN where there are none."""
    routes = [item for by_route in counts.values() for item in by_route.items()]
    total = sum(count["bytes"] for _, count in routes)
    direct = sum(count["bytes"] for route, count in routes if route == "direct")
    return direct / total if total else float("nan")


def sdma_backends(group: dist.ProcessGroup) -> list[_C.SdmaBackend]:
    """The sdma backends of `group`: none, or one, be it for one device type or for both."""
    from pg_sdma import _C

    backends = [_backend(group, device) for device in ("cpu", "cuda")]
    return list({id(b): b for b in backends if isinstance(b, _C.SdmaBackend)}.values())


def _backend(group: dist.ProcessGroup, device: str) -> Any:
    try:
        backend = group._get_backend(torch.device(device))
    except RuntimeError:  # the group has none for this device type
        return None
    while isinstance(backend, c10d._ProcessGroupWrapper):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    return backend
