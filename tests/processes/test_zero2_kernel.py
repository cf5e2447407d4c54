"""The Triton kernel, run by Triton's interpreter, against its ATen form: equal in every bit."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NIGHTLY = pytest.mark.nightly

# In a process of its own: Triton reads the variable when it is imported.
PROGRAM = """
import itertools, secrets, torch
from pg_sdma.zero2 import kernel, rounding

dtypes = (torch.bfloat16, torch.float32)
places = ((0, 5000, 5000), (4000, 5000, 10000), (9000, 1000, 12345), (8192, 4096, 20000))
cases = list(itertools.product(dtypes, dtypes, places, (False, True)))
for shard_dtype, dtype, (first, size, numel), overwrite in cases:
    key = rounding.Key(secrets.randbits(64), *(secrets.randbits(32) for _ in range(3)))
    gradient = torch.randn(numel).to(dtype)
    gradient[first + 3 : first + 6] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    shard = torch.randn(size).to(shard_dtype)
    results = []
    for module in (kernel, rounding):
        result = shard.clone(), gradient.clone()
        module.accumulate(*result, first, 1 / 3, overwrite, key)
        assert not result[1].any()
        results.append(result[0])
    bits = torch.int16 if shard_dtype == torch.bfloat16 else torch.int32
    assert torch.equal(*(result.view(bits) for result in results)), (dtype, first, overwrite)
print(len(cases), "cases")
"""


@pytest.mark.parametrize("where", ["where there is one", pytest.param("always", marks=NIGHTLY)])
def test_the_kernel_equals_its_aten_form(where: str) -> None:
    if where != "always" and find_spec("triton") is None:
        pytest.skip("no Triton here; the nightly tests need it")
    source = Path(__file__).parents[2] / "src"
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.run(
        (sys.executable, "-c", PROGRAM), env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "32 cases\n"
