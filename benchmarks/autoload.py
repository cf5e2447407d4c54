"""How much longer `import torch` takes because pg_sdma is installed.

    python benchmarks/autoload.py --repeats 20

Starts interpreters that import torch, in turn with TORCH_DEVICE_BACKEND_AUTOLOAD=1 and =0. Prints
medians of the wall time and the CPU time of the import; a busy machine disturbs CPU time less. The
last row times only the step that the variable switches off. What other packages load in that step
is in these figures, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

PROGRAM = """
from time import perf_counter, process_time

def clocks():
    return perf_counter(), process_time()

start = clocks()
import torch
end = clocks()
if {step}:
    start = clocks()
    torch._import_device_backends()
    end = clocks()
print(*(1000 * (after - before) for before, after in zip(start, end)))
"""


def milliseconds(autoload: bool, step: bool = False) -> list[float]:
    """Wall and processor time of `import torch`, or of its autoload `step`, in a new process."""
    return [
        float(number)
        for number in subprocess.run(
            [sys.executable, "-c", PROGRAM.format(step=step)],
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.split()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="What autoload adds to `import torch`.")
    parser.add_argument("--repeats", type=int, default=20, help="rounds of 3 imports (default 20)")
    repeats = parser.parse_args().repeats
    milliseconds(autoload=True)  # fills the file cache
    rounds = [
        (milliseconds(True), milliseconds(False), milliseconds(False, step=True))
        for _ in range(repeats)
    ]
    print(f"medians of {repeats}, ms              wall  processor")
    names = ("import torch", "import torch without autoload", "autoload by itself")
    for name, times in zip(names, zip(*rounds, strict=True), strict=True):
        wall, processor = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:30}{wall:10.1f}{processor:10.1f}")


if __name__ == "__main__":
    main()
