"""NVIDIA's Multi-Process Service, by which the processes of several ranks share one GPU.

Without it their work takes turns in time slices, and a rank that waits for another holds it up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"


def available() -> bool:
    return shutil.which(CONTROL) is not None


@contextmanager
def daemon() -> Iterator[dict[str, str]]:
    """Runs a daemon of our own, beside any other. Gives the environment that makes its clients.

    Processes that had a CUDA context before are none of them. Raises CalledProcessError where the
    daemon does not start.
    """
    # The daemon may still write its log when it has been told to quit.
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        client = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }
        for path in client.values():
            os.mkdir(path)
        env = {**os.environ, **client}
        # The daemon would number the GPUs anew, and its clients would choose among those again.
        env.pop("CUDA_VISIBLE_DEVICES", None)
        quiet = subprocess.DEVNULL
        # Not captured: the daemon would keep the pipe open.
        subprocess.run([CONTROL, "-d"], env=env, stdout=quiet, check=True, timeout=60)
        try:
            yield client
        finally:
            # Clients that are still there, because a test was killed, get that many seconds.
            command = "quit -t 10\n"
            subprocess.run(
                [CONTROL], input=command, text=True, env=env, stdout=quiet, check=True, timeout=60
            )
