"""Finds what pg_sdma uses of an installed mori, by import and by signature.

tests/contract compares the names with the source of the release that they were read in.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# How AllgatherSdma and, in mori of May 2026, AllGatherIntoTensor are used here: arguments' names.
SDMA_ARGUMENTS = ("my_pe", "npes", "input_buffer_size", "output_buffer_size", "copy_output_to_user")
SDMA_CALL = ("input_data", "output_data", "count", "stream", "capturing")
SDMA_LANDED = ("dtype", "device")
TENSOR_ARGUMENTS = ("my_pe", "npes", "input_buffer_size", "output_buffer_size")
TENSOR_CALL = ("input_ptr", "output_ptr", "count", "dtype", "stream")
INIT_ARGUMENTS = ("flags", "rank", "nranks", "unique_id")


class Refused(RuntimeError):
    """Why this rank cannot use mori; the message is for the group's log."""


@dataclass(frozen=True)
class Library:
    """What an installed mori has of what is used here."""

    collective: Any  # the class
    dtype: Any  # what its calls name bytes by; None where they take tensors
    shmem: ModuleType


def find() -> Library:
    """Imports mori, told to use SDMA, and looks for a class with the arguments used here.

    Raises Refused with the reason: nothing that importing mori raises (ImportError, OSError where
    ROCm is not there, RuntimeError) gets out otherwise.
    """
    # mori reads it when its context comes to be, and its kernels fault on a context without.
    asked = os.environ.setdefault("MORI_ENABLE_SDMA", "1")
    if asked.strip().lower() in ("", "0", "false", "no", "off"):
        raise Refused(f"MORI_ENABLE_SDMA={asked}")
    try:
        ccl = importlib.import_module("mori.ccl")
        shmem = importlib.import_module("mori.shmem")
    except Exception as error:
        raise Refused(f"mori cannot be imported: {_told(error)}") from error
    for function in ("shmem_get_unique_id", "shmem_mype", "shmem_npes"):
        if not callable(getattr(shmem, function, None)):
            raise Refused(f"this mori has no shmem.{function}")
    _check(getattr(shmem, "shmem_init_attr", None), INIT_ARGUMENTS, "shmem.shmem_init_attr")
    if not hasattr(shmem, "MORI_SHMEM_INIT_WITH_UNIQUEID"):
        raise Refused("this mori has no shmem.MORI_SHMEM_INIT_WITH_UNIQUEID")
    why_not = []
    for look in (_allgather_sdma, _all_gather_into_tensor):
        try:
            return Library(*look(ccl), shmem=shmem)
        except Refused as error:
            why_not.append(str(error))
    raise Refused("; ".join(why_not))


def _allgather_sdma(ccl: ModuleType) -> tuple[Any, Any]:
    found = _attribute(ccl, "AllgatherSdma")
    _check(found, SDMA_ARGUMENTS, "ccl.AllgatherSdma")
    # Without `capturing` every call would hold up the host until the peers have come.
    _check(found.__call__, SDMA_CALL, "ccl.AllgatherSdma's call")
    landed = getattr(found, "get_output_transit_buffer", None)
    _check(landed, SDMA_LANDED, "ccl.AllgatherSdma.get_output_transit_buffer")
    return found, None


def _all_gather_into_tensor(ccl: ModuleType) -> tuple[Any, Any]:
    found = _attribute(ccl, "AllGatherIntoTensor")
    # Compiled: its signatures are in its documentation.
    for method, names in (("__init__", TENSOR_ARGUMENTS), ("__call__", TENSOR_CALL)):
        signature = str(getattr(getattr(found, method, None), "__doc__", ""))
        missing = [name for name in names if f"{name}:" not in signature]
        if missing:
            raise Refused(f"ccl.AllGatherIntoTensor.{method} does not take {', '.join(missing)}")
    dtypes = _attribute(ccl, "DataType")
    if not hasattr(dtypes, "Uint8"):
        raise Refused("this mori has no ccl.DataType.Uint8")
    return found, dtypes.Uint8


def _attribute(ccl: ModuleType, name: str) -> Any:
    try:
        return getattr(ccl, name)
    except (AttributeError, ImportError):  # mori's own __getattr__ raises the latter
        raise Refused(f"this mori has no ccl.{name}") from None


def _check(function: Any, names: Sequence[str], what: str) -> None:
    if not callable(function):
        raise Refused(f"this mori has no {what}")
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise Refused(f"{what} tells no signature: {error}") from error
    missing = [name for name in names if name not in taken]
    if missing:
        raise Refused(f"{what} does not take {', '.join(missing)}")


def has_world() -> bool:
    """Whether this process has a SHMEM world. mori's own functions crash where it has none."""
    api = sys.modules.get("mori.shmem.api")
    return bool(getattr(api, "_shmem_module_loaded_gpus", None))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
