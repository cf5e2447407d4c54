"""Which parameters ZeRO-2 reduces together, who owns what of them, and how much memory it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.gpt import GPT, PRESETS
from pg_sdma.zero2 import Zero2, gradient_bytes
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


@pytest.mark.parametrize(("world_size", "mib"), [(1, 340), (2, 221), (4, 162), (8, 132)])
def test_the_formula_gives_the_sizes_of_gpt_2(world_size: int, mib: int) -> None:
    with torch.device("meta"):
        model = GPT(PRESETS["gpt2-124m"])
    assert model.parameter_count() == 124_475_904
    assert round(formula(model, world_size) / MIB) == mib


@pytest.fixture(params=[2, 4, 8])
def world_size(request: pytest.FixtureRequest) -> Iterator[int]:
    """A group of this size in which peers are only said to be there."""
    size: int = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
    yield size
    dist.destroy_process_group()


def test_the_gradients_of_gpt_2_take_what_the_formula_says(world_size: int) -> None:
    with torch.device("meta"):
        model = GPT(PRESETS["gpt2-124m"]).bfloat16()
    model.to_empty(device="cpu")
    model.head.weight = model.tokens.weight  # which to_empty has torn apart
    before = live_bytes()
    zero = Zero2(model, model.blocks, master_dtype=None)
    expected = formula(model, world_size)
    assert zero.gradient_bytes == pytest.approx(expected, rel=0.01)
    assert live_bytes() - before == pytest.approx(expected, rel=0.01)


def formula(model: GPT, world_size: int) -> int:
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return gradient_bytes(blocks, model.parameter_count() - sum(blocks), world_size)


def live_bytes() -> int:
    """Bytes of all tensors' memory in this process, whoever has made them."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device.type == "cpu"
    }
    return sum(storages.values())
