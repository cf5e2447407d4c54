"""The C++ half of pg_sdma, built against one version of torch."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

from torch._C._distributed_c10d import Backend, Store

torch_version: str
"""The torch.__version__ that this module was built against."""

def set_log(log: Callable[[str, str], object]) -> None:
    """Sets who gets the lines that groups log. Called from any thread.

    `log(line, warning)`: what in the line the user has to be warned of, or nothing.
    """

def set_kernels(
    compile: Callable[[int, str, int, int, int, bool], tuple[int, int, int, int, int] | None],
) -> None:
    """Sets who compiles the kernels of reduce-scatters on GPUs. Called from any thread.

    The arguments are those of pg_sdma.reduction_kernel.compile_kernel, with the dtype by its C++
    name ("Half", "BFloat16", "Float", "Double"), and so is the result. None: not while the current
    stream captures a graph.
    """

def set_mori(make: Callable[[str, str, int, int, bool, int], Any]) -> None:
    """Sets who makes a rank's part in mori's all-gathers. Called from any thread.

    The arguments are those of pg_sdma.mori_transport.Offer, and the result is one.
    """

def _flight_record(rank: int, reason: str) -> str:
    """The records of this process's groups as JSON: see pg_sdma.flight_record."""

def _static_refusal(
    *,
    total_bytes: int,
    tensors: int = 1,
    even: bool = True,
    coalescing: bool = False,
    capturing: bool = False,
    unsupported: str = "",
    sums: bool = False,
    why_no_transport: str = "",
    why_no_sums: str = "",
    min_bytes: int = 0,
    min_sum_bytes: int = 0,
    min_mean_bytes: int = 0,
) -> str:
    """Why a call goes to the inner unnumbered; empty when it may go direct."""

def _landing_shape(slice_bytes: int, most_bytes: int, peers: int) -> tuple[int, int]:
    """How a direct reduce-scatter of GPU tensors lands: (bytes of each peer's slice, landings).

    `slice_bytes`: of one rank's slices of all tensors; `most_bytes`: PG_SDMA_LANDING_BYTES.
    """

def _slot_bytes(world: int, ring: int) -> int:
    """Bytes of a slot of shared memory in a group of CPU tensors; 0 where there are none.

    Slots also need a core for each rank.
    """

@final
class SdmaBackend(Backend):
    """A c10d backend around one inner backend for each device type.

    Names that Backend lacks and the inner has (ProcessGroupNCCL's `options`, `register_mem_pool`)
    are looked up on the accelerator's inner, or the cpu's where there is no other.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        inners: dict[str, Backend],
        settings: dict[str, Any],
        group_name: str,
        timeout: timedelta,
        global_ranks: list[int] = ...,
    ) -> None:
        """Wraps `inners`, a backend of the same rank and size for each device type.

        `settings` has the fields of pg_sdma.settings.Settings, and what a creator knows besides;
        absent ones keep their defaults, and further ones are ignored:
            "agreed": str, has to be equal on all ranks
            "hip": bool, torch's "cuda" is ROCm's
            "whole_job": bool, the group has all ranks of the job
            "no_device_sums": str, why kernels cannot sum on the device, empty where they can
            "tuned": a dictionary for each device type, of which "min_bytes", "min_sum_bytes" and
                "min_mean_bytes" hold where PG_SDMA_MIN_BYTES is not set, and "text" has to be equal
                on all ranks
            "peer_copies_on", "mori_on": lists of device types; "no_mori": str, why none has mori:
                see pg_sdma.mori_transport.where
        `global_ranks` has the default group's rank of each rank, for the flight record.
        Raises ValueError when `inners` is empty or has another rank or size.
        """

    def inner(self, device_type: str) -> Backend:
        """The backend that is wrapped for `device_type`. Raises RuntimeError when there is none."""

    def stats(self) -> list[tuple[str, str, str, int, int]]:
        """Rows of (operation, route, reason, calls, bytes), of all lanes."""

    def transports(self) -> dict[str, str]:
        """What carries the direct calls, by device type: see pg_sdma.transports."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """What the group's set_timeout does."""

    def __getattr__(self, name: str) -> Any: ...

def detach(backends: list[SdmaBackend]) -> None:
    """Ends this rank's part in the transports of all of them, side by side, once what is pending
    there has ended, at the latest by its own deadline. Leaves the inners alone."""
