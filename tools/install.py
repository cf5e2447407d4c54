"""Installs this working copy in the active environment, with a line for each file compiled.

pip hides what a build says, and with --verbose shows commands of a thousand characters. Where the
build fails all of it is shown.
"""

from __future__ import annotations

import re
import subprocess
import sys

PIP = (sys.executable, "-m", "pip", "install", "--verbose", "--no-build-isolation", "--no-deps")
# As ninja begins a line, and the file that the command in it compiles.
COMPILED = re.compile(r"\s*\[(\d+)/(\d+)\].* -c \S*?(csrc/\S+)")


def main() -> int:
    said = []
    pip = subprocess.Popen(
        [*PIP, "--editable", "."], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert pip.stdout is not None
    print("installing pg_sdma", flush=True)
    for line in pip.stdout:
        said.append(line)
        if found := COMPILED.match(line):
            number, of, file = found.groups()
            print(f"compiled {number:>2} of {of}: {file}", flush=True)
    if pip.wait() != 0:
        print(*said, sep="", end="", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main())
