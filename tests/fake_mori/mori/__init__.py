"""A stand-in for AMD's mori on CPU tensors: same names, arguments and hazards, no GPU.

The ranks are processes of one machine that write into each other's heaps, files that all have
mapped. What amd-mori 1.2.4 does not check is not checked here either: see `ccl.collective`.

Environment: FAKE_MORI_RACE, the share of gathers after whose arrival a rank dawdles before it looks
at its output; FAKE_MORI_PACKET, the longest shard in bytes that is not cut short (1 GiB, as
mori's); FAKE_MORI_ONLY, the one class of the two that there is; FAKE_MORI_BROKEN, `import` or
`init`: what fails.
"""

import importlib
import os

if os.environ.get("FAKE_MORI_BROKEN") == "import":  # as without ROCm
    raise OSError("libamdhip64.so.7: cannot open shared object file: No such file or directory")


def __getattr__(name: str):
    if name in ("ccl", "cpp", "shmem"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
