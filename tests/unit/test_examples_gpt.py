"""The examples' model: its size, its causality, and weights that depend on the seed alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.gpt import GPT, PRESETS, VOCABULARY, GPTConfig

TINY = PRESETS["tiny"]


def model(seed: int = 0) -> GPT:
    gpt = GPT(TINY)
    gpt.initialise(seed)
    return gpt


@pytest.fixture
def rank_1_of_2() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    assert dist.group.WORLD is not None
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize(("preset", "billions"), [("1b", 1.2), ("3b", 3.2), ("7b", 6.9)])
def test_presets_have_about_the_parameters_of_their_names(preset: str, billions: float) -> None:
    with torch.device("meta"):
        assert GPT(PRESETS[preset]).parameter_count() == pytest.approx(billions * 1e9, rel=0.02)


def test_heads_must_divide_the_hidden_size() -> None:
    with pytest.raises(ValueError, match="30 is no multiple of 4 heads"):
        GPTConfig(hidden=30, layers=1, heads=4, seq=8)


def test_an_untrained_model_guesses_evenly() -> None:
    tokens = torch.randint(VOCABULARY, (4, TINY.seq + 1))
    loss = model()(tokens[:, :-1], tokens[:, 1:])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(VOCABULARY), abs=0.1)


def test_no_position_sees_a_later_byte() -> None:
    gpt = model()
    logits: list[torch.Tensor] = []
    gpt.head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9] += 1
    for inputs in (tokens, changed):
        gpt(inputs, torch.zeros_like(inputs))
    differs = (logits[0] != logits[1]).any(dim=-1)
    assert differs.tolist() == [False] * 9 + [True] * 7


def test_biases_start_at_zero_and_tied_weights_are_one() -> None:
    gpt = GPT(replace(TINY, biases=True, tied=True, vocabulary=300))
    gpt.initialise(seed=0)
    biases = [p for name, p in gpt.named_parameters() if name.endswith("bias")]
    assert len(biases) == 6 * TINY.layers + 1
    assert not any(bias.any() for bias in biases)
    assert gpt.head.weight is gpt.tokens.weight
    assert gpt.head.weight.shape == (300, TINY.hidden)
    assert gpt.head.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (model(seed).state_dict() for seed in (1, 1, 2))
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, other[name]) == ("norm" in name)


def test_a_shard_is_its_part_of_the_unsharded_model(rank_1_of_2: DeviceMesh) -> None:
    with torch.device("meta"):
        gpt = GPT(TINY)
    fully_shard(gpt, mesh=rank_1_of_2)
    gpt.to_empty(device="cpu")
    gpt.initialise(seed=3)
    whole = model(seed=3).state_dict()
    for name, shard in gpt.state_dict().items():
        assert torch.equal(shard.to_local(), whole[name].chunk(2)[1]), name
