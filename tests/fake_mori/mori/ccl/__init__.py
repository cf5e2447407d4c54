import os

from .collective import AllgatherSdma

if os.environ.get("FAKE_MORI_ONLY") == "AllGatherIntoTensor":  # as in May 2026
    from mori.cpp import AllGatherIntoTensor, DataType  # noqa: F401

    del AllgatherSdma
elif os.environ.get("FAKE_MORI_ONLY"):
    del AllgatherSdma


def __getattr__(name: str):
    raise ImportError(f"mori.ccl.{name} is not available — not yet ported to JIT.")
