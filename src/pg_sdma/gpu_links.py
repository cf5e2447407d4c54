"""What a GPU driver reports about copy engines and links between GPUs, for `pg-sdma info`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

# CUdevice_attribute and CUdevice_P2PAttribute of cuda.h.
_ASYNC_ENGINE_COUNT = 40
_NATIVE_ATOMICS = 3


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver numbers them in this process."""

    copy_engines: int | None  # None: the driver does not say
    links: dict[int, str]  # of every other GPU: "NVLink", "PCIe" or "no peer access"


def gpus(library: str = "libcuda.so.1") -> list[Gpu]:
    """The GPUs of CUDA's driver `library`; initialises it, and makes no context.

    Raises OSError where there is no such library, or it fails.
    """
    driver = ctypes.CDLL(library)
    _must(driver.cuInit(0), "cuInit")
    count = ctypes.c_int()
    _must(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    everyone = range(count.value)
    return [
        Gpu(_copy_engines(driver, i), {j: _link(driver, i, j) for j in everyone if j != i})
        for i in everyone
    ]


def _copy_engines(driver: ctypes.CDLL, device: int) -> int | None:
    value = ctypes.c_int()
    failed = driver.cuDeviceGetAttribute(ctypes.byref(value), _ASYNC_ENGINE_COUNT, device)
    return None if failed else value.value


def _link(driver: ctypes.CDLL, device: int, peer: int) -> str:
    """As csrc/engine/driver_manners.cpp tells links apart."""
    value = ctypes.c_int()
    reaches = driver.cuDeviceCanAccessPeer(ctypes.byref(value), device, peer)
    _must(reaches, "cuDeviceCanAccessPeer")
    if not value.value:
        return "no peer access"
    attribute = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, device, peer)
    _must(attribute, "cuDeviceGetP2PAttribute")
    return "NVLink" if value.value else "PCIe"


def _must(result: int, call: str) -> None:
    if result != 0:
        raise OSError(f"{call} gave error {result}")
