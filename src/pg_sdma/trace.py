"""The flight record: what the groups of this process did last, and how far their ranks are.

A record is a plain dictionary. A broken group writes the same to PG_SDMA_TRACE_FILE.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypedDict

import torch.distributed as dist


class Collective(TypedDict):
    """One collective of one lane. Times are Unix times in nanoseconds, 0 where it is not known."""

    id: int
    """1, 2, 3, ... within the lane, the same on all ranks where their calls are."""
    operation: str
    route: str
    """"direct", "inner", or "" while that is undecided."""
    reason: str
    """Why the inner carries it; "in order of arrival" of a direct one for which ranks were late."""
    number: int
    """Its (last) number on the direct route; 0 where it never took one."""
    state: str
    """scheduled, started, enqueued (direct, on a stream), completed, failed (it raised), or issued:
    given to the inner, which knows more."""
    async_op: bool
    tensors: int
    dtype: str
    input_elements: int
    output_elements: int
    stream: int
    """The caller's stream, as the driver knows it; 0 on CPU."""
    timeout_ms: int
    created_ns: int
    started_ns: int
    decided_ns: int
    """When the ranks had agreed on its route, or that of its last part: from the start to here the
    host published and waited for its peers."""
    issued_ns: int
    """When it was enqueued, handed to the inner, or over."""
    ended_ns: int


class Rank(TypedDict):
    """How far one rank of a lane is on the direct route, in numbers of operations."""

    rank: int
    called: int
    started: int
    finished: int
    filled: int
    """Waves of bytes that it has put into its slots; 0 in a group without slots."""
    others: int
    """Collectives that it has given to the inner."""
    other: str
    """The last of these."""
    departed: bool
    """It has destroyed the group."""
    ended: bool
    """Its process has ended."""


class Lane(TypedDict):
    """A group's half for one device type."""

    group: str
    device: str
    inner: str
    rank: int
    global_ranks: list[int]
    fault: str
    """Why the group is broken; "" while it is not."""
    capacity: int
    recorded: int
    number: int
    """The last number that this rank has taken on the direct route."""
    ranks: list[Rank]
    """Empty for a group without a direct route."""
    entries: list[Collective]


class FlightRecord(TypedDict):
    """All lanes of one process."""

    version: int
    rank: int
    pid: int
    time_ns: int
    reason: str
    """Why it was written; "" on demand."""
    lanes: list[Lane]


def flight_record() -> FlightRecord:
    """What the groups of this process did last. From any thread, also while a call hangs.

    The last PG_SDMA_TRACE_ENTRIES collectives of each group that was not destroyed, oldest first,
    and each rank's progress. Point-to-point operations are not recorded.
    """
    from pg_sdma import _C

    rank = dist.get_rank() if dist.is_initialized() else 0
    record: FlightRecord = json.loads(_C._flight_record(rank, ""))
    return record


def read_flight_record(path: str | Path) -> FlightRecord:
    """A record from a file that a broken group wrote. Raises ValueError when it is not one."""
    record = json.loads(Path(path).read_text())
    if not isinstance(record, dict) or record.get("version") != 1 or "lanes" not in record:
        raise ValueError(f"{path} is not a flight record of this version of pg_sdma")
    typed: FlightRecord = record  # type: ignore[assignment]
    return typed


# c10d's virtuals, where torch's flight recorder has another name for the operation.
_NAMES_OF_TORCH = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "allreduce": "all_reduce",
    "allreduce_sparse": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "monitoredBarrier": "barrier",
    "allgather": "all_gather",
    "_allgather_base": "_all_gather_base",
    "allgather_coalesced": "ALLGATHER_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "gather_into_tensor": "gather",
}
_STATES_OF_TORCH = {
    "scheduled": "scheduled",
    "started": "started",
    "enqueued": "started",
    "issued": "scheduled",
    "failed": "started",
    "completed": "completed",
}


def to_torch(record: FlightRecord) -> dict[str, Any]:
    """The record as torch's own flight recorder dumps one, which `torchfrtrace` reads pickled.

    Sizes are flat (numbers of elements), and there are no stack frames. Lanes of one group are
    groups of their own there, named "<group>/<device>".
    """
    entries: list[dict[str, Any]] = []
    config, status = {}, {}
    for lane in record["lanes"]:
        name = f"{lane['group']}/{lane['device']}"
        ranks = lane["global_ranks"] or list(range(len(lane["ranks"])))
        config[name] = {"name": name, "desc": "sdma", "ranks": json.dumps(ranks)}
        last = {"scheduled": -1, "started": -1, "completed": -1}
        for entry in lane["entries"]:
            state = _STATES_OF_TORCH[entry["state"]]
            last["scheduled"] = entry["id"]
            if state != "scheduled":
                last["started"] = entry["id"]
            if state == "completed":
                last["completed"] = entry["id"]
            entries.append(_entry_of_torch(entry, name, state))
        status[name] = {
            "last_enqueued_collective": last["scheduled"],
            "last_started_collective": last["started"],
            "last_completed_collective": last["completed"],
        }
    return {"version": "2.10", "entries": entries, "pg_config": config, "pg_status": status}


def _entry_of_torch(entry: Collective, name: str, state: str) -> dict[str, Any]:
    operation = _NAMES_OF_TORCH.get(entry["operation"], entry["operation"])
    dtypes = [entry["dtype"]] if entry["tensors"] else []
    duration = entry["ended_ns"] - entry["started_ns"] if entry["ended_ns"] else math.nan
    return {
        "frames": [],
        "record_id": entry["id"],
        "pg_id": 0,
        "process_group": (name, "sdma"),
        "collective_seq_id": entry["id"],
        "p2p_seq_id": 0,
        "op_id": entry["id"],
        # Whatever the inner: the analyzer of torch 2.11 knows no other library.
        "profiling_name": f"nccl:{operation}",
        "time_created_ns": entry["created_ns"],
        "duration_ms": duration / 1e6,
        "input_sizes": [[entry["input_elements"]]] if entry["tensors"] else [],
        "input_dtypes": dtypes,
        "output_sizes": [[entry["output_elements"]]] if entry["tensors"] else [],
        "output_dtypes": dtypes,
        "state": state,
        "time_discovered_started_ns": entry["started_ns"] or None,
        "time_discovered_completed_ns": entry["ended_ns"] or None,
        "retired": state == "completed",
        "timeout_ms": entry["timeout_ms"],
        "is_p2p": False,
    }
