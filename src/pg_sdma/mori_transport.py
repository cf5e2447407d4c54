"""All-gathers by mori (https://github.com/ROCm/mori), AMD's collectives over SDMA copy engines.

`where` tells for which tensors a group may ask for mori. `Offer` is one rank's side of the vote on
it. `MoriGather` then carries that rank's all-gathers. pg_sdma._C calls both. docs/mori.md lists
what mori checks and what it does not, with the sources.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pg_sdma import mori_library
from pg_sdma.mori_library import Library, Refused
from pg_sdma.settings import Settings

NAME = "mori"
WORD = 4  # mori moves whole words of so many bytes, rounding up without a look at the tensors
MOST_AT_ONCE = 1 << 30  # bytes; what is longer does not fit the length field of an SDMA copy packet
# The kernel has one warp a rank in a block of 512 threads; a warp of MI200 and MI300 has 64.
MOST_RANKS = 8
SLACK_MIB = 64  # what mori needs of its heap besides the buffers, generously
PAGE = 4096  # buffers are a whole number of so many bytes

# The group that has mori's SHMEM world in this process: there is one world a process, and ever.
_taken_by = ""


@dataclass(frozen=True)
class Where:
    """What pg_sdma._C is told of mori for one group. Devices are "cpu" and "cuda"."""

    peer_copies_on: tuple[str, ...]
    mori_on: tuple[str, ...]
    no_mori: str  # why mori carries nothing, where it was asked for


def where(settings: Settings, hip: str | None = torch.version.hip) -> Where:
    """On which devices direct calls may be peer copies, and on which mori may carry them.

    `hip` is the ROCm version that torch was built for, or None. CPU tensors are mori's with
    PG_SDMA_MORI_ON_CPU=1 alone.
    """
    possible = ("cuda",) * bool(hip) + ("cpu",) * settings.mori_on_cpu
    if settings.transport == "peer":
        return Where(("cpu", "cuda"), (), "")
    if settings.transport != NAME:
        return Where(("cpu", "cuda"), possible, "")
    no_mori = "" if possible else "PG_SDMA_TRANSPORT=mori, and this torch is not built for ROCm"
    return Where(("cpu",) * (not settings.mori_on_cpu), possible, no_mori)


def chunk_bytes(budget: int, world: int, handles: int) -> int:
    """How many bytes of each shard one of mori's calls moves, so that all buffers fit `budget`.

    Each handle has an input buffer of a chunk and an output buffer of `world`; one more chunk is
    for shards that mori could not read as they lie.
    """
    chunk = budget // (handles * (world + 1) + 1)
    return max(PAGE, min(chunk, MOST_AT_ONCE) // PAGE * PAGE)


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Names the exceptions that have no text, which is all that pg_sdma._C passes on.

    An interrupt is one: it is raised in the first Python code that the main thread comes to.
    """
    try:
        yield
    except BaseException as error:
        if str(error):
            raise
        raise RuntimeError(type(error).__name__) from error


class Offer:
    """One rank's side of the vote on mori: made once a vote comes to it, dropped after it."""

    def __init__(
        self, device: str, group: str, rank: int, world: int, whole_job: bool, budget: int
    ) -> None:
        self._device = torch.device(device)
        self._group = group
        self._rank = rank
        self._world = world
        self._whole_job = whole_job
        self._budget = budget
        self._library: Library | None = None

    @_in_words()
    def prepare(self) -> str:
        """What rank 0 has to tell the others, "" on those; raises Refused where mori cannot be."""
        if not self._whole_job:
            raise Refused(
                "a group of part of the job, and mori has one SHMEM world a process, of all ranks"
            )
        if _taken_by:
            raise Refused(f"mori's one SHMEM world a process is that of group {_taken_by}")
        if self._world > MOST_RANKS:
            raise Refused(f"{self._world} ranks: mori's kernel sends to at most {MOST_RANKS}")
        if mori_library.has_world():
            raise Refused("something else in this process has made mori's one SHMEM world")
        self._library = mori_library.find()
        if self._rank != 0:
            return ""
        with _undisturbed(self._device):
            return bytes(self._library.shmem.shmem_get_unique_id()).hex()

    @_in_words()
    def join(self, word: str) -> MoriGather:
        """Makes the SHMEM world with all ranks, and this rank's buffers in it.

        `word` is what rank 0's prepare() returned. Waits for the other ranks, at most as long as
        mori's MORI_BOOTSTRAP_TIMEOUT. Raises Refused.
        """
        global _taken_by
        assert self._library is not None  # prepare() came first
        _taken_by = self._group  # whatever comes of it: a second attempt would not be a new world
        shmem = self._library.shmem
        # mori would take 4 GiB of the device for it.
        os.environ.setdefault("MORI_SHMEM_HEAP_SIZE", f"{(self._budget >> 20) + SLACK_MIB}M")
        with _undisturbed(self._device):
            status = shmem.shmem_init_attr(
                shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, self._rank, self._world, bytes.fromhex(word)
            )
            if status != 0:
                raise Refused(f"mori's shmem_init_attr returned {status}")
            made = (shmem.shmem_mype(), shmem.shmem_npes())
            if made != (self._rank, self._world):
                raise Refused(
                    f"mori's SHMEM world has this process as {made[0]} of {made[1]}, "
                    f"the group as rank {self._rank} of {self._world}"
                )
            return MoriGather(self._library, self._rank, self._world, self._device, self._budget)


