"""Real text as a stream of bytes, without a tokenizer or a download."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


def load_text(path: Path | None = None) -> Tensor:
    """The bytes of a file, or of all text files below a directory, as a uint8 tensor of shape (n,).

    Without a path: the modules of Python's own standard library, which every machine has. A single
    file is mapped, not read, so it may be larger than memory. Below a directory, files are taken in
    the order of their names and those with NUL bytes at their start are left out as binary.

    Raises FileNotFoundError for a path that does not exist, ValueError where there is no text.
    """
    if path is None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    elif path.is_file():
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty")
        return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    else:
        raise FileNotFoundError(f"no file or directory {path}")
    contents = (file.read_bytes() for file in files)
    text = b"\n".join(content for content in contents if b"\0" not in content[:8192])
    if not text:
        raise ValueError(f"no text files below {path or 'the standard library'}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(frozen=True)
class ByteBatches:
    """Draws training batches: a pure function of seed, step and rank, so that a resumed run goes on
    with exactly the batches that the interrupted one would have seen."""

    text: Tensor  # uint8 (n,)
    batch: int  # sequences of one rank
    seq: int  # bytes of one sequence
    seed: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if len(self.text) <= self.seq:
            raise ValueError(f"a text of {len(self.text)} bytes has no sequence of {self.seq} + 1")

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one step, each int64 (batch, seq); targets are one byte ahead."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(
            len(self.text) - self.seq, (self.world_size, self.batch), generator=generator
        )[self.rank]
        windows = torch.stack([self.text[s : s + self.seq + 1] for s in starts.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]
