"""Where the tensors of a soak are, and what its processes own there."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20


class Cpu:
    """Tensors in the host's memory."""

    backend = "cpu:sdma"
    device = torch.device("cpu")
    most_elements = 1 << 17  # of an all-gather's shard
    dtypes = (torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.int16)
    streams: tuple[Any, ...] = (None,)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Makes `stream`, one of `streams` of which the first is the default, the current one."""
        return contextlib.nullcontext()

    def disturb(self) -> None:
        """Does something beside on the current stream and others, at random."""

    def synchronize(self) -> None:
        """Waits for the device."""

    def give_back(self) -> None:
        """Frees what nobody uses, on this rank."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what glibc's arenas keep of freed memory is no leak

    def belongings(self) -> dict[str, int]:
        """What the process owns, after give_back() on all ranks."""
        status = Path("/proc/self/status").read_text()
        # Without pages of files, which are resident or not as the kernel likes.
        own = [line for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem"))]
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "own MB": sum(int(line.split()[1]) for line in own) // 1024,
        }


class Cuda(Cpu):
    """Tensors of the GPU that is this rank's, or that it shares."""

    backend = "cpu:gloo,cuda:sdma"
    most_elements = 1 << 21
    # Of those that the inner, gloo or NCCL, gathers too: a rank may be late.
    dtypes = (torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.float16)

    def __init__(self, rank: int, dice: random.Random) -> None:
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        sys.path.insert(0, str(Path(__file__).parent / "gpu"))
        from noise import Noise

        self._dice = dice
        self._noise = Noise(dice)
        side = (torch.cuda.Stream() for _ in range(3))
        self.streams = (torch.cuda.default_stream(), *side)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def disturb(self) -> None:
        if self._dice.random() < 0.3:
            self._noise()
        if self._dice.random() < 0.01:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def give_back(self) -> None:
        super().give_back()
        torch.cuda.synchronize()
        # Torch counts them as allocated: one for each stream that has multiplied anything.
        torch._C._cuda_clearCublasWorkspaces()
        torch._C._host_emptyCache()  # of pinned memory, which gloo copies by
        torch.cuda.empty_cache()

    def belongings(self) -> dict[str, int]:
        # Peers close what is retired here by threads that look every fifth of a second, and a peer
        # may be stopped for a while.
        time.sleep(2)
        free, total = torch.cuda.mem_get_info()
        return {
            **super().belongings(),
            "allocated MB": torch.cuda.memory_allocated() // MIB,
            "reserved MB": torch.cuda.memory_reserved() // MIB,
            # Of all processes: under MPS the driver does not say whose.
            "device MB": (total - free) // MIB,
        }


def growth(device: str, ranks: int, before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What has grown by more than it may, in words."""
    # Of memory of the process's own: allocators' fragments, which a leak of a few hundred bytes a
    # call exceeds in minutes.
    allowed = {"descriptors": 0, "threads": 0, "own MB": 32}
    if device == "cuda":
        allowed = {
            # The driver opens its devices' files, and starts threads, when it first needs them.
            # What is leaked with each group or export would be dozens.
            "descriptors": 8,
            "threads": 2,
            # Its pools of commands and events, too, grow to the most that was ever under way.
            "own MB": 64,
            # Nothing is alive at either time but a small model and the other work's matrix.
            "allocated MB": 1,
            # Each tensor of that model may hold up a segment of 2 MB of torch's allocator.
            "reserved MB": 16,
            # What the driver takes for code and streams at first use, a rank on the device, as in
            # gpu/test_memory.py. Memory that a peer failed to close shows here alone, in blocks of
            # 2 to 32 MB, of which a minute retires dozens.
            "device MB": 32 * -(-ranks // max(1, torch.cuda.device_count())),
        }
    return [
        f"{name} grew: {before[name]} -> {after[name]}"
        for name, most in allowed.items()
        if after[name] > before[name] + most
    ]
