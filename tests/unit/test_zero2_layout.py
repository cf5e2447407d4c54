"""Which parameters ZeRO-2 reduces together, who owns what of them, and the formula of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from common.gpt import GPT, PRESETS, GPTConfig
from pg_sdma.zero2 import gradient_bytes
from pg_sdma.zero2.layout import Unit, units

MIB = 2**20


class Model(nn.Module):
    """Blocks of several sizes and dtypes, one frozen parameter, one shared by two blocks, one of a
    block and of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, size) for size in (5, 1, 11, 2))
        self.blocks[1].to(torch.bfloat16)
        self.blocks[2].bias.requires_grad_(False)
        self.blocks[2].shared = self.blocks[3].shared = nn.Parameter(torch.randn(2, 2))
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 2)
        self.head.weight = self.blocks[3].weight
        self.empty = nn.Parameter(torch.randn(0))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_element_has_one_owner(world_size: int) -> None:
    model = Model()
    parameters = dict(model.named_parameters())
    owned = {
        name: torch.zeros(p.numel(), dtype=torch.int)
        for name, p in parameters.items()
        if p.requires_grad and p.numel()
    }
    for unit in units(model, list(model.blocks), world_size):
        assert unit.numel == unit.shard_numel * world_size
        assert unit.shard_numel * unit.dtype.itemsize % 16 == 0
        for rank in range(world_size):
            for piece, start, stop in unit.owned(rank):
                first = rank * unit.shard_numel + start - piece.start
                owned[piece.name][first : first + stop - start] += 1
                assert piece.start * unit.dtype.itemsize % 16 == 0
    for name, count in owned.items():
        assert (count == 1).all(), name


def test_a_block_is_a_unit_and_so_is_every_other_module_with_parameters() -> None:
    model = Model()
    found = [
        (unit.name, unit.block, unit.dtype, [piece.name for piece in unit.pieces])
        for unit in units(model, list(model.blocks), 2)
    ]
    fp32, bf16 = torch.float32, torch.bfloat16
    assert found == [
        ("embedding", False, fp32, ["embedding.weight"]),
        ("blocks.0", True, fp32, ["blocks.0.weight", "blocks.0.bias"]),
        ("blocks.1", True, bf16, ["blocks.1.weight", "blocks.1.bias"]),
        ("blocks.2", True, fp32, ["blocks.2.weight"]),
        ("blocks.2", False, fp32, ["blocks.2.shared"]),
        ("blocks.3", False, fp32, ["blocks.3.weight"]),
        ("blocks.3", True, fp32, ["blocks.3.bias"]),
        ("norm", False, fp32, ["norm.weight", "norm.bias"]),
        ("head", False, fp32, ["head.bias"]),
    ]


def test_parameters_of_the_root_have_its_name() -> None:
    model = Model()
    model.scale = nn.Parameter(torch.ones(()))
    assert next(unit.name for unit in units(model, [], 2) if unit.numel == 8) == "Model"


def test_a_parameter_keeps_its_strides() -> None:
    model = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
    for unit in units(model, [model], 2):
        flat = torch.arange(unit.numel, dtype=torch.float32)
        for piece in unit.pieces:
            parameter = model.get_parameter(piece.name)
            view = piece.view(flat)
            assert view.stride() == parameter.stride()
            assert sorted(view.flatten().tolist()) == list(range(piece.start, piece.stop))


def test_places_do_not_depend_on_the_number_of_ranks() -> None:
    def places(world_size: int) -> list[tuple[Unit, ...]]:
        return [unit.pieces for unit in units(Model(), [], world_size)]  # type: ignore[misc]

    assert places(2) == places(7)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda m: [nn.Linear(1, 1)], ValueError, "no part of the model"),
        (lambda m: [m, m.norm], ValueError, "norm is in two blocks"),
        (lambda m: [m.norm, m.norm], ValueError, "norm is in two blocks"),
        (lambda m: [list(m.blocks)], TypeError, "a block is a list: `blocks` is one flat list"),
        (lambda m: m.to("meta") and [], ValueError, r"embedding\.weight is on the meta device"),
        (lambda m: m.head.double() and [], TypeError, r"blocks\.3\.weight is torch\.float64"),
        (lambda m: m.norm.half() and [], TypeError, r"norm\.weight is torch\.float16"),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    change: Callable[[Model], list[nn.Module]], error: type[Exception], words: str
) -> None:
    model = Model()
    with pytest.raises(error, match=words):
        units(model, change(model), 2)


SMALL = PRESETS["gpt2-124m"]
LARGE = replace(SMALL, hidden=1600, layers=48, heads=25)


@pytest.mark.parametrize(
    ("config", "parameters", "world_size", "mib"),
    [
        (SMALL, 124_475_904, 2, 221),
        (SMALL, 124_475_904, 4, 162),
        (SMALL, 124_475_904, 8, 132),
        (LARGE, 1_557_686_400, 8, 645),
    ],
)
def test_the_formula_gives_the_sizes_of_gpt_2(
    config: GPTConfig, parameters: int, world_size: int, mib: int
) -> None:
    with torch.device("meta"):
        model = GPT(config)
    assert model.parameter_count() == parameters
    assert round(formula(model, world_size) / MIB) == mib


def formula(model: GPT, world_size: int) -> int:
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return gradient_bytes(blocks, model.parameter_count() - sum(blocks), world_size)
