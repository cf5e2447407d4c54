"""mori.ccl.AllgatherSdma: rounds byte counts up to 4, cuts short what is over the packet's length,
writes into peers' buffers unasked, and without `capturing` waits on the host for the result."""

from __future__ import annotations

import os
import time
from typing import Optional  # as mori writes it: a test compares

import torch

from mori import cpp as mori_cpp

_TORCH_DTYPE_TO_NUMPY = {torch.uint32: "<u4", torch.int32: "<i4", torch.float32: "<f4"}


def _require_sdma_env(class_name: str) -> None:
    if os.environ.get("MORI_ENABLE_SDMA", "").strip().lower() in ("", "0", "false", "no", "off"):
        raise RuntimeError(f"{class_name} requires MORI_ENABLE_SDMA=1")


class AllgatherSdma:
    host_waits = 0  # of this process: calls that a GPU's host would have spent waiting

    def __init__(
        self,
        my_pe: int,
        npes: int,
        input_buffer_size: Optional[int] = None,  # noqa: UP045
        output_buffer_size: Optional[int] = None,  # noqa: UP045
        transit_buffer_size: Optional[int] = None,  # noqa: UP045
        copy_output_to_user: bool = True,
    ):
        _require_sdma_env("AllgatherSdma")
        if input_buffer_size is None or output_buffer_size is None:
            half = (transit_buffer_size or 512 * 1024 * 1024) // 2
            input_buffer_size = output_buffer_size = half
        self._handle = mori_cpp.Handle(
            my_pe, npes, input_buffer_size, output_buffer_size, copy_output_to_user
        )

    def __call__(
        self, input_data, output_data, count: int, stream=None, capturing: bool = False
    ) -> bool:
        u32_count = (count * input_data.element_size() + 3) // 4
        self._handle.gather(input_data.data_ptr(), output_data.data_ptr(), u32_count)
        if not capturing:
            type(self).host_waits += 1
            time.sleep(1e-3)
        return True

    def get_output_transit_buffer(self, dtype=None, device=None):
        memory, offset, size_bytes = self._handle.output()
        count = size_bytes // torch.tensor([], dtype=dtype).element_size()
        # As many elements as the dtype asks for, in words all the same.
        view = dtype if dtype in _TORCH_DTYPE_TO_NUMPY else torch.uint32
        return torch.frombuffer(memory, dtype=view, count=count, offset=offset)
