"""Builds the backends that a group wraps, each as torch builds it for a group of its own."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# What DistributedBackendOptions has besides a store and, since torch 2.14, `split_from`. The last
# two are 2.14's as well.
_FIELDS = (
    "group_rank",
    "group_size",
    "timeout",
    "group_id",
    "global_ranks_in_group",
    "process_group",
    "enable_reconfigure",
)


def build_inner(name: str, device: str, opts: Any, pg_options: Any) -> Any:
    """Builds the c10d backend `name` ("gloo", "nccl" or a registered one) for tensors on `device`.

    `opts` is the _DistributedBackendOptions of the sdma group, `pg_options` what the user gave
    with it; neither is changed. Raises ValueError when torch knows no backend of that name, and
    whatever the backend raises (NCCL without a GPU, for one).
    """
    inner_opts = _inner_options(device, opts)
    split_from = None if device == "cpu" else _split_source(opts, device)
    pg_options = copy.copy(pg_options) if hasattr(pg_options, "__copy__") else pg_options
    if hasattr(dist.Backend, "_ensure_backend_registered"):
        dist.Backend._ensure_backend_registered(name)
    plugin = None if name == "sdma" else dist.Backend._plugins.get(name.upper())
    if plugin is not None:  # since torch 2.14, gloo and nccl are plugins as well
        if plugin.extended_api:
            if hasattr(inner_opts, "split_from"):
                inner_opts.split_from = split_from
            return plugin.creator_fn(inner_opts, pg_options)
        return plugin.creator_fn(
            inner_opts.store, inner_opts.group_rank, inner_opts.group_size, inner_opts.timeout
        )
    if name == "gloo":
        return _gloo(inner_opts)
    if name == "nccl":
        return _nccl(inner_opts, pg_options, split_from)
    raise ValueError(
        f"PG_SDMA_INNER wants '{name}' for {device}: torch has no such backend to wrap"
    )


def _inner_options(device: str, opts: Any) -> Any:
    inner = c10d._DistributedBackendOptions()
    for field in _FIELDS:
        if hasattr(opts, field):
            setattr(inner, field, getattr(opts, field))
    # Inner and sdma share one store: a prefix keeps their keys apart.
    inner.store = dist.PrefixStore(f"inner/{device}/", opts.store)
    return inner


def _split_source(opts: Any, device: str) -> Any:
    """The c10d backend to split the inner on `device` from, or None.

    torch splits from the default group where that has a device bound. Since 2.14 it says so in
    `opts`; up to 2.13 it does so for its own backends only, and this is its rule. Where the default
    group is one of ours, its inner is the one to split.
    """
    from pg_sdma import _C

    if hasattr(opts, "split_from"):
        source = opts.split_from
    elif dist.is_initialized() and c10d._get_default_group().bound_device_id:
        source = c10d._get_split_source(c10d._get_default_group())
    else:
        source = None
    return source.inner(device) if isinstance(source, _C.SdmaBackend) else source


def _gloo(opts: Any) -> Any:
    if not dist.is_gloo_available():
        raise RuntimeError("the inner of an sdma group on cpu is gloo, which this torch lacks")
    backend = dist.ProcessGroupGloo(
        opts.store, opts.group_rank, opts.group_size, timeout=opts.timeout
    )
    backend.options.global_ranks_in_group = opts.global_ranks_in_group
    backend.options.group_name = opts.group_id
    backend._set_sequence_number_for_group()
    return backend


def _nccl(opts: Any, pg_options: Any, split_from: Any) -> Any:
    if not dist.is_nccl_available():
        raise RuntimeError("the inner of an sdma group on cuda is nccl, which this torch lacks")
    if pg_options is None:
        pg_options = dist.ProcessGroupNCCL.Options()
        pg_options.is_high_priority_stream = False
    elif not isinstance(pg_options, dist.ProcessGroupNCCL.Options):
        raise TypeError(
            "pg_options of an sdma group are those of its inner: expected "
            f"ProcessGroupNCCL.Options or None, got {type(pg_options).__qualname__}"
        )
    elif pg_options._timeout != opts.timeout:
        warnings.warn(
            f"pg_options ask for a timeout of {pg_options._timeout}, the group has {opts.timeout} "
            "from the argument `timeout` or its default: that one is used",
            stacklevel=2,
        )
    pg_options._timeout = opts.timeout
    if split_from is not None:
        pg_options.split_from = split_from
        pg_options.split_color = c10d._process_group_color(opts.global_ranks_in_group)
    pg_options.global_ranks_in_group = opts.global_ranks_in_group
    pg_options.group_name = opts.group_id
    backend = dist.ProcessGroupNCCL(opts.store, opts.group_rank, opts.group_size, pg_options)
    backend._set_sequence_number_for_group()
    return backend
