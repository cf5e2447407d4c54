"""What docs/security.md says of the control page."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import init_group, run_ranks

SEAL_SEAL, SEAL_SHRINK, SEAL_GROW = 1, 2, 4
F_GET_SEALS = 1034


def page_descriptors():
    names = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return [name for name in names if name.is_symlink() and "pg_sdma" in os.readlink(name)]


def look_at_the_page():
    """The page's names and modes, and what comes of truncating it."""
    import fcntl

    init_group("cpu:sdma")
    output = torch.empty(2)
    dist.all_gather_into_tensor(output, torch.ones(1))
    open_descriptors = page_descriptors()
    [start] = {
        line.split("-")[0]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:pg_sdma" in line
    }
    try:
        [name] = [n for n in os.listdir("/proc/self/map_files") if n.startswith(start + "-")]
        descriptor = os.open(f"/proc/self/map_files/{name}", os.O_RDWR)
    except PermissionError:  # the kernel's, which may want a capability for that
        return open_descriptors, None, None
    seals = fcntl.fcntl(descriptor, F_GET_SEALS)
    refused = []
    for size in (mmap.PAGESIZE, 1 << 30):
        try:
            os.ftruncate(descriptor, size)
        except PermissionError:
            refused.append(size)
    os.close(descriptor)
    dist.all_gather_into_tensor(output, torch.ones(1))  # it is still there
    return open_descriptors, seals, len(refused)


def test_the_page_has_no_descriptor_and_cannot_be_resized():
    for descriptors, seals, refused in run_ranks(2, look_at_the_page, backend=None):
        assert descriptors == []
        if seals is None:
            pytest.skip("this user may not open mapped files")
        assert seals == SEAL_SEAL | SEAL_SHRINK | SEAL_GROW
        assert refused == 2
