"""What the speed of the direct route depends on in this machine."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")
NVIDIA_MODULE = Path("/proc/driver/nvidia/version")
AMD_MODULE = Path("/sys/module/amdgpu/version")


def host() -> str:
    """The machine's name in its network."""
    return platform.node()


def device_name(device_type: str) -> str:
    """The product behind "cpu" or "cuda": of the CPUs also their number.

    "cuda" initialises torch's CUDA, where it can, and asks for the current device.
    """
    if device_type == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{_processor()}, {os.cpu_count()} cores"


def driver(device_type: str) -> str:
    """Version of what moves the bytes of "cpu" or "cuda" tensors: the kernel, or the GPU's driver.

    "unknown" where there is no driver, or it does not say.
    """
    if device_type == "cpu":
        return platform.release()
    module = AMD_MODULE if torch.version.hip else NVIDIA_MODULE
    text = _text(module)
    found = re.search(r"\d+\.\d+[.\d]*", text)
    return found[0] if found else "unknown"


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text(CPU_INFO), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
