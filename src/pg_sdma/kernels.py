"""Gives pg_sdma._C the kernels that it launches, where Triton is installed to compile them."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

_DTYPES = {
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Float": torch.float32,
    "Double": torch.float64,
}


def why_none() -> str:
    """Why this process has no kernels; empty where it has. Does not import Triton."""
    return "" if importlib.util.find_spec("triton") else "no Triton"


def compile_for(device: int, dtype: str, world: int, rank: int, kind: int, aligned: bool) -> Any:
    """A reduction_kernel.Kernel, for pg_sdma._C: see `set_kernels` there.

    None while the current stream captures a graph, into which loading a kernel would break. Raises
    what importing Triton and compiling raise.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    from pg_sdma import reduction_kernel

    return reduction_kernel.compile_kernel(device, _DTYPES[dtype], world, rank, kind, aligned)