class MoriGather:
    """One rank's all-gathers by mori, on a stream of their own.

    A handle of mori's does not ask whether its peers have copied the last gather out of their
    buffers before it writes into them again. Two handles in turn do: who is at gather n + 2 has
    seen every peer's data of gather n + 1, which a peer sends, on its one stream, behind its copies
    out of gather n's buffer.
    """

    HANDLES = 2

    def __init__(
        self, library: Library, rank: int, world: int, device: torch.device, budget: int
    ) -> None:
        """With all ranks alike. Raises what mori raises where it cannot have its buffers."""
        self.name = NAME
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._world = world
        self._chunk = chunk_bytes(budget, world, self.HANDLES)
        kind = _IntoTensor if library.dtype is not None else _Sdma
        with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
            self._handles = [
                kind(library, rank, world, self._chunk, device) for _ in range(self.HANDLES)
            ]
            self._aligned = torch.empty(self._chunk, dtype=torch.uint8, device=device)
        self._turn = 0

    @_in_words()
    def gather(self, input: torch.Tensor, outputs: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Gathers `input`, uint8 [n], into outputs[r], uint8 [n], of every rank r.

        `outputs` is one tensor [world, n], or as many of their own. The current stream is `stream`.
        Every rank makes the same calls in the same order. Raises RuntimeError.
        """
        for start in range(0, input.numel(), self._chunk):
            shard = input[start : start + self._chunk]
            landed = self._gather_chunk(shard)
            _copy_out(landed, outputs, start)

    def _gather_chunk(self, shard: torch.Tensor) -> torch.Tensor:
        """The shards, uint8 [world, n], in a buffer of mori's."""
        n = shard.numel()
        rounded = -(-n // WORD) * WORD
        # Every rank's is sent with the same length; how it lies is each rank's own affair.
        if n != rounded or shard.data_ptr() % WORD != 0:
            self._aligned[:n].copy_(shard)
            shard = self._aligned[:rounded]
        handle = self._handles[self._turn]
        self._turn = (self._turn + 1) % len(self._handles)
        landed = handle.run(shard, self.stream)
        return landed[: self._world * rounded].view(self._world, rounded)[:, :n]


def _copy_out(
    landed: torch.Tensor, outputs: torch.Tensor | Sequence[torch.Tensor], start: int
) -> None:
    n = landed.size(1)
    if (
        isinstance(outputs, torch.Tensor)
        and landed.shape == outputs.shape
        and landed.is_contiguous()
    ):
        outputs.copy_(landed)
        return
    # Row by row: contiguous bytes are a plain copy, strides would take a kernel.
    for output, row in zip(outputs, landed, strict=True):
        output[start : start + n].copy_(row)


class _Sdma:
    """An AllgatherSdma whose output is left where it lands."""

    def __init__(
        self, library: Library, rank: int, world: int, chunk: int, device: torch.device
    ) -> None:
        self._gather = library.collective(
            my_pe=rank,
            npes=world,
            input_buffer_size=chunk,
            output_buffer_size=world * chunk,
            copy_output_to_user=False,
        )
        # Words: mori counts elements of a dtype that it does not know as if they were bytes.
        landed = self._gather.get_output_transit_buffer(dtype=torch.int32, device=device)
        self._landed = landed.view(torch.uint8)
        if self._landed.numel() < world * chunk:
            raise Refused(f"mori has a buffer of {self._landed.numel()} bytes for {world * chunk}")

    def run(self, shard: torch.Tensor, stream: Any) -> torch.Tensor:
        done = self._gather(
            input_data=shard,
            output_data=self._landed,
            count=shard.numel(),
            stream=stream,
            capturing=True,  # or the host would wait for the peers
        )
        if done is False:
            raise RuntimeError("mori's AllgatherSdma did not start")
        return self._landed


class _IntoTensor:
    """An AllGatherIntoTensor, which tells nobody where its output lands: it copies that out."""

    def __init__(
        self, library: Library, rank: int, world: int, chunk: int, device: torch.device
    ) -> None:
        self._dtype = library.dtype
        self._gather = library.collective(
            my_pe=rank, npes=world, input_buffer_size=chunk, output_buffer_size=world * chunk
        )
        self._landed = torch.empty(world * chunk, dtype=torch.uint8, device=device)

    def run(self, shard: torch.Tensor, stream: Any) -> torch.Tensor:
        done = self._gather(
            input_ptr=shard.data_ptr(),
            output_ptr=self._landed.data_ptr(),
            count=shard.numel(),
            dtype=self._dtype,
            stream=0 if stream is None else stream.cuda_stream,
        )
        if done is False:
            raise RuntimeError("mori's AllGatherIntoTensor did not start")
        return self._landed


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Runs mori on `device`, and takes back what that changes for the calling thread.

    mori sets the thread's current device, and keeps it on the cores that are next to the GPU.
    """
    cores = os.sched_getaffinity(0)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            yield
    finally:
        os.sched_setaffinity(0, cores)
