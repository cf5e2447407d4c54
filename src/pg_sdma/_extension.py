"""Loads pg_sdma._C, after checking that it was built for the torch that runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import torch

BUILT_FOR = Path(__file__).with_name("built_for_torch.txt")  # setup.py writes it
REINSTALL = "pip install --no-build-isolation --force-reinstall --no-deps"


def load() -> ModuleType:
    """Returns pg_sdma._C. Raises ImportError when it was built for another torch, or not at all.

    c10d has no stable ABI: an extension built for another torch may crash instead of failing to
    load, so its version is compared before it is opened.
    """
    try:
        built = BUILT_FOR.read_text()
    except FileNotFoundError as error:
        raise ImportError(
            f"pg_sdma's C++ extension has not been built: in its source tree run `{REINSTALL} .`"
        ) from error
    running = str(torch.__version__)
    if not same_abi(built, running):
        raise ImportError(
            f"pg_sdma was built for torch {built}, this is torch {running}: reinstall with "
            f"`{REINSTALL} pg-sdma` (or its source directory in place of the name)"
        )
    from pg_sdma import _C

    return _C


def same_abi(built: str, running: str) -> bool:
    """Whether an extension built for torch `built` may be loaded into torch `running`.

    Releases are the same when their numbers are: the suffix ("+cpu", "+cu130", "+rocm7.1") names
    what libtorch drives, not the headers that the extension compiles. Of development builds, such
    as "2.14.0a0+git1a2b3c4", no two are the same unless all of the text is.
    """
    return _abi(built) == _abi(running)


def _abi(version: str) -> str:
    release, _, _ = version.partition("+")
    return release if re.fullmatch(r"[\d.]+", release) else version
