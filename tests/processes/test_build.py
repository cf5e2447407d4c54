"""What a build says when it cannot go on, and that what it makes can be installed and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
COMMAND = "pip install --no-build-isolation ."


def run(*command, cwd=ROOT, **env):
    """Runs a command; returns its exit code and all that it wrote."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def fake_torch(folder, version):
    """A package that looks like torch `version` to setup.py."""
    extension = folder / "torch" / "utils" / "cpp_extension.py"
    extension.parent.mkdir(parents=True)
    extension.write_text("class BuildExtension: pass\nclass CppExtension: pass\n")
    (folder / "torch" / "__init__.py").write_text(f"__version__ = '{version}'\n")
    return str(folder)


def test_a_build_that_sees_no_torch_names_the_command(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')\n")
    code, output = run(sys.executable, "setup.py", "--version", PYTHONPATH=str(tmp_path))
    assert code == 1
    assert COMMAND in output
    assert "pip install 'setuptools>=77.0.3,<82' wheel ninja" in output


@pytest.mark.parametrize("version", ["2.10.1+cu128", "2.15.0a0+git1a2b3c4"])
def test_a_build_against_a_torch_out_of_range_stops(tmp_path, version):
    path = fake_torch(tmp_path, version)
    code, output = run(sys.executable, "setup.py", "--version", PYTHONPATH=path)
    assert code == 1
    assert f"needs torch 2.11 to 2.14, this environment has {version}" in output


def test_a_compiler_with_a_static_libstdcxx_is_refused_before_it_compiles_all(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec g++ -static-libstdc++ "$@"\n'
    )
    compiler.chmod(0o755)
    made = ("--build-temp", tmp_path / "temp", "--build-lib", tmp_path / "lib")
    code, output = run(
        sys.executable, "setup.py", "build_ext", *made, CC=str(compiler), CXX=str(compiler)
    )
    assert code == 1
    assert "this compiler links libstdc++ statically" in output
    assert "csrc/" not in (tmp_path / "calls").read_text()


PIP = """
import os, sys
assert "--verbose" in sys.argv and sys.argv[-2:] == ["--editable", "."]
print("  [1/2] c++ -MMD -MF /a/csrc/module.o.d -O3 -c /a/csrc/module.cpp -o /a/csrc/module.o -g1")
print("  error: no such thing")
sys.exit(int(os.environ["CODE"]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_an_installation_tells_each_file_and_all_that_it_said_when_it_fails(tmp_path, code):
    (tmp_path / "pip.py").write_text(PIP)
    told, output = run(sys.executable, "tools/install.py", PYTHONPATH=str(tmp_path), CODE=str(code))
    assert told == code
    assert "compiled  1 of 2: csrc/module.cpp\n" in output
    assert ("error: no such thing" in output) == (code != 0)
    assert ("-MMD" in output) == (code != 0)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources, without what earlier builds left."""
    copy = tmp_path_factory.mktemp("tree") / "pg_sdma"
    left = shutil.ignore_patterns(".*", "build", "dist", "out", "*.so", "*.egg-info", "built_for*")
    shutil.copytree(ROOT, copy, ignore=left)
    return copy


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [[], ["--no-build-isolation"]], ids=["isolated", "not isolated"]
)
def test_pip_in_an_environment_without_torch_shows_the_command(tree, tmp_path, options):
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    code, output = run(python, "-m", "pip", "install", "setuptools>=77.0.3,<82", "wheel")
    assert code == 0, output
    code, output = run(python, "-m", "pip", "install", *options, ".", cwd=tree)
    assert code == 1
    assert COMMAND in output


GATHER = """
import torch, torch.distributed as dist, pg_sdma
dist.init_process_group("cpu:sdma", store=dist.HashStore(), rank=0, world_size=1)
output = torch.empty(3)
dist.all_gather_into_tensor(output, torch.arange(3.0))
print(pg_sdma.__version__, output.tolist(), pg_sdma.__file__)
"""


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_source_distribution_installs_without_ninja_and_runs(tree, tmp_path):
    code, output = run(
        sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, cwd=tree
    )
    assert code == 0, output
    (sdist,) = tmp_path.glob("pg_sdma-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"csrc/module.cpp", "csrc/engine/engine.h", "LICENSE", "src/pg_sdma/py.typed"} <= {
        *names
    }
    assert not [name for name in names if name.endswith((".so", "built_for_torch.txt"))]

    ninja = tmp_path / "ninja"  # found first, and of no use
    ninja.write_text("#!/bin/sh\nexit 1\n")
    ninja.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    target = tmp_path / "target"
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--target", target)
    code, output = run(sys.executable, "-m", "pip", "install", "-v", *options, sdist, PATH=path)
    assert code == 0, output
    assert "could not find ninja" in output
    assert (target / "pg_sdma" / "built_for_torch.txt").read_text() == torch.__version__

    code, output = run(sys.executable, "-c", GATHER, cwd=tmp_path, PYTHONPATH=str(target))
    assert code == 0, output
    assert output.splitlines()[-1].split("] ")[1] == str(target / "pg_sdma" / "__init__.py")
    assert "[0.0, 1.0, 2.0]" in output
