"""Builds pg_sdma._C against the torch of the active environment: g++ and torch, no GPU toolkit."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    sys.exit(
        f"pg_sdma is built against the torch you run, and this build cannot import it: {error}.\n"
        "Build isolation hides the environment's torch. In an environment that has torch, run:\n\n"
        "    pip install 'setuptools>=77.0.3,<82' wheel ninja\n"
        "    pip install --no-build-isolation .\n\n"
        "(Without ninja the build works too, one file at a time.)"
    )

if not (2, 11) <= tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 15):
    sys.exit(
        f"pg_sdma needs torch 2.11 to 2.14, this environment has {torch.__version__}: "
        "install one of those, then build again."
    )


class Build(BuildExtension):
    """torch's build_ext, which also leaves word beside the extension of what it was built for."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:
            # pip hands out a fresh directory each time, which would compile everything again.
            self.build_temp = str(ROOT / "build" / "editable")

    def run(self) -> None:
        super().run()
        extension = Path(self.get_ext_fullpath("pg_sdma._C"))
        extension.with_name("built_for_torch.txt").write_text(torch.__version__)

    def build_extensions(self) -> None:
        # Two C++ libraries in one process crash at the first formatted number.
        if not self._links_shared_libstdcxx():
            sys.exit(
                "this compiler links libstdc++ statically, and torch brings a shared one: build "
                "with another, such as `CC=/usr/bin/gcc CXX=/usr/bin/g++ pip install ...`"
            )
        super().build_extensions()

    def _links_shared_libstdcxx(self) -> bool:
        """Asks the compiler that is about to compile everything, by two lines."""
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "print.cpp"), Path(folder, "print.so")
            source.write_text("#include <iostream>\nvoid print() { std::cout << 1.5; }\n")
            objects = self.compiler.compile(
                [str(source)], output_dir=folder, extra_postargs=["-fPIC"]
            )
            self.compiler.link_shared_object(objects, str(library), target_lang="c++")
            return b"libstdc++.so" in library.read_bytes()


flags = ["-std=c++20", "-O2", "-g1", "-Wall", "-Wextra", "-Wno-unused-parameter"]
flags += ["-fvisibility=hidden"]
link = []
if sanitizer := os.environ.get("PG_SDMA_SANITIZE"):
    flags += [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"]
    link += [f"-fsanitize={sanitizer}"]


def files(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


setup(
    ext_modules=[
        CppExtension(
            "pg_sdma._C",
            files("csrc/**/*.cpp"),
            depends=files("csrc/**/*.h"),
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args=flags,
            extra_link_args=link,
            define_macros=[("PG_SDMA_BUILT_FOR_TORCH", f'"{torch.__version__}"')],
        )
    ],
    cmdclass={"build_ext": Build},
)
