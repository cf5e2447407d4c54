"""What it costs that an operation goes through sdma to the inner. Prints a table.

    python benchmarks/delegation.py

The inner is tests/cpp/null_inner.cpp, whose operations return at once. Each operation is called on
the inner itself and on an SdmaBackend around it, in turn, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.utils.cpp_extension import load

from pg_sdma import _extension

ROOT = Path(__file__).parents[1]


def calls(backend: Any) -> dict[str, Callable[[], Any]]:
    x, y = torch.zeros(8), torch.zeros(8)
    list_of_x, reduce, scatter = [x], c10d.AllreduceOptions(), c10d.ReduceScatterOptions()
    root, barrier = c10d.BroadcastOptions(), c10d.BarrierOptions()
    return {
        "allreduce": lambda: backend.allreduce(list_of_x, reduce),
        "reduce_scatter": lambda: backend._reduce_scatter_base(y, x, scatter),
        "broadcast": lambda: backend.broadcast(list_of_x, root),
        "send": lambda: backend.send(list_of_x, 0, 0),
        "barrier": lambda: backend.barrier(barrier),
    }


def seconds_a_call(call: Callable[[], Any], batch: int) -> float:
    start = time.perf_counter()
    for _ in range(batch):
        call()
    return (time.perf_counter() - start) / batch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--batch", type=int, default=100, help="calls timed together")
    args = parser.parse_args()

    null_inner = load("null_inner", [str(ROOT / "tests/cpp/null_inner.cpp")], ["-std=c++20", "-O2"])
    inner = null_inner.NullInner(0, 1)
    sdma = _extension.load().SdmaBackend(
        dist.HashStore(), 0, 1, {"cpu": inner}, {}, "delegation", timedelta(seconds=60)
    )
    direct, delegated = calls(inner), calls(sdma)
    print(f"torch {torch.__version__}, median of {args.rounds} x {args.batch} calls from Python")
    print(f"{'operation':16} {'inner':>9} {'sdma':>9} {'cost':>9}   (us)")
    for name in direct:
        times: dict[str, list[float]] = {"inner": [], "sdma": []}
        for _ in range(args.rounds):
            times["inner"].append(seconds_a_call(direct[name], args.batch))
            times["sdma"].append(seconds_a_call(delegated[name], args.batch))
        inner_us, sdma_us = (statistics.median(t) * 1e6 for t in times.values())
        print(f"{name:16} {inner_us:9.3f} {sdma_us:9.3f} {sdma_us - inner_us:9.3f}")


if __name__ == "__main__":
    main()
