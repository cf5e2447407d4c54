from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend
from torch.distributed import Store

torch_version: str  # that this was built against, such as "2.13.0+cpu"

def set_log(log: Callable[[str], None]) -> None:
    """Has `log` called with what the groups of this process have to say, one line a call."""

class SdmaBackend(Backend):
    """The backend of one group: all-gathers go direct where they can, all else to its inners."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        inners: Mapping[str, Backend],  # by device type, "cpu" or "cuda"
        settings: Mapping[str, Any],  # the fields of pg_sdma.settings.Settings, and `agreed`
        group_name: str,
        timeout: timedelta,
    ) -> None: ...
    def inner(self, device_type: str) -> Backend:
        """The backend that serves tensors on `device_type`. Raises RuntimeError if none does."""

    def stats(self) -> list[tuple[str, str, str, int, int]]:
        """Rows of (operation, route, reason, calls, output bytes), of this rank."""

    def detach(self) -> None:
        """Ends this rank's part in the direct route; waits for no peer and calls no inner.

        For the exit of a program that did not destroy the group.
        """

    def __getattr__(self, name: str) -> Any:
        """What the inner's Python class has and Backend has not."""
