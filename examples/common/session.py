"""Devices, process groups and deterministic kernels of one `torchrun` launch."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel


class Launch:
    """What torchrun gave this process: its ranks, and a store to meet the other processes at.

    Several process groups can follow one another over the one store.
    """

    def __init__(self, device: str) -> None:
        if "LOCAL_RANK" not in os.environ:
            raise SystemExit(
                "start this program with torchrun, for example:\n"
                "    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py"
            )
        self.device = torch.device(device)
        if device == "cuda":
            local_rank = int(os.environ["LOCAL_RANK"])
            self.device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self._store, self.rank, self.world_size = next(dist.rendezvous("env://"))
        self._groups = 0

    @property
    def device_name(self) -> str:
        """As a reader knows it: "CPU", or the GPU's product name."""
        return "CPU" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)

    @contextmanager
    def process_group(self, backend: str) -> Iterator[None]:
        """The default group, over `backend`, for the length of the block."""
        # A store keeps what an earlier group wrote, and a new group would take it for its own.
        store = dist.PrefixStore(f"group{self._groups}", self._store)
        self._groups += 1
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size)
        yield
        # Not in a `finally`: after an error the peers never come to the barrier.
        leave_group(dist.destroy_process_group)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def leave_group(destroy: Callable[[], object]) -> None:
    """Ends the default group with all ranks at once; `destroy` is what destroys it."""
    dist.barrier()
    # FSDP's modules are reference cycles, and a backend's threads may hold their last tensors.
    gc.collect()
    destroy()


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Has every GPU kernel of the block give the same bits each time, attention included."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        # The fused attention kernels add up their gradients in no fixed order.
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
