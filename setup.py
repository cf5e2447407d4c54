"""Builds pg_sdma._C against the torch of the active environment: a C++ compiler and torch, no GPU toolkit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import setup

COMMAND = "pip install --no-build-isolation ."

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    sys.exit(
        f"pg_sdma is built against the torch you run, and this build cannot import torch ({error}).\n"
        f"Install torch in the active environment first, then run:\n\n    {COMMAND}\n\n"
        "(build isolation hides the environment's torch; --no-build-isolation shows it.)"
    )

ROOT = Path(__file__).parent
SOURCES = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.cpp"))

flags = ["-std=c++20", "-O2", "-g1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden"]
link = []
if sanitizer := os.environ.get("PG_SDMA_SANITIZE"):
    flags += [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"]
    link += [f"-fsanitize={sanitizer}"]

setup(
    ext_modules=[
        CppExtension(
            "pg_sdma._C",
            SOURCES,
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args=flags,
            extra_link_args=link,
            define_macros=[("PG_SDMA_BUILT_FOR_TORCH", f'"{torch.__version__}"')],
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
