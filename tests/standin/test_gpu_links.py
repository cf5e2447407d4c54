"""The links between GPUs that `pg-sdma info` tells, as the driver stand-in has them."""

from __future__ import annotations

import json
import sys

import pytest
from cpp_program import SANITIZE
from standin_programs import LIBRARY, ROOT, built, run

__all__ = ["built"]  # a fixture

# Without the package, which imports torch.
LINKS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from gpu_links import gpus
print(json.dumps([[g.copy_engines, g.links] for g in gpus(sys.argv[2])]))
"""


@pytest.mark.skipif(bool(SANITIZE), reason="Python cannot load a library built with sanitizers")
@pytest.mark.parametrize(
    ("link", "told"), [("nvlink", "NVLink"), ("pcie", "PCIe"), ("none", "no peer access")]
)
def test_links_as_the_driver_stand_in_has_them(link: str, told: str) -> None:
    command = [sys.executable, "-c", LINKS, ROOT / "src" / "pg_sdma", LIBRARY]
    done = run(command, STANDIN_DEVICES="3", STANDIN_LINK=link)
    assert done.returncode == 0, done.stderr
    everyone = range(3)
    assert json.loads(done.stdout) == [
        [None, {str(j): told for j in everyone if j != i}] for i in everyone
    ]
