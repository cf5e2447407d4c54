"""Faults, planted one at a time into a copy of the sources: a program of the suite fails on each.

What keeps a rule of the protocol or of the streams is a few characters, and a rule that no test
misses will be lost. faults.py is the list, programs.py what notices them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import FAULTS, Fault
from programs import Program

ROOT = Path(__file__).parents[2]
SECONDS = 60  # for a program, which takes a few


def source_of(fault: Fault, root: Path = ROOT) -> Path:
    """Wherever the file lies by now."""
    [file] = root.glob(f"csrc/**/{fault.file}")
    return file


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_list_is_of_what_the_sources_say(fault: Fault) -> None:
    assert source_of(fault).read_text().count(fault.old) == 1
    assert fault.old != fault.new


class Tree:
    """A copy of the sources that the programs are made of, and what was built of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.library = self.out / "libpgsdma_standin.so"

    def make(self, *targets: Path) -> None:
        command = ["make", "-s", "-j2", "-C", self.folder / "tests/standin", f"OUT={self.out}"]
        # A file that was changed is newer than what was built of it.
        done = subprocess.run([*command, *targets], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def build(self, program: Program) -> Path:
        self.out.mkdir(exist_ok=True)
        target = self.out / program.name
        if (self.folder / "tests/standin" / f"{program.name}.cpp").exists():
            self.make(self.library, target)
            return target
        flags = ["-std=c++20", "-O1", "-pthread", f"-I{self.folder / 'csrc'}"]
        objects = []
        if program.library:
            objects = [
                self.out / file.relative_to(self.folder / "csrc").with_suffix(".o")
                for folder in ("engine", "transport")
                for file in sorted((self.folder / "csrc" / folder).rglob("*.cpp"))
            ]
            self.make(*objects)
        source = self.folder / "tests/cpp" / f"{program.name}.cpp"
        compiler = os.environ.get("CXX", "g++")
        command = [compiler, *flags, source, *objects, "-ldl", "-o", target]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target

    def succeeds(self, program: Program, scratch: Path) -> bool:
        """Builds it and runs it. One that does not end does not succeed."""
        built = self.build(program)
        for index, arguments in enumerate(program.runs):
            empty = scratch / str(index)
            empty.mkdir(parents=True)
            places = {"driver": self.library, "folder": empty}
            command = [built, *(word.format(**places) for word in arguments.split())]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=SECONDS,
                    env=os.environ | dict(pair.split("=") for pair in program.env.split()),
                )
            except subprocess.TimeoutExpired:
                return False
            if done.returncode != program.rc:
                return False
            if not re.search(program.says, done.stdout + done.stderr):
                return False
        return True


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    if not (shutil.which("make") and shutil.which("g++")):
        pytest.skip("make and g++ are needed")
    folder = tmp_path_factory.mktemp("sound")
    for name in ("csrc", "tests/standin", "tests/cpp"):
        shutil.copytree(ROOT / name, folder / name)
    return Tree(folder)


@pytest.fixture(scope="session")
def sound(tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Program], None]:
    """Asserts that a program succeeds where nothing was planted. It is asked once of each."""
    known: set[Program] = set()

    def check(program: Program) -> None:
        if program not in known:
            assert tree.succeeds(program, tmp_path_factory.mktemp("scratch")), program
            known.add(program)

    return check


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_noticed(
    fault: Fault, tree: Tree, sound: Callable[[Program], None], tmp_path: Path
) -> None:
    sound(fault.noticed_by)
    planted = Tree(tmp_path / "planted")
    shutil.copytree(tree.folder, planted.folder)  # with its times, so that make knows what is new
    source = source_of(fault, planted.folder)
    source.write_text(source.read_text().replace(fault.old, fault.new))
    try:
        noticed = not planted.succeeds(fault.noticed_by, tmp_path / "scratch")
    finally:
        shutil.rmtree(planted.folder)
    assert noticed, f"{fault}: {fault.breaks}"
