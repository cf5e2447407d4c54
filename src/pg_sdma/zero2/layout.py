"""Which parameters are reduced together, and where each lies in what they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ALIGNMENT = 16  # bytes: what matrix products want of a weight's address
MAX_NUMEL = 2**35  # of a unit: beyond, its random numbers would repeat


@dataclass(frozen=True)
class Piece:
    """One parameter's place in its unit's flat tensor, in elements."""

    name: str
    start: int
    shape: torch.Size
    stride: tuple[int, ...]  # dense: a channels_last weight stays one

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """The parameter within its unit's flat tensor."""
        return flat[self.start : self.stop].as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Unit:
    """Parameters of one dtype whose gradients are reduced in one operation, as one flat tensor.

    The flat tensor is their concatenation, each aligned, padded to a multiple of the group's size:
    every rank owns an equal part of it, a shard. What comes where does not depend on that size.
    """

    index: int
    name: str  # of the module that the parameters are of
    block: bool  # shares gradient buffers with other blocks
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    world_size: int

    @property
    def shard_numel(self) -> int:
        return _aligned(-(-self.pieces[-1].stop // self.world_size), self.dtype)

    @property
    def numel(self) -> int:
        """Elements of the flat tensor, padding included."""
        return self.shard_numel * self.world_size

    def owned(self, rank: int) -> Iterator[tuple[Piece, int, int]]:
        """The pieces that the rank's shard has a part of, each with the part's start and stop
        within the shard."""
        first = rank * self.shard_numel
        for piece in self.pieces:
            start = max(piece.start - first, 0)
            stop = min(piece.stop - first, self.shard_numel)
            if start < stop:
                yield piece, start, stop


def units(model: nn.Module, blocks: Sequence[nn.Module], world_size: int) -> list[Unit]:
    """The units of the model's trainable parameters, in the order in which they are named.

    Each block is one, and so is every other module that has parameters itself (an embedding, the
    last norm); a parameter of several blocks counts as outside of them. Parameters of several
    dtypes make a unit for each.

    Raises ValueError for a block that is not the model's, or that shares a module with another;
    TypeError for a block that is no module, or a parameter that is no dense fp32 or bf16 tensor.
    """
    for block in blocks:
        if not isinstance(block, nn.Module):
            raise TypeError(
                f"a block is a {type(block).__name__}: `blocks` is one flat list of modules"
            )
    names = {module: name for name, module in model.named_modules()}
    block_of: dict[nn.Module, nn.Module] = {}
    for block in blocks:
        if block not in names:
            raise ValueError(f"a block of type {type(block).__name__} is no part of the model")
        for module in block.modules():
            if module in block_of:
                raise ValueError(f"{names[module]} is in two blocks: a block is reduced as a whole")
            block_of[module] = block
    homes: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for module in names:
        for parameter in module.parameters(recurse=False):
            homes[parameter].add(block_of.get(module, module))

    members: dict[tuple[str, bool, torch.dtype], list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel():
            _check(name, parameter)
            home, *others = homes[parameter]
            inside = not others and home in block_of
            owner = names[home] if inside else name.rpartition(".")[0]
            # The root has no name of its own, and messages have to call it something.
            members[owner or type(model).__name__, inside, parameter.dtype].append(
                (name, parameter)
            )
    made = [
        Unit(index, owner, inside, dtype, _pieces(parameters, dtype), world_size)
        for index, ((owner, inside, dtype), parameters) in enumerate(members.items())
    ]
    for unit in made:
        if unit.numel > MAX_NUMEL:
            raise ValueError(f"{unit.name} has {unit.numel} parameters: at most 2**35 in one block")
    return made


def gradient_bytes(
    blocks: Iterable[int],
    others: int,
    world_size: int,
    *,
    buffers: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    shard_dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes of gradients that one rank keeps, padding left aside.

    `blocks` are the numbers of parameters of each block, `others` that of all outside of blocks:
    `buffers` of the largest block and one of the others, in `dtype`, and of everything one part in
    `world_size`, in `shard_dtype`.
    """
    blocks = list(blocks)
    buffered = min(buffers, len(blocks)) * max(blocks, default=0) + others
    shards = -(-(sum(blocks) + others) // world_size)
    return buffered * dtype.itemsize + shards * shard_dtype.itemsize


def _pieces(parameters: list[tuple[str, nn.Parameter]], dtype: torch.dtype) -> tuple[Piece, ...]:
    pieces = []
    start = 0
    for name, parameter in parameters:
        dense = torch.empty_like(parameter, device="meta").stride()
        pieces.append(Piece(name, start, parameter.shape, dense))
        start = _aligned(pieces[-1].stop, dtype)
    return tuple(pieces)


def _aligned(numel: int, dtype: torch.dtype) -> int:
    unit = ALIGNMENT // dtype.itemsize
    return -(-numel // unit) * unit


def _check(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise TypeError(f"{name} is sharded already (a DTensor): ZeRO-2 shards plain parameters")
    if parameter.is_meta:
        raise ValueError(
            f"{name} is on the meta device: give the model memory and values first (to_empty, and "
            "then its initialisation or a checkpoint)"
        )
    if parameter.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{name} is {parameter.dtype}: ZeRO-2 shards float32 and bfloat16")
    if parameter.layout != torch.strided:
        raise TypeError(f"{name} is {parameter.layout}: ZeRO-2 shards dense tensors")
