"""Creates the backend of one group: what torch calls for the name "sdma"."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import uuid
from collections.abc import Container, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from pg_sdma import _extension, kernels, mori_transport, tuning
from pg_sdma._inner import build_inner
from pg_sdma.settings import read_settings
from pg_sdma.stats import sdma_backends


def create(opts: Any, pg_options: Any = None) -> Any:
    """Returns the SdmaBackend of a group, wrapped around the backends that it falls back to.

    `opts` is torch's _DistributedBackendOptions (store, group_rank, group_size, timeout, group_id,
    global_ranks_in_group; since 2.14 also split_from). `pg_options` are those of the inner, or
    None; they are copied. Raises ImportError when the extension does not fit this torch,
    ValueError for a wrong PG_SDMA_ variable, and what building the inner raises.
    """
    extension = _extension.load()
    settings = read_settings(os.environ)
    devices = device_types(opts.store, settings.inner)
    inners = {
        device: build_inner(settings.inner_backend(device), device, opts, pg_options)
        for device in devices
    }
    _set_up_process(extension)
    # Empty where it is the default group, whose ranks are the global ones.
    global_ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    global_rank = global_ranks[opts.group_rank]
    return extension.SdmaBackend(
        opts.store,
        opts.group_rank,
        opts.group_size,
        inners=inners,
        settings={
            **dataclasses.asdict(settings),
            "agreed": settings.agreed(),
            "inject": settings.inject_on(global_rank),
            "hip": torch.version.hip is not None,
            "no_device_sums": kernels.why_none(),
            "whole_job": _has_whole_job(global_ranks),
            **dataclasses.asdict(mori_transport.where(settings)),
            "tuned": tuning.bounds_for(settings, devices, opts.group_size),
        },
        group_name=opts.group_id,
        timeout=opts.timeout,
        global_ranks=global_ranks,
    )


def device_types(store: Any, named: Container[str] = ()) -> tuple[str, ...]:
    """Which device types the group's backend is being created for, read off `store`.

    torch does not say. It prefixes the store with the device type: "cuda" for "cpu:gloo,cuda:sdma",
    "cpu" for "cpu:sdma"; but "cpu" also, once, for bare "sdma", whose one backend serves both. So
    "cpu" brings "cuda" along where this process sees a GPU, or where `named` (the device types
    that PG_SDMA_INNER names) has it.
    """
    key = f"device_type/{uuid.uuid4()}"
    store.set(key, "")
    is_for_cuda = store.underlying_store.check([f"cuda//{key}"])
    with contextlib.suppress(RuntimeError):  # a Store of the program's own may keep its keys
        store.delete_key(key)
    if is_for_cuda:
        return ("cuda",)
    return ("cpu", "cuda") if "cuda" in named or torch.cuda.device_count() > 0 else ("cpu",)


def _has_whole_job(global_ranks: Sequence[int]) -> bool:
    """Whether every rank of the default group is among `global_ranks`, in its place."""
    world = c10d._world.default_pg
    return world is None or list(global_ranks) == list(range(world.size()))


def _log(line: str, warning: str) -> None:
    """A warning is one for the first group that it is about: the others say the same."""
    level = logging.WARNING if warning and _is_new(warning) else logging.INFO
    logging.getLogger("pg_sdma").log(level, line)


_warned: set[str] = set()


def _is_new(warning: str) -> bool:
    is_new = warning not in _warned
    _warned.add(warning)
    return is_new


@functools.cache
def _set_up_process(extension: ModuleType) -> None:
    extension.set_log(_log)
    extension.set_kernels(kernels.compile_for)
    extension.set_mori(mori_transport.Offer)
    atexit.register(_detach_live_groups, extension)


def _detach_live_groups(extension: ModuleType) -> None:
    """Leaves the groups of a program that ends without destroy_process_group.

    torch then calls no shutdown, and the destructors run late or never. Peers may count on what is
    pending, so this waits for it, as destroying the groups does.
    """
    extension.detach([backend for group in c10d._world.pg_map for backend in sdma_backends(group)])
