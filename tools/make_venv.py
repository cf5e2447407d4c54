"""Makes .venv, with the torch of the interpreter that runs this, if it has one.

That torch is used where it lies and never replaced, be it for CUDA, ROCm or the CPU. One is
installed only where there is none.
"""

from __future__ import annotations

import importlib.util
import site
import subprocess
import sys
import venv
from pathlib import Path

VENV = Path(".venv")
TORCH = "torch==2.13.0"
BUILD_TOOLS = ("setuptools>=77.0.3,<82", "wheel", "ninja", "numpy")


def main() -> None:
    if Path(sys.prefix).resolve() == VENV.resolve():
        sys.exit(f"{VENV} is about to be made anew: deactivate it first")
    venv.create(VENV, clear=True, symlinks=True, with_pip=True)
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch:
        link_active_environment()
    run("-m", "pip", "install", "--quiet", *BUILD_TOOLS, *([] if has_torch else [TORCH]))
    print("torch", run("-c", "import torch; print(torch.__version__, torch.__path__[0])"))


def link_active_environment() -> None:
    """Puts the site directories of this interpreter behind those of .venv.

    `--system-site-packages` would not do: from within a virtual environment it means the
    interpreter underneath, which does not have that environment's torch.
    """
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    own = run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    # Read in the order of their names: after "__editable__", which has the sources of this tree.
    link = Path(own, "active_environment.pth")
    link.write_text("".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders))


def run(*arguments: str) -> str:
    """Runs the interpreter of .venv. Returns what it printed; ends this process if it fails."""
    command = [str(VENV / "bin" / "python"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(command)}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
