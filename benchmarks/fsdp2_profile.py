"""What a GPU did during steps, from torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

STEPS = 3
KINDS = {
    "reduce-scatter": ("reducescatter", "reduce_scatter"),
    "sum of a direct reduce-scatter": ("_sum_slices",),
    "all-gather kernel": ("allgather",),
    "peer copy": ("ptop",),
    "GEMM": ("gemm", "cutlass", "nvjet"),
    "attention": ("flash", "fmha"),
    "cast of shards": ("copyfunctor",),  # by FSDP2, before a gather: multi_tensor_apply as well
    "optimizer": ("multi_tensor",),
    "copy-out of a gather": ("split_with_sizes_copy",),
    "copy-in of gradients": ("chunk_cat",),
    "copy": ("memcpy", "memset"),
}


def kind_of(name: str) -> str:
    """The kind of a kernel or copy, by its name."""
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(w in lower for w in words)), "other")


def breakdown(run: Callable[[int], object]) -> dict[str, float]:
    """Milliseconds a step in each kind of kernels and copies, which overlap, of `run(steps)`."""
    found: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(STEPS)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[kind_of(event.name)] += event.time_range.elapsed_us() / STEPS / 1e3
    return dict(found)
