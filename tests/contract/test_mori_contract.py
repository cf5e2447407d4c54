"""What pg_sdma takes for granted of mori is so in amd-mori 1.2.4, and in the stand-in.

The wheel is never imported. PG_SDMA_MORI_WHEEL has its path; without one `make nightly` downloads
it with pip, and `make test` looks at the stand-in alone.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from mori_contract import COLLECTIVE, LOADED, SHMEM, USED, broken

from pg_sdma import mori_library, mori_transport

VERSION = "1.2.4"
FAKE = Path(__file__).parents[1] / "fake_mori" / "mori"
GIVEN = os.environ.get("PG_SDMA_MORI_WHEEL")

needs_wheel = pytest.mark.nightly if not GIVEN else pytest.mark.filterwarnings("default")


def _download(folder: Path) -> Path:
    for tag in ("manylinux_2_39_x86_64", "manylinux_2_35_x86_64", "linux_x86_64"):
        command = [sys.executable, "-m", "pip", "download", f"amd-mori=={VERSION}", "--no-deps"]
        options = ["--only-binary", ":all:", "--python-version", "3.12", "--platform", tag]
        done = subprocess.run(
            [*command, *options, "--dest", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return next(folder.glob("*.whl"))
    pytest.fail(f"pip cannot download amd-mori {VERSION}: {done.stderr[-500:]}")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `mori` of the wheel, unpacked."""
    folder = tmp_path_factory.mktemp("mori")
    with zipfile.ZipFile(GIVEN or _download(folder)) as packed:
        packed.extractall(folder)
    return folder / "mori"


@needs_wheel
def test_the_wheel_is_as_we_use_it(wheel: Path) -> None:
    assert broken(wheel) == []


def test_the_stand_in_is_as_we_use_mori() -> None:
    assert broken(FAKE) == []


def test_what_an_installed_mori_is_asked_for_is_what_is_used() -> None:
    assert set(mori_library.SDMA_ARGUMENTS) == set(USED.construct)
    assert set(mori_library.SDMA_CALL) == set(USED.call)
    assert set(mori_library.SDMA_LANDED) == set(USED.landed)


# Each name that we use, and the file that has it.
NAMES = [
    *((COLLECTIVE, name) for name in (*USED.construct, *USED.call, *USED.landed)),
    *((COLLECTIVE, name.removeprefix("torch.")) for name in USED.dtypes),
    *((COLLECTIVE, name) for name in ("AllgatherSdma", "get_output_transit_buffer")),
    (COLLECTIVE, "MORI_ENABLE_SDMA"),
    ("ccl/__init__.py", "AllgatherSdma"),
    *((SHMEM, name) for name in (*USED.shmem, *mori_library.INIT_ARGUMENTS, LOADED)),
]


def changes_are_noticed(mori: Path, folder: Path) -> None:
    """Renames one name after another in a copy, and wants every one to be missed."""
    for number, (file, name) in enumerate(dict.fromkeys(NAMES)):
        copy = folder / str(number)
        for part in (COLLECTIVE, SHMEM, "ccl/__init__.py"):
            (copy / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(mori / part, copy / part)
        text = (copy / file).read_text()
        changed, times = re.subn(rf"\b{name}\b", "renamed", text)
        assert times > 0, f"{file} has no {name} to rename"
        (copy / file).write_text(changed)
        assert broken(copy), f"{name} was renamed in {file}, and nothing was missed"


@needs_wheel
def test_a_changed_name_in_the_wheel_is_noticed(wheel: Path, tmp_path: Path) -> None:
    changes_are_noticed(wheel, tmp_path)


def test_a_changed_name_in_the_stand_in_is_noticed(tmp_path: Path) -> None:
    changes_are_noticed(FAKE, tmp_path)


@needs_wheel
def test_the_stand_in_takes_the_wheels_arguments(wheel: Path) -> None:
    def signatures(mori: Path) -> dict[str, str]:
        [gather] = [
            n
            for n in ast.parse((mori / COLLECTIVE).read_text()).body
            if isinstance(n, ast.ClassDef) and n.name == "AllgatherSdma"
        ]
        shmem = ast.parse((mori / SHMEM).read_text()).body
        functions = [n for n in (*gather.body, *shmem) if isinstance(n, ast.FunctionDef)]
        return {n.name: ast.unparse(n.args) for n in functions}

    ours, theirs = signatures(FAKE), signatures(wheel)
    assert ours == {name: theirs[name] for name in ours}


@needs_wheel
def test_what_mori_leaves_unchecked_is_as_the_documentation_says(wheel: Path) -> None:
    collective = (wheel / COLLECTIVE).read_text()
    call = collective[collective.index("class AllgatherSdma") :]
    call = call[call.index("def __call__") : call.index("def enqueue_param_contiguous")]
    assert "(byte_count + 3) // 4" in call  # rounds up to WORD
    assert "(512,)" in call  # threads a block: 64 of them send to one rank
    assert mori_transport.MOST_RANKS == 512 // 64
    include = wheel / "_jit-sources/include/mori"
    packet = (include / "core/transport/sdma/sdma_pkt_struct.h").read_text()
    bits = re.search(r"unsigned int count : (\d+);", packet)
    assert bits and 1 << int(bits[1]) == mori_transport.MOST_AT_ONCE
    kernel = (include / "collective/allgather/oneshot_sdma_kernel.hpp").read_text()
    kernel = kernel[kernel.index("void OneShotAllGatherSdmaKernel_body") :]
    assert "if (warpId < npes && laneId == 0)" in kernel


@needs_wheel
def test_the_variables_that_we_set_are_read(wheel: Path) -> None:
    compiled = b"".join(library.read_bytes() for library in wheel.glob("libmori_*.so"))
    for name in ("MORI_ENABLE_SDMA", "MORI_SHMEM_HEAP_SIZE", "MORI_BOOTSTRAP_TIMEOUT"):
        assert name.encode() in compiled, name


@needs_wheel
def test_no_class_of_older_moris_is_left(wheel: Path) -> None:
    bindings = (wheel / "libmori_pybinds.so").read_bytes()
    assert b"AllgatherSdmaHandle" in bindings
    assert b"AllGatherIntoTensor" not in bindings
